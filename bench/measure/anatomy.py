"""The anatomy pass: where a step's time goes. Never mixed with the timed pass.

For its duration it is noted when each call of some methods begins and ends, of the trainer, DP, DDP and a
pipeline's stage; hooks on the parameters note when each gradient is ready.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..modes import Mode
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

Method = tuple[object, str, str]
"""An object, the name of one of its methods, and the name of what its calls take."""


class Anatomy:
    """Looks into steps of a trainer: what calls of methods take, its phases first."""

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self.trainer = trainer
        self.clock = make_clock(device)
        self._spans: dict[str, list[tuple[Clock, Any, Any]]] = {f"{phase}_ms": [] for phase in PHASES}
        self._ready: dict[int, Any] = {}

    def measure_step(self, step: Callable[[], None]) -> tuple[dict[str, float], dict[int, float], float]:
        """Run one step: milliseconds by name, of each gradient since the backward began, and in all."""
        self._ready.clear()
        for spans in self._spans.values():
            spans.clear()
        with self.trainer.hook_phases(lambda phase: self._note_span(f"{phase}_ms", self.clock)):
            begin = self.clock.record_moment()
            step()
            end = self.clock.record_moment()
        self.clock.wait()
        ms = self.clock.measure_ms
        total, backwards = ms(begin, end), self._spans["backward_ms"]
        found = {
            name: sum(clock.measure_ms(*span) for clock, *span in own) for name, own in self._spans.items()
        }
        # What comes between the other phases is zero_grad.
        found["optimizer_ms"] = total - sum(found[f"{phase}_ms"] for phase in PHASES if phase != "optimizer")
        # With accumulation the last micro-batch's, the one that communicates.
        start = backwards[-1][1] if backwards else begin
        return found, {index: ms(start, moment) for index, moment in self._ready.items()}, total

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

    def time_methods(
        self, methods: Iterable[Method], clock: Clock | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Within it, note what the calls of these methods take, by `clock` or else by the steps' own."""
        timed = list(methods)
        self._spans |= {name: [] for *_, name in timed}
        note = partial(self._note_span, clock=clock or self.clock)
        return hook_methods((owner, method, partial(note, name)) for owner, method, name in timed)

    @contextlib.contextmanager
    def _note_span(self, name: str, clock: Clock) -> Iterator[None]:
        start = clock.record_moment()
        yield
        self._spans[name].append((clock, start, clock.record_moment()))


class WaitingClock(Clock):
    """The host's time once these GPUs are done: others would get contexts outside the case."""

    def __init__(self, gpus: Sequence[int]) -> None:
        super().__init__()
        self._gpus = gpus

    def record_moment(self) -> Any:
        for index in self._gpus:
            torch.cuda.synchronize(index)
        return super().record_moment()


def list_timed_methods(mode: Mode) -> tuple[list[Method], Clock | None]:
    """List the methods of DP or DDP that an anatomy times; the clock for it where it is not the steps'."""
    if isinstance(mode, DistributedMode):
        return [(mode.ddp, "_sync_buffers", "sync_buffers_ms")], None
    parallel = mode.wrapped
    if not isinstance(parallel, torch.nn.DataParallel):
        return [], None
    known: list[Method] = [
        (parallel, method, column) for method, column in DP_STAGES.items() if hasattr(parallel, method)
    ]
    return known, WaitingClock([] if isinstance(parallel, DataParallelStandIn) else parallel.device_ids)


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
    anatomy, mode = Anatomy(trainer, device), trainer.mode
    ddp = mode.ddp if isinstance(mode, DistributedMode) else None
    steps: list[float] = []
    samples: dict[str, list[float]] = defaultdict(list)
    ready: dict[int, list[float]] = defaultdict(list)
    trainer.take_lead_in(trainer.step)
    with (
        pause_gc(),
        anatomy.note_gradients(),
        anatomy.time_methods(*list_timed_methods(mode)),
        _log_steps(mode),
    ):
        for number in range(num_steps):
            found, moments, total = anatomy.measure_step(trainer.step)
            steps.append(total)
            if moments:  # FSDP2 sets gradients past the hooks
                found["last_ready_ms"] = max(moments.values())
            # The first window is of an iteration before this pass.
            if ddp is not None and (window := read_overlap(ddp)) is not None and number:
                found["overlap_window_pct"] = window
            for name, value in found.items():
                samples[name].append(value)
            for index, value in moments.items():
                ready[index].append(value)
        for _ in range(local_steps):
            _, moments, _ = anatomy.measure_step(trainer.step_locally)
            samples["local_last_ready_ms"].append(max(moments.values()))
    detail: dict[str, Any] = {name: round(median(values), 4) for name, values in samples.items()}
    if "dp_reduce_ms" in detail:
        parallel_ms = detail["dp_apply_ms"] + detail["dp_backward_ms"]
        detail["dp_device0_pct"] = round(100 * (1 - parallel_ms / median(steps)), 3)
    elif "dp_apply_ms" in detail:
        detail["dp_backward_ms"] = detail["backward_ms"]  # on GPUs one backward reduces too
    if buckets:
        medians_ms = {index: round(median(values), 4) for index, values in ready.items()}
        detail["ready_ms"] = compute_bucket_ready_ms(medians_ms, buckets)
    return BlockTimes(sum(steps), tuple(steps), detail)


@contextlib.contextmanager
def _log_steps(mode: Mode) -> Iterator[None]:
    """Within it, DDP's logger tells of each step."""
    if not isinstance(mode, DistributedMode):
        yield
        return
    mode.set_sample_rate(1)
    try:
        yield
    finally:
        mode.set_sample_rate(MAX_SAMPLE_RATE)


def compute_bucket_ready_ms(ready_ms: dict[int, float], parameters: Sequence[Sequence[int]]) -> list[float]:
    """Return when the last gradient of each bucket is ready, from the ready time of each parameter.

    DDP takes a parameter that gets none as ready when the first gradient is.
    """
    first = min(ready_ms.values())
    return [max(ready_ms.get(index, first) for index in bucket) for bucket in parameters]


def run_pipeline_anatomy(
    trainer: Trainer, num_steps: int, device: torch.device, group: dist.ProcessGroup | None
) -> BlockTimes:
    """`num_steps` steps of which is noted what each stage computes; its ranks call it together.

    The detail holds `bubble_pct`, 100 x (1 - what all stages compute / (stages x time of the longest)).
    """
    anatomy, mode = Anatomy(trainer, device), cast("PipelineMode", trainer.mode)
    steps: list[float] = []
    bubbles: list[float] = []
    # Without what they wait for, the methods of PyTorch's stage compute on one micro-batch.
    methods = [(mode.stage, "forward_one_chunk", "forward"), (mode.stage, "backward_one_chunk", "backward")]
    trainer.take_lead_in(trainer.step)
    with pause_gc(), anatomy.time_methods([(mode, "train", "window"), *methods]):
        for _ in range(num_steps):
            found, _, total = anatomy.measure_step(trainer.step)
            steps.append(total)
            own = torch.tensor([found["window"], found["forward"] + found["backward"]], device=device)
            stages = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(stages, own, group)
            windows_ms, busy_ms = zip(*(stage.tolist() for stage in stages), strict=True)
            # A stage waits in its window for the one before it: that of the first holds the whole batch.
            bubbles.append(100 * (1 - sum(busy_ms) / (len(stages) * windows_ms[0])))
    return BlockTimes(sum(steps), tuple(steps), {"bubble_pct": round(median(bubbles), 3)})
