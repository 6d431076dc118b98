"""A case as a rank holds it: built, warmed up, and measured block by block."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
import torch.distributed as dist

from ...models.data import BatchSource, Drawn
from ...models.step import compile_module, move_and_compile
from ..measure.allreduce import BucketReplay
from ..measure.anatomy import run_anatomy, run_pipeline_anatomy
from ..measure.calibration import find_longest, run_calibration
from ..measure.clock import Clock
from ..measure.memory import MemoryWatch, release_memory
from ..measure.telemetry import Telemetry
from ..measure.timed import Trainer, run_block
from ..measure.trace import run_trace
from ..modes import Place, Stages, build_mode, list_devices
from ..modes.base import list_gpus
from ..modes.compiled import CompileWatch, draw_as_eager
from ..plan.buckets import BucketLayout
from ..plan.case import Case
from ..plan.settings import ResolvedSettings
from ..proof.first_steps import FirstSteps
from ..proof.judge import PROOF_STEPS
from ..proof.proof import Prover
from ..results.block_times import DEVICE_ALLOCS, BlockTimes
from .facts import Prepared

MIN_WARMUP_STEPS = 3
"""Least steps of warm-up: DDP rebuilds its buckets after the first and reports them after the second."""

MAX_WARMUP_STEPS = 10
"""Most steps of warm-up: what still gets faster after these is part of the measurement."""

NUM_UNSTEADY_STEPS = 2
"""First steps that are no load: they compile, load kernels, and record CUDA graphs."""

MAX_WARMUP_RATIO = 0.95
"""Warm-up goes on while a step takes less than this share of every step before it."""

ANATOMY_STEPS = 2
"""Steps of an anatomy block: DDP's logger tells of a step only in the next one."""

MAX_BLOCKS = 3
"""Blocks whose steps still ask a GPU's driver for memory only lead in; after so many one counts as it is."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Objects that all cases of a rank share."""

    place: Place
    settings: ResolvedSettings
    clock: Clock
    prover: Prover
    telemetry: Telemetry | None = None
    drawn: Drawn = field(default_factory=dict)
    """The batches of live cases."""


@dataclass
class PreparedCase:
    """A case as a rank that takes part holds it."""

    case: Case
    group: dist.ProcessGroup | None
    shared: Shared
    trainer: Trainer
    memory: MemoryWatch
    stages: Stages | None = None
    layout: BucketLayout | None = None

    @contextlib.contextmanager
    def enter_training(self) -> Iterator[None]:
        """Within it, the case trains: its batches load, compiled as asked, and errors say what helps."""
        with self.trainer.mode.enter_steps(), self.trainer.load_ahead():
            yield

    def warm_up(self, least_s: float, *, proves: bool) -> Prepared:
        """Train until it is warm, `least_s` at least; then, if it `proves`, compare the first steps.

        Raises what the model raises, and ProofError where they are not the plain module's.
        """
        case, prover = self.case, self.shared.prover
        part = case.get_part(self.shared.place.rank)
        first = FirstSteps(
            case, self.trainer, prover.maker.seed, part, keeps=proves, start=prover.maker.start
        )
        # After a failure, too, the next case is compiled as it asks.
        with contextlib.closing(first), self.enter_training():
            found = self._train_until_warm(least_s, first)
        if not proves:
            return found
        return msgspec.structs.replace(
            found, update=prover.prove_update(first, prover.make_subject(case, self.stages))
        )

    def _train_until_warm(self, least_s: float, first: FirstSteps) -> Prepared:
        case, trainer, prover, mode = self.case, self.trainer, self.shared.prover, self.trainer.mode
        num_least, compiling = MIN_WARMUP_STEPS, [] if case.compile == "off" else [CompileWatch()]
        if compiling and first.keeps and prover.draws:
            # What is timed draws as the compiler would, which no eager module does: it is compiled anew.
            num_least += PROOF_STEPS
            first.until_over.callback(lambda: compiling.append(CompileWatch()))
            first.until_over.callback(compile_module, mode.module, case.compile)
            first.until_over.enter_context(draw_as_eager())
        steps: list[float] = []
        while len(steps) < num_least or not self._is_warm(steps, least_s):
            steps += run_block(trainer.step, 1, self.shared.clock).steps_ms
            first.note_step()
        first.close()
        compilation = compiling[-1].count_compiled() if compiling else None
        memory = self.memory.measure_rise()
        trainer.check_loss()
        if compilation is not None and case.communicates:
            trainer.step_locally()  # may need graphs of its own, which no block should wait for
        trainer.check_loss()
        self.layout = mode.read_bucket_layout()
        mode.stop_sampling()
        # Another rank may need it for the next case: DP trains on everyone's GPU.
        release_memory(self.shared.place.device)
        times = BlockTimes(sum(steps), tuple(steps))
        return Prepared(times=times, memory=memory, compilation=compilation, layout=self.layout)

    def _is_warm(self, steps_ms: Sequence[float], least_s: float) -> bool:
        """Tell whether warm-up is over; ranks must take equally many steps, or the next collective hangs."""
        settled = len(steps_ms) >= MAX_WARMUP_STEPS or steps_ms[-1] >= MAX_WARMUP_RATIO * min(steps_ms[:-1])
        settled = settled and sum(steps_ms[NUM_UNSTEADY_STEPS:]) >= 1000 * least_s
        return not self._find_largest(float(not settled))

    def _find_largest(self, value: float) -> float:
        return (
            value if self.group is None else find_longest((value,), self.group, self.shared.place.device)[0]
        )

    def measure(self, phase: str, steps: int) -> BlockTimes:
        """Measure a block of `phase`, of `steps` steps where it is steps alone."""
        trainer, telemetry = self.trainer, self.shared.telemetry
        times = self._measure_phase(phase, steps)
        if phase == "timed" and telemetry is not None:
            end_s, gpus = time.monotonic(), list_gpus(self.case, self.shared.place)
            # Counted back from its end: steps before it that are not timed are left out.
            told = telemetry.summarize_between(end_s - times.block_ms / 1000, end_s, gpus)
            times = replace(times, detail={**times.detail, **told})
        trainer.check_loss()
        trainer.release_gradients()
        return times

    def _measure_phase(self, phase: str, steps: int) -> BlockTimes:
        trainer, layout, device = self.trainer, self.layout, self.shared.place.device
        if phase in ("timed", "no_sync"):  # steps and nothing else
            return self._time_steps(trainer.step_locally if phase == "no_sync" else trainer.step, steps)
        if phase == "anatomy":
            return self._run_anatomy()
        if phase == "trace":
            num_buckets = 0 if layout is None else len(layout.num_bytes)
            group = self.group if self.case.communicates else None
            return run_trace(trainer, device, num_buckets, group=group, keep=self.shared.settings.trace)
        assert layout is not None  # a case that communicates has buckets
        if phase == "calibration":
            clock, num_ranks = self.shared.clock, self.case.num_ranks
            return run_calibration(trainer, layout, self.group, device, clock, num_ranks=num_ranks)
        sparse = _find_sparse_gradients(trainer, layout.parameters) if trainer.mode.sparse else {}
        hook, dtypes = self.case.comm_hook, layout.dtypes
        replay = BucketReplay(layout.num_bytes, hook, self.group, device, dtypes=dtypes, sparse=sparse)
        return replay.time_block(self.shared.clock, first=trainer.mode.broadcast_buffers)

    def _time_steps(self, step: Callable[[], None], number: int) -> BlockTimes:
        """Time a block in which no rank asked a GPU's driver for memory, or the last of some."""
        gpus, lead_in = list_gpus(self.case, self.shared.place), self.trainer.num_lead_in
        for _ in range(MAX_BLOCKS):
            times = run_block(step, number, self.shared.clock, lead_in=lead_in, gpus=gpus)
            if not gpus or not self._find_largest(times.detail[DEVICE_ALLOCS]):
                break
        return times

    def _run_anatomy(self) -> BlockTimes:
        trainer, case, device = self.trainer, self.case, self.shared.place.device
        if case.spec.is_staged:
            return run_pipeline_anatomy(trainer, ANATOMY_STEPS, device, self.group)
        buckets = () if self.layout is None else self.layout.parameters
        local_steps = 1 if case.communicates else 0
        return run_anatomy(trainer, ANATOMY_STEPS, device, local_steps=local_steps, buckets=buckets)


def build(case: Case, group: dist.ProcessGroup | None, shared: Shared, stages: Stages | None) -> PreparedCase:
    """Build a case. Raises Unsupported, or what the model raises."""
    place, prover = shared.place, shared.prover
    release_memory(place.device)  # torch before 2.15 leaves cycles, which would count as other cases'
    source = open_case_source(case, shared)
    memory = MemoryWatch(list_devices(case, place), source.held)
    prover.make_subject(case, stages)
    module = move_and_compile(prover.maker.make_module(), case, place.device)
    mode = build_mode(case, module, place, group, stages=stages)
    return PreparedCase(
        case, group, shared, Trainer(case, mode, prover.maker.workload, source), memory, stages
    )


def open_case_source(case: Case, shared: Shared) -> BatchSource:
    """Open the batches of this rank; those that another live case holds are not drawn again."""
    place = shared.place
    return shared.prover.maker.open_source(case, case.get_part(place.rank), place.device, shared.drawn)


def _find_sparse_gradients(trainer: Trainer, buckets: Sequence[Sequence[int]]) -> dict[int, torch.Tensor]:
    """Find the sparse gradients of a step of this rank alone, by the number of the bucket that each is."""
    trainer.step_locally()
    found = [one.grad for one in trainer.mode.module.parameters() if one.requires_grad]
    own = {number: found[bucket[0]] for number, bucket in enumerate(buckets)}
    return {number: one.coalesce() for number, one in own.items() if one is not None and one.is_sparse}
