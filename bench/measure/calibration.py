"""The calibration block: a step without communication looked into, then compute and communication together.

Bursts of local steps run by themselves and beside background all-reduces of the case's bucket sizes, in
turns: where others use the machine too its speed changes by a quarter every few seconds, and only neighbours
compare. `bench.predict.from_pass.compute_slowdowns` makes slow-downs of them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..plan.buckets import BucketLayout
from ..results.block_times import BlockTimes
from .allreduce import MAX_QUEUED, BucketReplay, rehearse
from .anatomy import Anatomy
from .clock import Clock, make_clock
from .timed import Trainer, pause_gc, run_block

LOOKS, COPIES = 2, 3
"""Local steps that are looked into, and times that all gradients are copied; the median counts."""

LOCAL_STEPS = 6
"""Steps of a block on one device, or beside communication, in all bursts together. Slow-down has to be
known well: on a network of another rate what it exceeds 1 by is multiplied."""

MIN_COMM_RATIO = 1.25
"""Background communication by itself takes this many times as long as the compute by itself, at least."""

REPLAYS_ALONE, MAX_REPLAYS = 2, 200
"""Replays from which the time of one alone is known, and the most of a burst, which launches them at once."""


def run_calibration(
    trainer: Trainer,
    layout: BucketLayout,
    group: dist.ProcessGroup | None,
    device: torch.device,
    clock: Clock,
    *,
    num_ranks: int,
) -> BlockTimes:
    """Calibrate on one rank; every one of the `num_ranks` of `group` runs it at the same time.

    The block's steps are those without communication; on a GPU the one that no delay precedes. The detail
    holds `calibration`, all in ms: `order` (indices of the trainable parameters as the reducer has them),
    `ready_ms` in that order since the last backward began, the phases of a local step, `copy_ms` of all
    gradients once. Of bursts, which a single rank has none of: `comm_alone_ms` and its core time
    `comm_core_ms`, one figure for all, and one each `compute_alone_ms`, `compute_end_ms` and `comm_end_ms`,
    the ends of compute and all-reduces that began together.
    """
    detail = _measure_local_step(trainer, layout, device)
    detail["copy_ms"] = round(_measure_copy_ms(trainer.mode.module, clock), 4)
    if num_ranks == 1:  # nothing to communicate with
        steps_ms = run_block(trainer.step_locally, LOCAL_STEPS, clock).steps_ms
    else:
        replay = BucketReplay(layout.num_bytes, "none", group, device, dtypes=layout.dtypes)
        found, steps_ms = _measure_bursts(trainer, replay, clock)
        detail |= found
    return BlockTimes(sum(steps_ms), steps_ms, {"calibration": detail})


def _measure_bursts(
    trainer: Trainer, replay: BucketReplay, clock: Clock
) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Compute and all-reduces by themselves and together: their part of the detail, and the block's steps."""
    device = replay.device
    step_queue_ms, once_queue_ms = (rehearse(work, device) for work in (trainer.step_locally, replay.step))
    step = run_block(trainer.step_locally, 1, clock)
    most_replays = MAX_REPLAYS
    if device.type == "cuda":
        most_replays = max(min(MAX_REPLAYS, MAX_QUEUED // replay.num_buckets), 1)
    by_itself = min(REPLAYS_ALONE, most_replays)
    with pause_gc():
        replay.align(by_itself * once_queue_ms)
        core_s = time.process_time()
        once_ms = run_block(replay.step, by_itself, clock).block_ms / by_itself
        core_ms = 1000 * (time.process_time() - core_s) / by_itself
    longest_step_ms, longest_once_ms = find_longest((step.block_ms, once_ms), replay.group, device)
    # A burst is as short as either allows.
    steps = min(max(math.floor(longest_once_ms / (MIN_COMM_RATIO * longest_step_ms)), 1), LOCAL_STEPS)
    replays = min(math.ceil(MIN_COMM_RATIO * steps * longest_step_ms / longest_once_ms), most_replays)
    queue_ms = steps * step_queue_ms + replays * once_queue_ms
    alone: list[BlockTimes] = []
    ends_ms: list[tuple[float, float]] = []
    for burst in range(math.ceil(LOCAL_STEPS / steps)):
        for beside in (True, False) if burst % 2 else (False, True):
            with pause_gc():
                replay.align(queue_ms)
                if beside:
                    ends_ms.append(_run_together(trainer, replay, steps, replays))
                else:
                    alone.append(run_block(trainer.step_locally, steps, clock))
    # Behind a delay a step shows none of its launches, which one in training may wait for.
    as_trained = [step] if device.type == "cuda" else alone
    return {
        "comm_alone_ms": round(replays * once_ms, 4),
        "comm_core_ms": round(replays * core_ms, 4),
        "compute_alone_ms": [round(block.block_ms, 4) for block in alone],
        "compute_end_ms": [round(end, 4) for end, _ in ends_ms],
        "comm_end_ms": [round(end, 4) for _, end in ends_ms],
    }, tuple(ms for block in as_trained for ms in block.steps_ms)


def _run_together(trainer: Trainer, replay: BucketReplay, steps: int, replays: int) -> tuple[float, float]:
    """Return when compute and when communication ended, in ms since both began.

    NCCL's stream waits for the current one at each launch, so on a GPU both begin at the first marks. All of
    the communication is queued first: should compute's launches fill the queue, the host is far ahead.
    """
    compute, comm = make_clock(replay.device), make_clock(replay.device)
    with pause_gc():
        compute.mark()
        comm.mark()
        works = [work for _ in range(replays) for work in replay.launch()]
        for _ in range(steps):
            trainer.step_locally()
        compute.mark()
        # On compute's stream the end would be that of both.
        own = torch.cuda.stream(torch.cuda.Stream(replay.device)) if replay.device.type == "cuda" else None
        with own or contextlib.nullcontext():
            for work in works:
                work.wait()
            comm.mark()
        return sum(compute.read_ms()), sum(comm.read_ms())


def _measure_local_step(trainer: Trainer, layout: BucketLayout, device: torch.device) -> dict[str, Any]:
    anatomy = Anatomy(trainer, device)
    trainer.take_lead_in(trainer.step_locally)
    with pause_gc(), anatomy.note_gradients():
        looks = [anatomy.measure_step(trainer.step_locally)[:2] for _ in range(LOOKS)]
    count = sum(p.requires_grad for p in trainer.mode.module.parameters())
    # Buckets stand in reversed order where their parameters are not known.
    order = [i for bucket in layout.parameters for i in bucket] or list(reversed(range(count)))
    return {
        "order": order,
        "ready_ms": [
            # One that got no gradient holds nothing up before the end.
            round(median(ready.get(i, max(ready.values())) for _, ready in looks), 4)
            for i in order
        ],
        **{name: round(median(phases[name] for phases, _ in looks), 4) for name in looks[0][0]},
    }


def _measure_copy_ms(module: torch.nn.Module, clock: Clock) -> float:
    """To copy all gradients once: the mean of averaging them into a buffer and copying them back.

    As the reducer does without `gradient_as_bucket_view`; the median of a few times.
    """
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    buffer = [torch.zeros_like(grad) for grad in grads]

    def copy_gradients() -> None:
        for grad, place in zip(grads, buffer, strict=True):
            torch.mul(grad, 0.5, out=place)
        for grad, place in zip(grads, buffer, strict=True):
            grad.copy_(place)

    with torch.no_grad(), pause_gc():
        return median(run_block(copy_gradients, COPIES, clock).steps_ms) / 2


def find_longest(
    times_ms: Sequence[float], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[float, ...]:
    """Each figure of the rank where it is largest: all ranks have to do the same."""
    slowest: Any = torch.tensor(times_ms, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return tuple(slowest.tolist())
