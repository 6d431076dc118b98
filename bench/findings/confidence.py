"""Answers how confident one may be of a run's answers, by what they claim."""

from __future__ import annotations

from collections.abc import Sequence

from ..machine.manifest import Record
from ..results.comparisons import TOO_FEW
from .cautions import DIRECTION, SIZES, TRANSFER, WEAKENS, Caution
from .verdicts import Verdict


class Trust(Record, frozen=True, omit_defaults=False):
    """How far to trust the answers of a run, a phrase for each claim that they make."""

    order: str
    """Which is faster."""
    size: str
    """By how much, in this run."""
    next_run: str
    """What another run of the same plan on this machine would give."""
    other_machines: str

    @property
    def lines(self) -> dict[str, str]:
        """The phrases by the claim that they are of."""
        names = ("which is faster", "by how much", "next run", "other machines")
        return dict(zip(names, (self.order, self.size, self.next_run, self.other_machines), strict=True))


def assess_confidence(
    verdicts: Sequence[Verdict],
    cautions: Sequence[Caution],
    *,
    on_cpu: bool,
    load: str = "",
    repeats: str = "",
) -> Trust | None:
    """Assess how reliable the answers of a run are; None without any.

    `load` is as `said_load` says it, `repeats` as `describe_repeatability` does.
    """
    if not verdicts:
        return None
    direction, weak, transfer = (
        ", ".join(one.short or one.kind for one in cautions if WEAKENS[one.kind] == claim)
        for claim in (DIRECTION, SIZES, TRANSFER)
    )
    compared = [one for one in verdicts if one.comparisons]
    order = "reliable" if compared else "nothing is compared"
    if compared and all(one.is_open for one in compared):
        order = "nothing is resolved"
    size = f"ratios hold within their intervals{f', with {weak}' if weak else ''}"
    if all(one.answer == TOO_FEW for one in verdicts):
        size = "not known: too few rounds for intervals"
    changed = f"; ms and rates do not carry over ({transfer})" if transfer else ""
    return Trust(
        order=f"in doubt ({direction})" if direction else order,
        size=f"{size}; {load}" if load else size,
        next_run=f"{repeats}{changed}",
        other_machines="not GPUs: a device here is a CPU core; measure there"
        if on_cpu
        else "depends on GPU, interconnect and PyTorch version: measure there",
    )
