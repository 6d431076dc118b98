"""What a caution is; the checks that make them are `stability.py`, `gpu_load.py` and `links.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Caution:
    """Something to know before trusting a run; `case_id` is the worst of the cases concerned, if any."""

    kind: str
    text: str
    advice: str
    case_id: str | None = None

    @property
    def sentence(self) -> str:
        """Say the finding and what to do about it, on one line."""
        return f"{self.text}. Next: {self.advice}"
