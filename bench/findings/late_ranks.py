"""Finds the rank that the others wait for, by its own work since the last collective; no clocks are compared.

Ranks leave a collective at about the same time. So a rank is late by how much longer its own work takes from
there on than that of every other rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import scipy

from ..common.numbers import format_count, format_interval
from ..machine.manifest import Manifest
from ..plan.buckets import BucketLayout
from ..results.case_result import CaseResult, list_records
from ..results.round_times import RoundTimes
from ..results.store import RunData
from ..stats.fit import MIN_ROUNDS, estimate_difference
from ..stats.interval import Estimate, Interval, Samples
from .verdicts import MIN_SHARE
from .wording import name_devices

MIN_SLOWEST_SHARE = 0.75
"""Share of the rounds in which a straggler is the slowest rank."""

MAX_FALSE_POSITIVE_RATE = 0.05
"""Probability that one of equal ranks is taken for a straggler."""


class OwnWork(msgspec.Struct, frozen=True):
    """Milliseconds of a rank's step, in the detail of an anatomy block; the folder may be anyone's."""

    optimizer_ms: float
    data_ms: float
    forward_ms: float
    sync_buffers_ms: float
    """The part of the forward in which DDP broadcasts buffers, which is a collective."""
    ready_ms: tuple[float, ...]
    """Milliseconds since the backward began, by bucket."""

    @property
    def by_bucket_ms(self) -> list[float]:
        """Its own work from the last all-reduce of a step to the gradients of each bucket in the next."""
        before_ms = self.optimizer_ms + self.data_ms + self.forward_ms - self.sync_buffers_ms
        return [before_ms + ms for ms in self.ready_ms]


class LateBucket(NamedTuple):
    """The rank that is ready last with a bucket of gradients."""

    bucket: int
    num_bytes: int
    rank: int
    num_last: int
    """Rounds in which it was the last one."""
    num_rounds: int
    later_ms: Interval
    """Lateness against the rank before it; below 0 it was not the last one."""


def find_latest(work_ms: Samples) -> tuple[int, list[float]]:
    """Find the column with most work, and by row how much more it has than every other column."""
    ordered = np.sort(work_ms, axis=1)
    first, second = ordered[:, -1:], ordered[:, -2:-1]
    later_ms = work_ms - np.where(work_ms == first, second, first)
    latest = int(np.argmax(np.median(later_ms, axis=0)))
    return latest, later_ms[:, latest].tolist()


def estimate_typical(values: Sequence[float]) -> Estimate:
    """Estimate the typical one of values, one per step or round in their order, in their unit."""
    scale = max(map(abs, values), default=0.0) or 1.0
    return estimate_difference([value / scale for value in values]).scale(scale)


def find_late_buckets(run: RunData, ddp: CaseResult | None) -> list[LateBucket]:
    """Find the rank that is last with each bucket of a DDP case; none where its passes do not tell.

    A round of the anatomy pass has medians of its steps; of steps of several batches it tells too little.
    """
    layout = BucketLayout.from_cell(ddp.bucket_bytes) if ddp else None
    if ddp is None or layout is None or not ddp.has_efficiency:
        return []
    found = run.blocks[(run.blocks["case_id"] == ddp.case_id) & (run.blocks["phase"] == "anatomy")]
    by_round: dict[int, dict[int, list[float]]] = {}
    for row in list_records(found[["round", "rank", "detail"]]):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            own_ms = msgspec.json.decode(row["detail"] or "", type=OwnWork).by_bucket_ms
            if len(own_ms) == len(layout.num_bytes) and all(map(math.isfinite, own_ms)):
                by_round.setdefault(row["round"], {})[row["rank"]] = own_ms
    ranks = {*range(ddp.num_devices)}
    whole = [own for own in by_round.values() if own.keys() == ranks]
    if len(whole) < MIN_ROUNDS or len(ranks) < 2:
        return []
    work_ms = np.array([[own[rank] for rank in sorted(ranks)] for own in whole])
    made = []
    for index, num_bytes in enumerate(layout.num_bytes):
        rank, later_ms = find_latest(work_ms[:, :, index])
        num_last, interval = sum(ms > 0 for ms in later_ms), estimate_typical(later_ms).compute_interval()
        made.append(LateBucket(index, num_bytes, rank, num_last, len(whole), interval))
    return made


def find_straggler(counts: Mapping[int, int], num_rounds: int, num_ranks: int) -> int | None:
    """Return the rank that others wait for; None where equal ranks could look so by chance.

    Args:
        counts: by rank, the rounds in which it was the slowest.
        num_rounds: of the run.
        num_ranks: that took part in each.
    """
    rank = min(counts, key=lambda rank: (-counts[rank], rank), default=None)
    if rank is None or counts[rank] < MIN_SLOWEST_SHARE * num_rounds:
        return None
    by_chance = scipy.stats.binom.sf(counts[rank] - 1, num_rounds, 1 / num_ranks)
    return None if num_ranks * by_chance > MAX_FALSE_POSITIVE_RATE else rank


def describe_straggler(ddp: CaseResult | None, manifest: Manifest, times: RoundTimes) -> str:
    """Name the straggler of a DDP case, how often it is the slowest and by how much; empty without one."""
    skew, step = (ddp.rank_skew_ms, ddp.step_ms) if ddp else (None, None)
    if not ddp or not skew or not step or skew.estimate <= MIN_SHARE * step.estimate:
        return ""
    slowest = times.get_case(ddp.case_id).slowest
    if (rank := find_straggler(slowest, slowest.total(), ddp.num_devices)) is None:
        return ""
    hosts = {one.rank: f" on {one.host}" for one in manifest.ranks if one.host}
    return (
        f"Rank {rank}{hosts.get(rank, '')} is a straggler: slowest of {name_devices(ddp)} in {slowest[rank]} "
        f"of {format_count(slowest.total(), 'round')}, by {format_interval(skew, 'ms')} per step "
        f"({100 * skew.estimate / step.estimate:.0f}%) of its own work; the others wait for it"
    )
