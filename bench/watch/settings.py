"""Finds settings of a watched training that may cost time, and measures their cost where its steps tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from ..common.numbers import format_interval
from ..findings.late_ranks import estimate_typical
from ..findings.watched import make_measured
from ..findings.watched_settings import REDUCED
from ..machine.watched import Measured, WatchedSetting
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import Interval, compute_median_interval
from .late import get_work_s
from .rows import Made, Step
from .steps import JoinedStep, Watched, get_first_rank, select_light

MIN_HOST_BOUND_PCT = 50.0
"""Percent of a step that a GPU waits for its host, to be told."""

MAX_LAG = 0.02
"""Share of a step by which a GPU that waits for its host may seem late: the clocks of both drift apart."""

HOST_PARTS = ("forward", "backward", "optimizer", "other")
"""Parts in which the host queues work; waiting for the loader is a setting of its own."""


def find_settings(watched: Watched) -> tuple[WatchedSetting, ...]:
    """Find what may be configured badly, each with its cost where it was measured."""
    return (*_find_model_settings(watched), *_find_loader_settings(watched), *_find_process_settings(watched))


def _make_setting(name: str, made: Made, **more: Any) -> WatchedSetting:
    return WatchedSetting(name=name, line=made.line, made_by=made.made_by, **more)


def _find_model_settings(watched: Watched) -> Iterator[WatchedSetting]:
    joined, models = watched.joined, [*watched.first.models.values()]
    if unneeded := int(median(get_first_rank(step).accumulated for step in joined)):
        at = next((one.kept_at for one in models if one.kept_at), "")
        syncs = get_first_rank(joined[-1]).syncs
        is_one = len({sync.model for sync in syncs}) == 1  # else nobody knows what each adds
        yield WatchedSetting(name="micro-steps", line=at, amount=unneeded, of=len(syncs) if is_one else 0)
    for one in models:
        on_ranks = [process.models.get(one.model, one) for process in watched.ranks.values()]
        if one.find_unused_parameters and all(model.unused is False for model in on_ranks):
            yield _make_setting("unused", one, **_measure_search(watched))
    sender = next((one for one in models if one.broadcast_buffers), None)
    sent_ms = [1000 * min(one.parts.buffers for one in step.values()) for step in joined]
    if sender is not None and median(sent_ms) > 0:  # the last rank waits for nobody
        cost_ms = _measure_typical(sent_ms)
        yield _make_setting("buffers", sender, cost_ms=cost_ms, value=sender.buffers_argument)
    if (replicas := watched.first.parallel.get("DataParallel")) is not None:
        yield _make_setting("data-parallel", replicas, amount=replicas.devices)


def _find_loader_settings(watched: Watched) -> Iterator[WatchedSetting]:
    loaders = [*watched.first.loaders.values()]
    if loaders:
        one = min(loaders, key=lambda loader: loader.workers or 0)
        yield _make_setting("loader", one, cost_ms=_measure_wait(watched), amount=one.workers or 0)
    for one in loaders:
        if one.passes > 1 and one.epochs == 1:
            yield _make_setting("epoch", one, amount=one.passes)
        if one.pinned is False and watched.first.start.device.startswith("cuda"):
            yield _make_setting("pinning", one)


def _find_process_settings(watched: Watched) -> Iterator[WatchedSetting]:
    starts = [process.start for process in watched.ranks.values()]
    for host in dict.fromkeys(one.host for one in starts):
        ranks = [one for one in starts if one.host == host]
        threads, cores = sum(one.threads for one in ranks), {core for one in ranks for core in one.cores}
        if cores and threads > max(len(cores), len(ranks)):
            each = max(len(cores) // len(ranks), 1)
            yield WatchedSetting(name="threads", amount=threads, of=len(cores), value=f"{each}")
            break
    debug = {one.debug for one in starts} & {"INFO", "DETAIL"}
    if debug:
        yield WatchedSetting(name="debug", value=min(debug))
    shares = [share for steps in watched.list_by_rank() if (share := measure_host_bound_pct(steps))]
    bound = max(shares, key=lambda share: share.estimate, default=None)
    if bound is not None and bound.estimate >= MIN_HOST_BOUND_PCT:
        yield WatchedSetting(name="host", value=format_interval(bound, "%"))


def _measure_search(watched: Watched) -> dict[str, Any]:
    """Measure the search for unused parameters; DDP then reduces one number for each parameter.

    That takes at most as long as all gradients alone, which probes tell: the upper end holds it.
    """
    search_ms = measure_saved_ms(watched.joined, lambda step: step.search_s)
    alone_s = [min(one.alone_s for one in watched.joined[place].values()) for place, _ in watched.probes]
    if search_ms is None or search_ms.high is None or len(alone_s) < MIN_ROUNDS:
        return {"cost_ms": search_ms}
    most_ms = (
        search_ms.high + estimate_typical([1000 * seconds for seconds in alone_s]).compute_interval().high
    )
    return {"cost_ms": msgspec.structs.replace(search_ms, high=most_ms), "value": REDUCED}


def _measure_wait(watched: Watched) -> Measured | None:
    """Measure the wait for the loader: without its CPU time, which workers take too, up to all of it."""
    wait_ms = measure_saved_ms(watched.joined, lambda step: step.parts.data)
    least_ms = measure_saved_ms(watched.joined, lambda step: max(step.parts.data - step.loading_s, 0.0))
    if wait_ms is None or least_ms is None:
        return wait_ms
    return msgspec.structs.replace(least_ms, high=wait_ms.high)


def measure_host_bound_pct(steps: Sequence[Step]) -> Interval | None:
    """Measure the percentage of a rank's steps in parts at whose end its GPU had done all that was queued.

    There it waited for its host. Where a GPU is least late by its host's clock it has nothing left to do.
    """
    lags_s = [lag_s for step in steps for _, _, lag_s in step.marks]
    if not lags_s:
        return None
    most_s = min(lags_s) + MAX_LAG * median(step.step_s for step in steps)
    waits_s = (
        sum(s for part, s, lag_s in step.marks if part in HOST_PARTS and lag_s <= most_s) for step in steps
    )
    shares = [100 * s / step.step_s for s, step in zip(waits_s, steps, strict=True)]
    return compute_median_interval(shares)


def measure_saved_ms(joined: Sequence[JoinedStep], seconds_of: Callable[[Step], float]) -> Measured | None:
    """Measure what steps save without these seconds of each rank's own work: ranks wait for the last one."""
    told = select_light(joined)
    if len(told) < MIN_ROUNDS:
        return None
    saved_ms = []
    for step in told:
        own_s = {rank: sum(get_work_s(one).values()) for rank, one in step.items()}
        without_s = max(own_s[rank] - seconds_of(one) for rank, one in step.items())
        saved_ms.append(1000 * (max(own_s.values()) - without_s))
    return _measure_typical(saved_ms)


def _measure_typical(values: Sequence[float]) -> Measured:
    return make_measured(estimate_typical(values).compute_interval())


def describe_unseen(watched: Watched) -> list[str]:
    """Say what cannot be known where no forward of DistributedDataParallel was seen."""
    if watched.first.models:
        return []
    other = "No forward of DistributedDataParallel was seen: forwards count as other"
    parallel, unknown = watched.first.parallel, "What communication adds is not known."
    if "DTensor" in parallel:
        return [
            f"{other}. Its parameters are distributed (FSDP2, replicate): gathering them counts as other or "
            f"backward, reducing gradients as backward. {unknown}"
        ]
    if (replicas := parallel.get("DataParallel")) is not None:
        return [f"{other}, with the copies of the model to {replicas.devices} GPUs. {unknown}"]
    if len(watched.ranks) == 1:
        return [f"{other}. Nothing is communicated."]
    sent = int(median(get_first_rank(step).collectives for step in watched.joined))
    return [
        f"{other}, and so do collectives between the parts ({sent} of the default group in a step). {unknown}"
    ]
