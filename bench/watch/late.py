"""Finds the rank that the others wait for, and the part of its work that makes it late.

A rank's own work is its parts without the broadcast of buffers and the script's own collectives, and without
what its backward takes after its last bucket is ready: there it waits for other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from ..findings.late_ranks import estimate_typical, find_latest
from ..findings.watched import PART_NAMES, make_measured
from ..machine.watched import LateRank
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import Estimate, Interval
from .rows import Step
from .steps import JoinedStep

WORK_PARTS = tuple(PART_NAMES)

MIN_LATE = 0.1
"""Share of the step by which a rank is later than every other one to be named: what runs on the cores of one
rank for a while makes a few percent."""

MIN_SLOWER = 0.2
"""The same where no part stands out, as on a slower core: equal shared cores were up to 13% apart."""

MIN_CAUSE = 0.8
"""Share of what a rank is later by that is in one part, which then stands out."""

MIN_LOWER_BOUND = 0.05
"""Share of the step above which the interval lies, and the medians of all but one quarter of the steps."""

QUARTERS = 4

MIN_PART = 0.1
"""Share of the whole by which a part is later to be a cause; smaller differences are those of equal ranks."""

CLOCK_ERROR = 0.01
"""Share of the step by which a watched time may be off (docs/watch.md)."""


def get_work_s(step: Step) -> dict[str, float]:
    """Return the seconds of a rank's own work by part; no backward where its end of work is not known."""
    parts = step.split_backward()
    if not all(sync.ready_s and sync.end_s is not None for sync in step.syncs):
        parts = msgspec.structs.replace(parts, backward=0.0)
    return {part: getattr(parts, part) for part in WORK_PARTS}


def find_late_rank(joined: Sequence[JoinedStep]) -> LateRank | None:
    """Find the rank with most work of its own, and whether it is surely late; None without evidence."""
    told = [step for step in joined if all(one.hooked for one in step.values())] or joined
    works = [{rank: get_work_s(one) for rank, one in step.items()} for step in told]
    if len(works) < MIN_ROUNDS or len(works[0]) < 2:
        return None
    step_ms = 1000 * median(max(one.step_s for one in step.values()) for step in told)
    ranks = [*works[0]]
    latest, later_ms = find_latest(
        np.array([[1000 * sum(work[rank].values()) for rank in ranks] for work in works])
    )
    rank = ranks[latest]
    found = estimate_typical(later_ms)
    surely_ms = found.compute_interval(1 - 0.05 / len(ranks)).low
    size = max(len(later_ms) // QUARTERS, 1)
    by_quarter_ms = sorted(median(later_ms[i : i + size]) for i in range(0, len(later_ms) - size + 1, size))
    parts = {
        part: estimate_typical([_compute_lag_ms(work, rank, part) for work in works]) for part in WORK_PARTS
    }
    stands_out = max(ms.value for ms in parts.values()) >= MIN_CAUSE * found.value
    least_ms = (MIN_LATE if stands_out else MIN_SLOWER) * step_ms
    # One quarter may be disturbed.
    is_late = found.value >= least_ms and min(surely_ms, by_quarter_ms[1]) > MIN_LOWER_BOUND * step_ms
    return LateRank(
        rank=rank,
        later_ms=make_measured(_add_systematic_error(found, parts.values(), step_ms)),
        lines=find_lines([step[rank] for step in joined]),
        parts={part: make_measured(ms.compute_interval()) for part, ms in parts.items()},
        share_pct=round(max(100 * found.value / step_ms, 0.0), 1),
        is_straggler=is_late,
    )


def find_lines(steps: Iterable[Step]) -> tuple[str, ...]:
    """Find the user's lines between which a rank does most of its `other` work; none where it is spread."""
    told = [step for step in steps if step.gaps]
    gaps_s: dict[tuple[str, ...], list[float]] = {}
    for step in told:
        for lines in {tuple(lines) for _, *lines in step.gaps}:
            gap_s = sum(seconds for seconds, *others in step.gaps if tuple(others) == lines)
            gaps_s.setdefault(lines, []).append(gap_s)
    most = max(gaps_s, key=lambda lines: median(gaps_s[lines]), default=())
    if not all(most) or not most:
        return ()
    whole_s = median(step.parts.other for step in told)
    return most if median(gaps_s[most]) >= MIN_CAUSE * whole_s else ()


def _add_systematic_error(found: Estimate, parts: Iterable[Estimate], step_ms: float) -> Interval:
    """Widen the interval of the scatter by what steps cannot show, for it is the same in all of them.

    Ranks without a cause differ too, and what follows a pause runs with cold caches.
    """
    small = sum(abs(one.value) for one in parts if abs(one.value) < MIN_PART * abs(found.value))
    half, own = small + CLOCK_ERROR * step_ms, found.compute_interval()
    return Interval(own.estimate, own.low - half, own.high + half)


def _compute_lag_ms(work: Mapping[int, Mapping[str, float]], rank: int, part: str) -> float:
    return 1000 * (work[rank][part] - median(own[part] for other, own in work.items() if other != rank))
