"""Makes the page people review: one self-contained HTML file from one or more runs."""

from __future__ import annotations

from report.build import build

__all__ = ["build"]
