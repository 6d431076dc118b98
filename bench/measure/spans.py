"""Spans of time, start and end in one unit: how much they cover, and how much two kinds share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Span = tuple[float, float]
"""Start and end."""


def measure_covered(spans: Iterable[Span]) -> float:
    """Sum up the covered time, counted once; spans that end before they start cover none."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


def overlap_pct(communication: Sequence[Span], compute: Sequence[Span]) -> float | None:
    """100 x |communication and compute| / |communication|; None where nothing was communicated."""
    total = measure_covered(communication)
    both = total + measure_covered(compute) - measure_covered([*communication, *compute])
    # Of very long traces the difference has few digits.
    return 100 * min(max(both, 0.0), total) / total if total > 0 else None
