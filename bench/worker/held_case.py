"""A case as a rank holds it: built, warmed up, and measured block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...models.data import BatchSource, Drawn, PrefetchSource, open_source
from ...models.step import compile_module, placed
from ..buckets import BucketLayout
from ..case import Case, split_of
from ..measure.anatomy import bucket_ready_ms, run_anatomy
from ..measure.calibration import longest, run_calibration
from ..measure.clock import Clock
from ..measure.memory import MemoryWatch, release_memory
from ..measure.standalone import BucketReplay
from ..measure.telemetry import Telemetry, gpus_of
from ..measure.timed import LEAD_IN_STEPS, Trainer, run_block
from ..measure.trace import run_trace
from ..modes import Place, build_mode, devices_of
from ..modes.compiled import CompileWatch, draws_as_eager
from ..results.block_times import BlockTimes
from ..results.gpu_load import DEVICE_ALLOCS
from ..settings import Settings
from .messages import Warm, Warmed
from .proof import Prover
from .update_proof import PROOF_STEPS, FirstSteps

MIN_WARMUP_STEPS = 3
"""Least steps of warm-up: DDP rebuilds its buckets after the first and reports them after the second."""

MAX_WARMUP_STEPS = 10
"""Most steps of warm-up: what still gets faster after these is part of the measurement."""

UNSETTLED_STEPS = 2
"""First steps that are no load: they compile, load kernels, and record CUDA graphs."""

STILL_FASTER = 0.95
"""Warm-up goes on while a step takes less than this share of every step before it."""


@dataclass
class HeldCase:
    """A case as a rank that takes part holds it."""

    case: Case
    group: dist.ProcessGroup | None
    trainer: Trainer | None = None
    layout: BucketLayout | None = None
    first: FirstSteps | None = None
    """What the first steps left, until they are compared."""

    def close(self) -> None:
        """Let go of what it holds."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None


def warm(
    live: HeldCase,
    asked: Warm,
    *,
    prover: Prover,
    settings: Settings,
    clock: Clock,
    drawn: Drawn | None = None,
) -> Warmed:
    """Build a case and warm it up. Raises Unsupported, or what the model raises.

    `drawn` holds the batches of live cases, and gets those of this one.
    """
    case, place = live.case, prover.place
    release_memory(place.device)  # torch before 2.15 leaves cycles, which would count as other cases'
    source = _source(case, prover, settings, drawn)
    watch = MemoryWatch(devices_of(case, place), source.held)
    prover.peers(case)
    module = placed(prover.maker.module(), case, place.device)
    stages = prover.splitter.stages(asked.by_device)
    mode = build_mode(case, module, place, live.group, stages=stages)
    live.trainer = Trainer(case, mode, prover.workload, source)
    part = case.part_of(place.rank)
    live.first = first = FirstSteps(case, live.trainer, prover.seed, part, keeps=asked.compares)
    num_least, compiling = MIN_WARMUP_STEPS, [] if case.compile == "off" else [CompileWatch()]
    if compiling and first.keeps and prover.draws:
        # What is timed draws as the compiler would, which no eager module does: it is compiled anew.
        num_least += PROOF_STEPS
        first.until_over.callback(lambda: compiling.append(CompileWatch()))
        first.until_over.callback(compile_module, module, case.compile)
        first.until_over.enter_context(draws_as_eager())
    with mode.compiles_as_asked():
        times = _warm_up(live.trainer, first, live.group, place.device, clock, asked.least_s, num_least)
        first.end()
        compilation = compiling[-1].taken() if compiling else None
        memory = watch.taken()
        live.trainer.check_loss()
        if compilation is not None and case.communicates:
            live.trainer.local_step()  # may need graphs of its own, which no block should wait for
    live.trainer.check_loss()
    live.layout = mode.bucket_layout()
    mode.settle()
    return Warmed(times=times, memory=memory, compilation=compilation, layout=live.layout)


def _source(case: Case, prover: Prover, settings: Settings, drawn: Drawn | None) -> BatchSource:
    split = split_of(case)
    source = open_source(
        prover.workload,
        data=case.data,
        batch_size=split.batch_size,
        rank=case.part_of(prover.place.rank),
        world_size=split.num_sources,
        device=prover.place.device,
        seed=settings.seed,
        num_workers=settings.data_workers,
        drawn=drawn,
    )
    return PrefetchSource(source, prover.place.device) if settings.copies_ahead else source


def _warm_up(
    trainer: Trainer,
    first: FirstSteps,
    group: dist.ProcessGroup | None,
    device: torch.device,
    clock: Clock,
    least_s: float,
    num_least: int,
) -> BlockTimes:
    """Train until it is warm, for `num_least` steps at least."""
    steps: list[float] = []
    while len(steps) < num_least or not _is_warm(steps, group, device, least_s):
        steps += run_block(trainer.step, 1, clock).steps_ms
        first.after_step()
    return BlockTimes(sum(steps), tuple(steps))


def _is_warm(
    steps_ms: Sequence[float], group: dist.ProcessGroup | None, device: torch.device, least_s: float
) -> bool:
    """Whether the warm-up is over; ranks must take the same number of steps, or the next collective hangs."""
    settled = len(steps_ms) >= MAX_WARMUP_STEPS or steps_ms[-1] >= STILL_FASTER * min(steps_ms[:-1])
    settled = settled and sum(steps_ms[UNSETTLED_STEPS:]) >= 1000 * least_s
    if group is None:
        return settled
    agreed: Any = torch.tensor([float(settled)], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group)
    return bool(agreed.item())


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
