"""Says what was found of a user's own training that was watched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..common.numbers import plural, with_interval
from ..common.text import visible
from ..machine.manifest import LateRank, Manifest, Measured, Watched
from ..results.store import RunData
from ..stats.interval import Interval
from .findings import Conclusion, conclude_run

PART_NAMES = {
    "data": "data loading",
    "forward": "its forward",
    "backward": "its backward",
    "optimizer": "its optimizer",
    "evaluation": "evaluation",
    "other": "work outside of the model and the optimizer",
}
"""Parts of a rank's own work in a sentence."""


def as_measured(found: Interval) -> Measured:
    """Turn an interval into what a manifest holds."""
    low, high = (end if math.isfinite(end) else None for end in (found.low, found.high))
    return Measured(estimate=found.estimate, low=low, high=high)


def write_ms(found: Measured | None, unit: str = "ms") -> str:
    """Write milliseconds with their interval; empty when missing."""
    if found is None:
        return ""
    ends = (math.nan if end is None else end for end in (found.low, found.high))
    return with_interval(Interval(found.estimate, *ends), unit)


@dataclass(frozen=True)
class WatchConclusion:
    """What is said of a watched training, on the terminal and on its page."""

    run: Conclusion
    """What its folder shows as that of a run; what a run would do next is no command of the user's."""
    straggler: str
    """Sentence that names the rank which the others wait for; empty without one."""
    notes: tuple[str, ...]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Label and text, answers first."""
        return [
            *((one.title, one.sentence) for one in self.run.verdicts),
            *([("Straggler", self.straggler)] if self.straggler else []),
            *(("", note) for note in self.notes),
            *((f"trust: {claim}", said) for claim, said in self.trust.items()),
        ]

    @property
    def trust(self) -> dict[str, str]:
        """How far to trust the sizes; nothing is compared."""
        lines = self.run.trust.lines if self.run.trust else {}
        return {claim: said for claim, said in lines.items() if claim in ("by how much", "next run")}


def conclude_watch(run: RunData) -> WatchConclusion:
    """Conclude a watched training."""
    watched = run.manifest.watched or Watched()
    notes = tuple(visible(note) for note in (*_count_steps(watched), *watched.notes))
    return WatchConclusion(conclude_run(run), describe_late_rank(run.manifest, watched.late), notes)


def describe_late_rank(manifest: Manifest, late: LateRank | None) -> str:
    """Say which rank the others wait for, by how much and with which part; empty without one."""
    if late is None:
        return ""
    hosts = [one.host for one in manifest.ranks if one.rank == late.rank and len(manifest.hosts) > 1]
    part = max(late.parts, key=lambda part: late.parts[part].estimate)
    return visible(
        f"Rank {late.rank}{f' on {hosts[0]}' if hosts else ''} is a straggler: "
        f"{write_ms(late.later_ms)} later in each step than the others, which wait for it; mostly in "
        f"{PART_NAMES.get(part, part)}, with {write_ms(late.parts[part])}."
    )


def _count_steps(watched: Watched) -> Iterator[str]:
    """Say of how many steps the numbers are, and what watching adds to a step."""
    others = f"; {watched.num_others:,d} consist of other parts" if watched.num_others else ""
    yield f"{plural(watched.num_steps, 'step')} seen, {watched.num_compared:,d} compared{others}."
    if (added := watched.overhead_ms) is None:
        return
    if added.low is not None and added.low > 0:
        yield f"Watching costs {write_ms(added)} a step: steps with the hook minus steps before it."
    elif added.high is not None and added.high > 0:
        yield f"Watching costs at most {added.high:.2g} ms a step: steps with the hook minus steps before it."
