"""The trace pass: a few steps under `torch.profiler`, as a Chrome trace and as overlap by intersection.

On CPUs gloo's collectives are annotations on gloo's own threads, from the moment a thread takes them up until
they are done; on GPUs NCCL's are kernels. Compute is every operator of the training thread, or every other
kernel. Overlap is HTA's (Holistic Trace Analysis, communication-computation overlap): the time in which both
run, over the time in which communication runs.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from bench.cluster.scratch import scratch_folder
from bench.errors import UsageError
from bench.measure.clock import make_clock
from bench.measure.timed import BlockTimes, Trainer, run_block
from bench.results.disk import MOST_TRACE_BYTES, read_json
from models.workload import Batch

NCCL_KERNELS = ("ncclDevKernel", "ncclKernel")
"""How the names of NCCL's kernels begin; the second of older versions."""

GLOO = "gloo:"
ALL_REDUCE = ("gloo:all_reduce", "ncclDevKernel_AllReduce", "ncclKernel_AllReduce")

_END_US = 1e18

Event = Mapping[str, Any]

Span = tuple[float, float]
"""Start and end, in one unit."""


class TracedTrainer(Trainer):
    """The steps of `trainer` with an annotation around the step and each of its phases."""

    def __init__(self, trainer: Trainer) -> None:
        self.__dict__.update(trainer.__dict__)

    def step(self) -> None:
        """One annotated optimizer step."""
        with record_function("step"):
            super().step()

    def _fetch(self) -> Batch:
        with record_function("data"):
            return super()._fetch()

    def _evaluate(self, batch: Batch) -> Tensor:
        with record_function("forward"):
            return super()._evaluate(batch)

    def _propagate(self, loss: Tensor) -> None:
        with record_function("backward"):
            super()._propagate(loss)

    def _update(self) -> None:
        with record_function("optimizer"):
            super()._update()


def run_trace(
    trainer: Trainer, num_steps: int, device: torch.device, bucket_bytes: Sequence[int], *, keep: bool
) -> BlockTimes:
    """Profile `num_steps` steps.

    The detail holds `overlap_trace_pct`, and `start_ms` and `done_ms` of each bucket's all-reduce since the
    start of the backward (medians over steps; absent where the trace does not show one per bucket); with
    `keep` also `trace`, the gzipped Chrome trace with the buckets drawn in.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    traced = TracedTrainer(trainer)
    with profile(activities=activities, acc_events=True) as profiler:
        times = run_block(traced.step, num_steps, make_clock(device))
    with scratch_folder() as folder:
        path = folder / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = read_json(path, most_bytes=MOST_TRACE_BYTES)
    events = spans_of(trace, "the profiler's trace")
    detail: dict[str, Any] = {}
    overlap = overlap_pct(*communication_and_compute(events))
    if overlap is not None:
        detail["overlap_trace_pct"] = round(overlap, 3)
    runs = bucket_runs(events, len(bucket_bytes))
    if runs:
        for which, name in enumerate(("start_ms", "done_ms")):
            per_bucket = zip(
                *([(span[which] - begun) / 1000 for span in spans] for begun, spans in runs), strict=True
            )
            detail[name] = [round(median(values), 4) for values in per_bucket]
    if keep:
        trace["traceEvents"] += _bucket_events(runs, bucket_bytes)
        detail["trace"] = gzip.compress(json.dumps(trace).encode(), mtime=0)
    return BlockTimes(times.block_ms, times.steps_ms, detail)


def spans_of(trace: Any, where: str) -> list[Event]:
    """The events with a duration, checked; a trace from elsewhere may hold anything."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise UsageError(f"{where} is no Chrome trace: it has no list of traceEvents; keep one with --trace")
    found: list[Event] = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    for event in found:
        moments = (event.get("ts"), event.get("dur", 0.0))
        if "name" not in event or not all(isinstance(m, int | float) and abs(m) < _END_US for m in moments):
            raise UsageError(f"{where} has an event without a name or a time; keep a trace with --trace")
    return found


def communication_and_compute(events: Sequence[Event]) -> tuple[list[Span], list[Span]]:
    """Spans of communication and of compute, in the trace's microseconds."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    if any(str(e["name"]).startswith(NCCL_KERNELS) for e in kernels):
        comm = [_span(e) for e in kernels if str(e["name"]).startswith(NCCL_KERNELS)]
        return comm, [_span(e) for e in kernels if not str(e["name"]).startswith(NCCL_KERNELS)]
    comm = [_span(e) for e in events if str(e["name"]).startswith(GLOO)]
    compute = [e for e in events if e.get("cat") in ("cpu_op", "kernel")]
    return comm, [_span(e) for e in compute if not str(e["name"]).startswith("c10d::")]


def bucket_runs(events: Sequence[Event], num_buckets: int) -> list[tuple[float, list[Span]]]:
    """For each step the start of its last backward and the spans of its bucket all-reduces, microseconds.

    Empty where a step does not show exactly one all-reduce per bucket (DDP adds one of its own under
    `find_unused_parameters`): which is whose cannot be told then.
    """
    # A GPU runs behind the host, so its own view of the annotation counts where there is one.
    annotations = [e for e in events if e.get("cat") == "gpu_user_annotation"] or events
    backwards = sorted(_span(e) for e in annotations if e["name"] == "backward")
    steps = sorted(_span(e) for e in events if e["name"] == "step")
    reductions = sorted(_span(e) for e in events if str(e["name"]).startswith(ALL_REDUCE))
    runs = []
    for i, (start, _) in enumerate(steps):
        end = steps[i + 1][0] if i + 1 < len(steps) else float("inf")
        begun = [b[0] for b in backwards if start <= b[0] < end]
        spans = [s for s in reductions if start <= s[0] < end]
        if not begun or len(spans) != num_buckets:
            return []
        runs.append((begun[-1], spans))
    return runs


def _bucket_events(runs: Sequence[tuple[float, Sequence[Span]]], bucket_bytes: Sequence[int]) -> list[Event]:
    return [
        {
            "ph": "X",
            "cat": "bucket",
            "name": f"bucket {index}: {num_bytes / 2**20:.2f} MiB",
            "pid": os.getpid(),
            "tid": "DDP buckets",
            "ts": start,
            "dur": end - start,
        }
        for _, spans in runs
        for index, ((start, end), num_bytes) in enumerate(zip(spans, bucket_bytes, strict=True))
    ]


def _span(event: Event) -> Span:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0.0))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same covered time as disjoint spans in order; empty and backward spans vanish."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Covered time, counted once."""
    return sum(end - start for start, end in union(spans))


def intersection(first: Iterable[Span], second: Iterable[Span]) -> list[Span]:
    """Where both cover, as disjoint spans."""
    a, b = union(first), union(second)
    result: list[Span] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def overlap_pct(communication: Iterable[Span], compute: Iterable[Span]) -> float | None:
    """100 x |communication and compute| / |communication|; None where nothing was communicated."""
    comm = union(communication)
    total = length(comm)
    return 100 * length(intersection(comm, compute)) / total if total > 0 else None
