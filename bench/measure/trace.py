"""The trace pass: a step under `torch.profiler`, as a Chrome trace and as overlap by intersection.

On CPUs gloo's collectives are annotations on gloo's own threads, from the moment a thread takes them up until
they are done; on GPUs NCCL's are kernels. Compute is every operator of the training thread, or on GPUs every
other kernel. There the host's operators do no work, and copies, which gloo makes of its messages, are none.
Overlap is HTA's (Holistic Trace Analysis, communication-computation overlap): the time in which both run,
over the time in which communication runs.

A GPU runs behind the host: a kernel belongs to what the host launched it in.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ...models.workload import format_error
from ..common.errors import UsageError
from ..common.scratch import make_scratch_folder
from ..results.block_times import TRACE_FAILED, BlockTimes
from ..results.disk import MAX_TRACE_BYTES, read_json
from .clock import make_clock
from .timed import Trainer, run_block

Span = tuple[float, float]
"""Start and end, in one unit of time."""

NCCL_KERNEL = re.compile(r"nccl\w*Kernel_")
"""NCCL's kernels: `ncclDevKernel_*`, older `ncclKernel_*`, on symmetric memory `ncclSymkDevKernel_*`."""

GLOO = "gloo:"
ALL_REDUCE = re.compile(r"gloo:all_reduce|nccl\w*Kernel_AllReduce")

ANNOTATION = "user_annotation"
"""Kineto's category of the host's annotations; their copies on the GPU's streams have another."""

LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Its categories of calls that launch kernels: a kernel has the `correlation` of its launch."""

Event = Mapping[str, Any]


def run_trace(
    trainer: Trainer,
    device: torch.device,
    num_buckets: int,
    *,
    group: dist.ProcessGroup | None,
    keep: bool,
) -> BlockTimes:
    """Profile a step; every rank of `group` (None: of one rank alone) calls this together.

    The detail holds `overlap_trace_pct`, and `start_ms` and `done_ms` of each bucket's all-reduce since the
    start of the backward (absent where the trace does not show one per bucket); with `keep` the block has the
    gzipped Chrome trace. Overlap within a step is what it is for, and a trace of each rank is large: so it is
    one step.
    """
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []

    def step() -> None:
        with record_function("step"):
            trainer.step()

    with warnings.catch_warnings():
        # There is one cycle. `acc_events=True`, which it asks for, would parse all events once more.
        warnings.filterwarnings("ignore", message="(Warning: )?Profiler clears events")
        with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiler:
            _begin(trainer, device, group)
            with trainer.hook_phases(record_function):
                times = run_block(step, 1, make_clock(device))
    try:
        with make_scratch_folder() as folder:
            path = folder / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace = read_json(path, most_bytes=MAX_TRACE_BYTES)
        events = select_step_events(
            [event for event in trace["traceEvents"] if event["ph"] == "X"]
        )  # with a duration
    except (UsageError, LookupError, TypeError) as error:  # of PyTorch's file, which no case needs
        reason = format_error(error).removeprefix("UsageError: ")
        reason = reason.replace(str(path), "the profiler's trace")  # whose folder may name a user
        return BlockTimes(times.block_ms, times.steps_ms, {TRACE_FAILED: reason})
    if device.type == "cuda" and not _select_kernels(events):
        events = []  # CUPTI was not to be had: the host's operators are not the GPU's work
    detail: dict[str, Any] = {}
    overlap = compute_overlap_pct(*split_spans(events))
    if overlap is not None:
        detail["overlap_trace_pct"] = round(overlap, 3)
    begun, spans = find_all_reduces(events, num_buckets)
    if spans:
        detail["start_ms"] = [round((start - begun) / 1000, 4) for start, _ in spans]
        detail["done_ms"] = [round((end - begun) / 1000, 4) for _, end in spans]
    kept = gzip.compress(json.dumps(trace).encode(), mtime=0) if keep else None
    return BlockTimes(times.block_ms, times.steps_ms, detail, kept)


def _begin(trainer: Trainer, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Bring the ranks together, for profilers do not start at once; on a GPU take a step that does not count.

    CUPTI makes its buffers with the first kernels. On CPUs the first step under the profiler is no slower.
    """
    if group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with record_function("warm-up"):
            trainer.step()


def select_step_events(events: Sequence[Event]) -> list[Event]:
    """Return the events that the host began in the annotated step or after it; all without an annotation."""
    begun_us = _make_begin_reader(events)
    first = min(_list_starts(events, "step"), default=-math.inf)
    return [event for event in events if begun_us(event) >= first]


def split_spans(events: Sequence[Event]) -> tuple[list[Span], list[Span]]:
    """Spans of communication and of compute, in the trace's microseconds."""
    kernels = _select_kernels(events)
    gloo = [e for e in events if e.get("cat") == ANNOTATION and str(e["name"]).startswith(GLOO)]
    comm = [e for e in kernels if _is_nccl(e)] or gloo
    # Of the host's operators c10d's wait for communication.
    host = [e for e in events if e.get("cat") == "cpu_op" and not str(e["name"]).startswith("c10d::")]
    compute = [e for e in kernels if not _is_nccl(e)] if kernels else host
    return [_get_span(e) for e in comm], [_get_span(e) for e in compute]


def find_all_reduces(events: Sequence[Event], num_buckets: int) -> tuple[float, list[Span]]:
    """Start of the step's last backward, and the span of each bucket's all-reduce, microseconds.

    On a GPU the backward starts with the first kernel that the host launched in it. There are no spans where
    the step does not show exactly one all-reduce per bucket (DDP adds one of its own under
    `find_unused_parameters`): which is whose cannot be told then.
    """
    backward = max(_list_starts(events, "backward"), default=None)
    its = [e for e in events if e.get("cat") in ("kernel", ANNOTATION)]
    spans = sorted(_get_span(e) for e in its if ALL_REDUCE.match(str(e["name"])))
    if backward is None or len(spans) != num_buckets:
        return 0.0, []
    begun_us = _make_begin_reader(events)
    kernels = [e for e in _select_kernels(events) if not _is_nccl(e) and begun_us(e) >= backward]
    return min((float(e["ts"]) for e in kernels), default=backward), spans


def _make_begin_reader(events: Sequence[Event]) -> Callable[[Event], float]:
    """Return a function for when the host began an event: launched it, where `events` hold a launch."""
    launches = {_get_correlation(e): float(e["ts"]) for e in events if e.get("cat") in LAUNCHES}
    launches.pop(None, None)

    def get_begin_us(event: Event) -> float:
        is_kernel = event.get("cat") == "kernel"
        return launches.get(_get_correlation(event) if is_kernel else None, float(event["ts"]))

    return get_begin_us


def _get_correlation(event: Event) -> int | None:
    return event.get("args", {}).get("correlation") or None  # CUPTI's 0 stands for none


def _list_starts(events: Sequence[Event], name: str) -> list[float]:
    return sorted(float(e["ts"]) for e in events if e["name"] == name and e.get("cat") == ANNOTATION)


def _select_kernels(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") == "kernel"]


def _is_nccl(event: Event) -> bool:
    return NCCL_KERNEL.match(str(event["name"])) is not None


def _get_span(event: Event) -> Span:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0.0))


def measure_covered(spans: Iterable[Span]) -> float:
    """Sum up the covered time, counted once; spans that end before they start cover none."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


def compute_overlap_pct(communication: Sequence[Span], compute: Sequence[Span]) -> float | None:
    """100 x |communication and compute| / |communication|; None where nothing was communicated."""
    total = measure_covered(communication)
    both = total + measure_covered(compute) - measure_covered([*communication, *compute])
    # Of very long traces the difference has few digits.
    return 100 * min(max(both, 0.0), total) / total if total > 0 else None
