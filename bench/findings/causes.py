"""Why DDP is slower than one device: what its step takes beside that, and the rank that others wait for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import scipy

from ..common.numbers import plural
from ..common.numbers import with_interval as written
from ..machine.manifest import Manifest
from ..results.case_result import CaseResult
from ..results.comparisons import Comparison, default_of
from ..results.round_times import RoundTimes
from ..stats.interval import Interval
from .answers import by_compile_label, headline
from .wording import place

LEAST_SHARE = 0.05
"""Share of the step below which nothing is named: mending it gains no more than runs differ by."""

ALL_REDUCE, BUFFERS = "all-reduces that the backward does not hide", "DDP's broadcast of buffers"
COPIES = "copies into buckets and back"
OWN_WORK, RANKS, DATA = "DDP's own work on one device", "uneven ranks", "the wait for batches"
BESIDE = "waiting beside communication, for other ranks or for the cores that it takes"

MENDS = {
    ALL_REDUCE: "--comm-hook bf16 (half of it), a larger batch, a faster link",
    BUFFERS: "--sync-buffers off, where ranks may keep buffers of their own",
    BESIDE: "cores or GPUs that nothing else uses",
    COPIES: "--gradient-as-bucket-view on",
    OWN_WORK: "a larger batch, with which it does not grow; in part counted above",
    RANKS: "the same cores, clocks and batches for all ranks",
    DATA: "more --data-workers, or a faster source",
}
"""What would gain the time, by cause."""

OFTEN = 0.75
"""Share of the rounds in which a rank has to be the slowest to be named."""

BY_CHANCE = 0.05
"""Nor is a rank named that would be the slowest so often among equal ones with more than this probability."""


def causes(
    cases: Sequence[CaseResult], slow: Collection[str] = (), comparisons: Iterable[Comparison] = ()
) -> dict[str, Interval]:
    """Milliseconds of what a run measured of DDP without settings, the most first; the small is left out.

    Each part has a measurement of its own: what `no_sync` saves, of which all-reduces are no more than they
    take alone, and DDP's own work what it adds on one device; the broadcast of buffers alone; what views of
    the buckets save; how far behind the rank is that is always the slowest (if `slow`); and the time in the
    loader. They need not add up: the data of a slow rank is in two of them. Each is the most that mending it
    gains.
    """
    ddp = default_of(headline(cases))
    if ddp is None or ddp.step_ms is None:
        return {}
    own, copies = _own_work(ddp, cases), _copies(ddp, cases, comparisons)
    least = LEAST_SHARE * ddp.step_ms.estimate
    buffers = ddp.buffers_ms if ddp.buffers_ms and ddp.buffers_ms.estimate > least else None
    exposed, alone = (_less(whole, buffers) for whole in (ddp.exposed_comm_ms, ddp.comm_ms))
    found = {
        ALL_REDUCE: _own_time(exposed, alone),
        BESIDE: alone and _less(_less(exposed, alone), own),
        BUFFERS: buffers,
        COPIES: copies,
        OWN_WORK: _less(own, copies),
        RANKS: ddp.rank_skew_ms if slow else None,
        DATA: ddp.data_ms,
    }
    # An interval that is not known, of too few rounds, holds nothing against it.
    named = [(what, ms) for what, ms in found.items() if ms and not ms.low <= 0 and ms.estimate > least]
    return dict(sorted(named, key=lambda cause: -cause[1].estimate))


def said(
    cases: Sequence[CaseResult], slow: Collection[str] = (), comparisons: Iterable[Comparison] = ()
) -> list[str]:
    """What a step of DDP consists of, and each cause with what mends it; none where no cause is known."""
    ddp, found = default_of(headline(cases)), causes(cases, slow, comparisons)
    if not found or ddp is None or ddp.step_ms is None:
        return []
    alike = [c for c in cases if c.compile == ddp.compile and c.step_ms and not c.is_stand_in]
    dp = next((c.step_ms for c in alike if c.mode == "dp" and c.num_devices == ddp.num_devices), None)
    one = next((c.step_ms for c in alike if c.mode == "single" and c.scaling == "weak"), None)
    step = f"A step of DDP on {place(ddp)} takes {written(ddp.step_ms, 'ms')}"
    step += f", under DP {written(dp, 'ms')}" if dp else ""
    step += f": {_sum(ddp, ddp.step_ms, one)}" if one else ""
    saved = (f"Could be saved: {written(ms, 'ms')} {what}, by {MENDS[what]}." for what, ms in found.items())
    return [f"{step}.", *saved]


def _sum(ddp: CaseResult, step_ms: Interval, one: Interval) -> str:
    """The parts that a step consists of, by what `no_sync` and the all-reduces alone take."""
    exposed = ddp.exposed_comm_ms
    own = _own_time(exposed, ddp.comm_ms)
    parts = {
        "as on one device": one,
        "all-reduces": own,
        "contention, waits, copies": _less(exposed, own),
        "else": _less(_less(step_ms, one), exposed),
    }
    return " + ".join(f"{written(ms, 'ms')} {what}" for what, ms in parts.items() if ms and ms.estimate > 0)


def _own_time(exposed: Interval | None, alone: Interval | None) -> Interval | None:
    """What of exposed communication is its own time: no more than it takes alone."""
    return exposed and min(exposed, alone or exposed, key=lambda ms: ms.estimate)


def _own_work(ddp: CaseResult, cases: Iterable[CaseResult]) -> Interval | None:
    """What DDP adds to a step on one device; its ratio over `single` is taken within rounds."""
    alike = (c for c in cases if c.is_ok and c.mode == "ddp" and c.compile == ddp.compile)
    one = next((c for c in alike if c.num_devices == 1 and not c.changed()), None)
    if one is None or one.speedup is None or one.step_ms is None:
        return None
    return _saved(one.step_ms, one.speedup)


def _copies(
    ddp: CaseResult, cases: Iterable[CaseResult], comparisons: Iterable[Comparison]
) -> Interval | None:
    """What a step saves where gradients are views of the buckets, if that was measured."""
    views = {c.case_id for c in cases if c.changed(ddp) == {"gradient_as_bucket_view": "True"}}
    one = next((c for c in comparisons if c.reference_id == ddp.case_id and c.case_id in views), None)
    if one is None or ddp.step_ms is None or math.isnan(one.ratio.low):
        return None
    return _saved(ddp.step_ms, one.ratio.inverted())


def _saved(step_ms: Interval, share: Interval) -> Interval:
    """What a step saves that then takes `share` of its time."""
    return Interval(*(step_ms.estimate * (1 - end) for end in (share.estimate, share.high, share.low)))


def _less(whole: Interval | None, part: Interval | None) -> Interval | None:
    """The rest, as far as both are known."""
    if whole is None or part is None:
        return whole
    return whole.less(part)


def slow_ranks(manifest: Manifest, cases: Sequence[CaseResult], times: RoundTimes) -> list[str]:
    """Say which rank of DDP the others wait for, how often and by how much, by mode of torch.compile.

    None is named where ranks differ by little of the step, or where equal ones could look so by chance.
    """
    hosts = {rank.rank: f" on {rank.host}" for rank in manifest.ranks if rank.host}
    found = []
    for _, group in by_compile_label(cases):
        case = default_of(headline(group))
        skew, step = (case.rank_skew_ms, case.step_ms) if case else (None, None)
        if not case or not skew or not step or skew.estimate <= LEAST_SHARE * step.estimate:
            continue
        own = times.of_case(case.case_id)
        if own is None or (rank := own.slowest_rank()) is None:
            continue
        often, num_rounds = own.slowest[rank], own.slowest.total()
        among_equals = scipy.stats.binom.sf(often - 1, num_rounds, 1 / case.num_devices)
        if often < OFTEN * num_rounds or case.num_devices * among_equals > BY_CHANCE:
            continue
        found.append(
            f"Rank {rank}{hosts.get(rank, '')} is the slowest of {place(case)} in {often} of "
            f"{plural(num_rounds, 'round')}, by {written(skew, 'ms')} per step "
            f"({100 * skew.estimate / step.estimate:.0f}%) of its own work; the others wait for it."
        )
    return found
