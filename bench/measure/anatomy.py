"""The anatomy pass: where a step's time goes. Never mixed with the timed pass.

The trainer's hook puts a mark after each phase of a step; hooks on the parameters note when each gradient is
ready; stages of DP and of pipelines are wrapped for the duration of the pass and unwrapped after.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..modes.ddp import MAX_SAMPLE_RATE, DistributedMode, read_overlap
from ..modes.dp import DataParallelStandIn
from ..results.block_times import BlockTimes
from .clock import Clock, make_clock
from .timed import PHASES, Trainer, hook_methods, pause_gc

if TYPE_CHECKING:
    from ..modes.pipeline import PipelineMode

DP_STAGES = {
    "scatter": "dp_scatter_ms",
    "replicate": "dp_replicate_ms",
    "parallel_apply": "dp_apply_ms",
    "gather": "dp_gather_ms",
    "run_replica_backwards": "dp_backward_ms",
    "reduce_gradients": "dp_reduce_ms",
}
"""Methods of DP, and the columns of their durations; the backward's two are the stand-in's alone."""


class Anatomy:
    """Looks into steps of a trainer, with a mark after every phase."""

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self.trainer = trainer
        self.clock = make_clock(device)
        self._phases: list[tuple[str, Any]] = []
        self._ready: dict[int, Any] = {}

    def measure_step(self, step: Callable[[], None]) -> tuple[dict[str, float], dict[int, float], float]:
        """Run one step: milliseconds by phase, of each gradient since the backward began, and in all."""
        self._ready.clear()
        self._phases = [("", self.clock.record_moment())]
        with self.trainer.hook_phases(self._mark_phase):
            step()
        self.clock.wait()
        phases = dict.fromkeys(PHASES, 0.0)
        ms = self.clock.measure_ms
        backward_start = self._phases[0][1]
        for (_, start), (name, end) in itertools.pairwise(self._phases):
            phases[name] += ms(start, end)
            if name == "backward":
                backward_start = start  # with accumulation the last micro-batch's, the one that communicates
        ready = {index: ms(backward_start, moment) for index, moment in self._ready.items()}
        return phases, ready, ms(self._phases[0][1], self._phases[-1][1])

    @contextlib.contextmanager
    def note_gradients(self) -> Iterator[None]:
        """Note, within it, when the gradient of each trained parameter is ready, by its place."""

        def note(index: int, _: Tensor) -> None:
            self._ready[index] = self.clock.record_moment()

        trained = [p for p in self.trainer.mode.module.parameters() if p.requires_grad]
        with contextlib.ExitStack() as hooks:
            for index, parameter in enumerate(trained):
                handle = parameter.register_post_accumulate_grad_hook(partial(note, index))
                hooks.callback(handle.remove)
            yield

    @contextlib.contextmanager
    def _mark_phase(self, phase: str) -> Iterator[None]:
        if phase == "data":
            self._add_mark("optimizer")  # what came since the last mark is zero_grad
        yield
        self._add_mark(phase)

    def _add_mark(self, phase: str) -> None:
        self._phases.append((phase, self.clock.record_moment()))


def run_anatomy(
    trainer: Trainer,
    num_steps: int,
    device: torch.device,
    *,
    local_steps: int,
    buckets: Sequence[Sequence[int]] = (),
) -> BlockTimes:
    """`num_steps` instrumented steps, then `local_steps` without communication.

    The detail holds medians over the steps in ms: the phases, the DP stages, `last_ready_ms` (gradient
    computation ends, since the backward began) with and without communication, and `ready_ms` by bucket; of
    DDP `sync_buffers_ms`, its broadcast of buffers in the forward.
    """
    anatomy = Anatomy(trainer, device)
    steps: list[float] = []
    samples: dict[str, list[float]] = {}
    ready: dict[int, list[float]] = {}
    trainer.take_lead_in(trainer.step)
    dp_stages, ddp_stages = (
        _time_dp_stages(trainer, samples),
        _log_ddp_stages(trainer, samples, anatomy.clock),
    )
    with pause_gc(), anatomy.note_gradients(), dp_stages, ddp_stages as note_ddp:
        for _ in range(num_steps):
            phases, moments, total = anatomy.measure_step(trainer.step)
            note_ddp()
            steps.append(total)
            for phase, value in phases.items():
                samples.setdefault(f"{phase}_ms", []).append(value)
            for index, value in moments.items():
                ready.setdefault(index, []).append(value)
            if moments:  # FSDP2 sets gradients past the hooks
                samples.setdefault("last_ready_ms", []).append(max(moments.values()))
        for _ in range(local_steps):
            _, moments, _ = anatomy.measure_step(trainer.step_locally)
            samples.setdefault("local_last_ready_ms", []).append(max(moments.values()))
    detail: dict[str, Any] = {name: round(median(values), 4) for name, values in samples.items()}
    if "dp_apply_ms" in detail and "dp_reduce_ms" in detail:
        parallel_ms = detail["dp_apply_ms"] + detail["dp_backward_ms"]
        detail["dp_device0_pct"] = round(100 * (1 - parallel_ms / median(steps)), 3)
    if buckets:
        medians_ms = {index: round(median(values), 4) for index, values in ready.items()}
        detail["ready_ms"] = compute_bucket_ready_ms(medians_ms, buckets)
    return BlockTimes(sum(steps), tuple(steps), detail)


@contextlib.contextmanager
def _log_ddp_stages(
    trainer: Trainer, samples: dict[str, list[float]], clock: Clock
) -> Iterator[Callable[[], None]]:
    """Have DDP tell of each step; what it yields is called after one."""
    mode, windows, sent = trainer.mode, list[float | None](), list[tuple[Any, Any]]()
    if not isinstance(mode, DistributedMode):
        yield lambda: None
        return
    ddp = mode.ddp

    def note() -> None:
        windows.append(read_overlap(ddp))
        samples.setdefault("sync_buffers_ms", []).append(_sum_ms(clock, sent))

    with hook_methods([(ddp, "_sync_buffers", partial(_note_marks, clock, sent))]):
        mode.set_sample_rate(1)
        try:
            yield note
        finally:
            mode.set_sample_rate(MAX_SAMPLE_RATE)
    # The first window is of an iteration before this pass.
    if known := [window for window in windows[1:] if window is not None]:
        samples["overlap_window_pct"] = known


@contextlib.contextmanager
def _time_dp_stages(trainer: Trainer, samples: dict[str, list[float]]) -> Iterator[None]:
    parallel = trainer.mode.wrapped
    if not isinstance(parallel, torch.nn.DataParallel):
        yield
        return
    gpus = [] if isinstance(parallel, DataParallelStandIn) else parallel.device_ids
    with hook_methods(
        (parallel, method, partial(_time_gpus, samples.setdefault(column, []), gpus))
        for method, column in DP_STAGES.items()
        if hasattr(parallel, method)
    ):
        yield
    # On GPUs one backward reduces too.
    samples.setdefault("dp_backward_ms", samples["backward_ms"])


@contextlib.contextmanager
def _time_gpus(into: list[float], gpus: Sequence[int]) -> Iterator[None]:
    """Note how long what is within it takes on these GPUs: others would get contexts outside the case."""
    for index in gpus:
        torch.cuda.synchronize(index)
    start = time.perf_counter_ns()
    yield
    for index in gpus:
        torch.cuda.synchronize(index)
    into.append((time.perf_counter_ns() - start) / 1e6)


def compute_bucket_ready_ms(ready_ms: dict[int, float], parameters: Sequence[Sequence[int]]) -> list[float]:
    """Return when the last gradient of each bucket is ready, from the ready time of each parameter.

    DDP takes a parameter that gets none as ready when the first gradient is.
    """
    first = min(ready_ms.values())
    return [max(ready_ms.get(index, first) for index in bucket) for bucket in parameters]


def run_pipeline_anatomy(
    trainer: Trainer, num_steps: int, device: torch.device, group: dist.ProcessGroup | None
) -> BlockTimes:
    """`num_steps` steps with marks around what each stage computes; its ranks call it together.

    The detail holds `bubble_pct`, 100 x (1 - what all stages compute / (stages x time of the longest)).
    """
    clock, mode = make_clock(device), cast("PipelineMode", trainer.mode)
    steps: list[float] = []
    bubbles: list[float] = []
    windows: list[tuple[Any, Any]] = []
    computed: list[tuple[Any, Any]] = []
    # Without what they wait for, these methods of PyTorch's stage compute on one micro-batch.
    parts = [(mode.stage, "forward_one_chunk", computed), (mode.stage, "backward_one_chunk", computed)]
    hooks = [
        (o, name, partial(_note_marks, clock, its)) for o, name, its in [(mode, "train", windows), *parts]
    ]
    trainer.take_lead_in(trainer.step)
    with pause_gc(), hook_methods(hooks):
        for _ in range(num_steps):
            start = time.perf_counter_ns()
            trainer.step()
            clock.wait()
            steps.append((time.perf_counter_ns() - start) / 1e6)
            own = torch.tensor([_sum_ms(clock, its) for its in (windows, computed)], device=device)
            found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, own, group)
            windows_ms, busy_ms = zip(*(stage.tolist() for stage in found), strict=True)
            # A stage waits in its window for the one before it: that of the first holds the whole batch.
            bubbles.append(100 * (1 - sum(busy_ms) / (len(found) * windows_ms[0])))
    return BlockTimes(sum(steps), tuple(steps), {"bubble_pct": round(median(bubbles), 3)})


def _sum_ms(clock: Clock, marks: list[tuple[Any, Any]]) -> float:
    total = sum(clock.measure_ms(start, end) for start, end in marks)
    marks.clear()
    return total


@contextlib.contextmanager
def _note_marks(clock: Clock, marks: list[tuple[Any, Any]]) -> Iterator[None]:
    start = clock.record_moment()
    yield
    marks.append((start, clock.record_moment()))
