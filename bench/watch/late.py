"""Finds the rank that the others wait for, and the part of its work that makes it late.

A rank's own work is its parts without the broadcast of buffers, and without what its backward takes after its
last bucket is ready, when it waits for communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from ..findings.late_ranks import estimate, find_latest
from ..findings.watched import as_measured
from ..machine.manifest import LateRank
from ..stats.fit import MIN_ROUNDS
from .steps import JoinedStep, Step

OWN_PARTS = ("data", "forward", "backward", "optimizer", "evaluation", "other")

MIN_LATE = 0.1
"""Share of the step by which a rank is later than every other one to be named: what runs on the cores of one
rank for a while makes a few percent."""

MIN_SURE = 0.05
"""Share of the step above which the interval lies, and the medians of all but one quarter of the steps."""

QUARTERS = 4


def own_work_s(step: Step) -> dict[str, float]:
    """Return the seconds of a rank's own work by part; no backward where its end of work is not known."""
    own = {part: step.parts.get(part, 0.0) for part in OWN_PARTS}
    if step.syncs:
        known = all(sync.ready_s and sync.end_s is not None for sync in step.syncs)
        own["backward"] = max(own["backward"] - step.tail_s, 0.0) if known else 0.0
    return own


def find_late_rank(joined: Sequence[JoinedStep]) -> LateRank | None:
    """Find the rank with most work of its own, and whether it is surely late; None without evidence."""
    told = [step for step in joined if all(one.hooked for one in step.values())] or joined
    works = [{rank: own_work_s(one) for rank, one in step.items()} for step in told]
    if len(works) < MIN_ROUNDS or len(works[0]) < 2:
        return None
    step_ms = 1000 * median(max(one.step_s for one in step.values()) for step in told)
    ranks = [*works[0]]
    latest, later_ms = find_latest(
        np.array([[1000 * sum(work[rank].values()) for rank in ranks] for work in works])
    )
    rank = ranks[latest]
    found = estimate(later_ms)
    surely_ms = found.interval(1 - 0.05 / len(ranks)).low
    size = max(len(later_ms) // QUARTERS, 1)
    by_quarter_ms = sorted(median(later_ms[i : i + size]) for i in range(0, len(later_ms) - size + 1, size))
    # One quarter may be disturbed.
    is_late = found.value >= MIN_LATE * step_ms and min(surely_ms, by_quarter_ms[1]) > MIN_SURE * step_ms
    parts = {part: estimate([_beyond_others_ms(work, rank, part) for work in works]) for part in OWN_PARTS}
    return LateRank(
        rank=rank,
        later_ms=as_measured(found.interval()),
        parts={part: as_measured(ms.interval()) for part, ms in parts.items()},
        last_pct=round(100 * sum(ms > 0 for ms in later_ms) / len(later_ms), 1),
        share_pct=round(max(100 * found.value / step_ms, 0.0), 1),
        is_straggler=is_late,
    )


def _beyond_others_ms(work: Mapping[int, Mapping[str, float]], rank: int, part: str) -> float:
    return 1000 * (work[rank][part] - median(own[part] for other, own in work.items() if other != rank))
