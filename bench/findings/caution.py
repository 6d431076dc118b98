"""What a caution is; the checks that make them are `stability.py`, `gpu_load.py` and `links.py`."""

from __future__ import annotations

from dataclasses import dataclass

MOST_BUSY = 0.05
"""Share of the cores that other programs may use while every core stands in for a device. 5% is the gate's
default threshold: a load of that size can pass for a regression."""

MOST_STEAL = 0.02
"""Share of time that the hypervisor may give to other guests (proc(5), "steal")."""


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
