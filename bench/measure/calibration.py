"""The calibration block: a step without communication looked into, then compute and communication together.

Background all-reduces of the case's bucket sizes are kept in flight while local steps run. Both have been
timed alone just before, so the time that they share and the work that each got done in it give both
slow-downs (`bench.scaling.from_pass.slowdowns`). Copying gradients into buckets and back is timed by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.measure.anatomy import PHASES, AnatomyTrainer, ready_hooks
from bench.measure.clock import Clock
from bench.measure.collectives import BucketReplay
from bench.measure.timed import BlockTimes, Trainer, no_gc, run_block
from bench.plan import BucketLayout
from models.workload import Workload, make_module

LOCAL_STEPS = 2
COPIES = 3

COMM_TIMES = 2.5
"""Background communication lasts this many times as long as the compute beside it, so that it outlasts it."""

MOST_REPLAYS = 200


def run_calibration(
    trainer: Trainer,
    layout: BucketLayout,
    group: dist.ProcessGroup | None,
    device: torch.device,
    clock: Clock,
) -> BlockTimes:
    """Calibrate on one rank; every rank of `group` runs it at the same time.

    The block's steps are those without communication. The detail holds `calibration`, all in ms: `order`
    (indices of the trainable parameters as the reducer has them), `ready_ms` in that order since the last
    backward began, the phases of a local step, `copy_ms` of all gradients once, the core time `comm_core_ms`
    of all-reduces alone, and `compute_alone_ms`, `comm_alone_ms`, `compute_end_ms` and `comm_end_ms` of
    `LOCAL_STEPS` steps beside all-reduces that began together.
    """
    detail = _local_step(trainer, layout, device)
    detail["copy_ms"] = round(_copy_ms(trainer.mode.module, clock), 4)
    replay = BucketReplay(layout.num_bytes, "none", group, device)
    compute = run_block(trainer.local_step, LOCAL_STEPS, clock)
    once_ms = replay.measured(clock).block_ms
    count = _agreed(min(math.ceil(COMM_TIMES * compute.block_ms / once_ms), MOST_REPLAYS), group, device)
    core_s = time.process_time()
    comm_ms = run_block(lambda: _wait(_launch(replay, count)), 1, clock).block_ms
    core_s = time.process_time() - core_s
    replay.align()
    with no_gc():
        clock.mark()
        works = _launch(replay, count)
        for _ in range(LOCAL_STEPS):
            trainer.local_step()
        clock.mark()
        _wait(works)
        clock.mark()
        compute_end_ms, rest_ms = clock.read_ms()
    detail |= {
        "compute_alone_ms": round(compute.block_ms, 4),
        "comm_alone_ms": round(comm_ms, 4),
        "comm_core_ms": round(1000 * core_s, 4),
        "compute_end_ms": round(compute_end_ms, 4),
        "comm_end_ms": round(compute_end_ms + rest_ms, 4),
    }
    return BlockTimes(compute.block_ms, compute.steps_ms, {"calibration": detail})


def trainable(workload: Workload) -> list[tuple[str, int, str]]:
    """Name, bytes and kind of the workload's trainable parameters as registered.

    The kind is the dtype where there are several: DDP never mixes them in a bucket.
    """
    found = [(n, p) for n, p in make_module(workload).named_parameters() if p.requires_grad]
    mixed = len({p.dtype for _, p in found}) > 1
    return [(n, p.numel() * p.element_size(), str(p.dtype) if mixed else "") for n, p in found]


def _local_step(trainer: Trainer, layout: BucketLayout, device: torch.device) -> dict[str, Any]:
    anatomy = AnatomyTrainer(trainer, device)
    with no_gc(), ready_hooks(anatomy):
        looks = [anatomy.measured(anatomy.local_step)[:2] for _ in range(LOCAL_STEPS)]
    count = sum(p.requires_grad for p in trainer.mode.module.parameters())
    # Buckets that were never rebuilt tell of no indices: they stand in reversed order then.
    order = [i for bucket in layout.parameters for i in bucket] or list(reversed(range(count)))
    return {
        "order": order,
        "ready_ms": [
            # One that got no gradient holds nothing up before the end.
            round(median(ready.get(i, max(ready.values())) for _, ready in looks), 4)
            for i in order
        ],
        **{f"{name}_ms": round(median(phases[name] for phases, _ in looks), 4) for name in PHASES},
    }


def _copy_ms(module: torch.nn.Module, clock: Clock) -> float:
    """To copy all gradients once: the mean of averaging them into a buffer and copying them back.

    As the reducer does without `gradient_as_bucket_view`; the median of a few times.
    """
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    buffer = [torch.zeros_like(grad) for grad in grads]

    def there_and_back() -> None:
        for grad, place in zip(grads, buffer, strict=True):
            torch.mul(grad, 0.5, out=place)
        for grad, place in zip(grads, buffer, strict=True):
            grad.copy_(place)

    with torch.no_grad(), no_gc():
        return median(run_block(there_and_back, COPIES, clock).steps_ms) / 2


def _launch(replay: BucketReplay, count: int) -> list[dist.Work]:
    return [work for _ in range(count) for work in replay.launch()]


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _agreed(count: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The largest `count` of any rank: all must launch the same all-reduces."""
    largest: Any = torch.tensor([float(count)], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return int(largest.item())
