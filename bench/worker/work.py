"""What this rank does in a block of a case, by its phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..measure.anatomy import bucket_ready_ms, run_anatomy
from ..measure.calibration import longest, run_calibration
from ..measure.clock import Clock
from ..measure.collectives import BucketReplay
from ..measure.telemetry import Telemetry, gpus_of
from ..measure.timed import LEAD_IN_STEPS, Trainer, run_block
from ..measure.trace import run_trace
from ..modes import Place
from ..results.gpu_load import DEVICE_ALLOCS
from ..results.measured import BlockTimes
from .prepare import HeldCase

ANATOMY_STEPS = 2
"""Steps of an anatomy block: DDP's logger tells of a step only in the next one."""

MOST_BLOCKS = 3
"""Blocks whose steps still ask a GPU's driver for memory only lead in; after so many one counts as it is."""

STEPS_ALONE = ("timed", "no_sync")
"""Phases whose blocks are steps and nothing else."""


def measure(
    live: HeldCase,
    phase: str,
    steps: int,
    *,
    place: Place,
    clock: Clock,
    telemetry: Telemetry | None = None,
    keeps_trace: bool = False,
) -> BlockTimes:
    """Measure a block of `phase`, of `steps` steps where it is steps alone."""
    trainer = live.trainer
    assert trainer is not None  # it has been warmed up
    with trainer.mode.compiles_as_asked():
        times = _measured(phase, live, trainer, steps, place, clock, keeps_trace=keeps_trace)
    if phase == "timed" and telemetry is not None:
        times = telemetry.of(times, gpus_of(live.case, place))
    trainer.check_loss()
    trainer.release_gradients()
    return times


def _measured(
    phase: str,
    live: HeldCase,
    trainer: Trainer,
    steps: int,
    place: Place,
    clock: Clock,
    *,
    keeps_trace: bool,
) -> BlockTimes:
    if phase in STEPS_ALONE:
        step = trainer.local_step if phase == "no_sync" else trainer.step
        gpus = gpus_of(live.case, place)
        lead_in = LEAD_IN_STEPS[place.device.type]
        block = partial(run_block, step, steps, clock, lead_in=lead_in, gpus=gpus)
        return _settled(block, live.group, place.device) if lead_in else block()
    if phase == "comm":
        return _replay(live, trainer, place, clock)
    if phase == "anatomy":
        return _anatomy(live, trainer, place)
    if phase == "calibration":
        assert live.layout is not None  # a case that communicates has buckets
        num_ranks = live.case.num_ranks
        return run_calibration(trainer, live.layout, live.group, place.device, clock, num_ranks=num_ranks)
    sizes = live.layout.num_bytes if live.layout is not None else ()
    group = live.group if live.case.communicates else None
    return run_trace(trainer, place.device, sizes, group=group, keep=keeps_trace)


def _settled(block: Callable[[], BlockTimes], group: Any, device: torch.device) -> BlockTimes:
    """A block in which no rank of `group` (None: this one alone) asked for memory, or the last of some."""
    for _ in range(MOST_BLOCKS - 1):
        times = block()
        asked = times.detail[DEVICE_ALLOCS]
        if not (asked if group is None else longest((asked,), group, device)[0]):
            return times
    return block()


def _replay(live: HeldCase, trainer: Trainer, place: Place, clock: Clock) -> BlockTimes:
    assert live.layout is not None  # a case that communicates has buckets
    layout = live.layout
    sparse = _sparse_gradients(trainer, layout.parameters) if trainer.mode.sparse else {}
    replay = BucketReplay(
        layout.num_bytes,
        live.case.comm_hook,
        live.group,
        place.device,
        dtypes=layout.dtypes,
        sparse=sparse,
    )
    return replay.measured(clock, first=trainer.mode.broadcast_buffers)


def _sparse_gradients(trainer: Trainer, buckets: Sequence[Sequence[int]]) -> dict[int, torch.Tensor]:
    """The sparse gradients of a step of this rank alone, by the number of the bucket that each is."""
    trainer.local_step()
    found = [one.grad for one in trainer.mode.module.parameters() if one.requires_grad]
    own = {
        number: found[bucket[0]] for number, bucket in enumerate(buckets) if bucket[0] in trainer.mode.sparse
    }
    return {number: one.coalesce() for number, one in own.items() if one is not None and one.is_sparse}


def _anatomy(live: HeldCase, trainer: Trainer, place: Place) -> BlockTimes:
    if live.case.is_staged:
        from ..measure.pipeline import run_pipeline_anatomy  # imported with such a case

        return run_pipeline_anatomy(trainer, live.case, ANATOMY_STEPS, place.device, live.group)
    local_steps = 1 if live.case.communicates else 0
    times = run_anatomy(trainer, ANATOMY_STEPS, place.device, local_steps=local_steps)
    detail = dict(times.detail)
    ready = detail.pop("ready_ms")
    if live.layout is not None and live.layout.parameters:
        detail["ready_ms"] = bucket_ready_ms(ready, live.layout.parameters)
    return BlockTimes(times.block_ms, times.steps_ms, detail)
