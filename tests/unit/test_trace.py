"""Traces: which kernel belongs to which step, and what runs beside what; GPU traces after kineto's format."""

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import stand_in

from ddp_bench.bench.measure import trace
from ddp_bench.bench.measure.clock import Clock
from ddp_bench.bench.measure.trace import compute_overlap_pct, measure_covered
from ddp_bench.bench.results.block_times import TRACE_FAILED

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def covered(spans):
    """The oracle: unit cells, counted one by one."""
    return {cell for start, end in spans for cell in range(start, end)}


@given(SPANS, SPANS)
def test_overlap_equals_counting_cells(a, b):
    assert measure_covered(a) == len(covered(a))
    both, comm = len(covered(a) & covered(b)), len(covered(a))
    assert compute_overlap_pct(a, b) == (100 * both / comm if comm else None)


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OLDER_NCCL = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
SYMMETRIC_NCCL = "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs4K)"
HOST, GPU = 4711, 0
DEFAULT_STREAM, NCCL_STREAM = 7, 40


def event(cat, name, ts, dur, tid=HOST, **args):
    pid = GPU if tid in (DEFAULT_STREAM, NCCL_STREAM) else HOST
    return {
        "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args
    }  # fmt: skip


GLOO_STEP = [
    event("user_annotation", "step", 0, 100),
    event("user_annotation", "backward", 30, 60),
    event("cpu_op", "aten::convolution", 0, 30),
    event("cpu_op", "aten::mm", 30, 40),
    event("cpu_op", "c10d::allreduce_", 50, 50),
    event("user_annotation", "gloo:all_reduce", 50, 10),
    event("user_annotation", "gloo:all_reduce", 65, 20),
]


def test_gloo_trace():
    comm, compute = trace.split_spans(GLOO_STEP)
    assert compute_overlap_pct(comm, compute) == 100 * 15 / 30, "waiting inside c10d is not compute"
    assert trace.find_all_reduces(GLOO_STEP, 2) == (30, [(50, 60), (65, 85)])


def annotation(name, ts, dur):
    return event("user_annotation", name, ts, dur, **{"External id": int(ts), "Ev Idx": 1})


def copies(name, ts, dur):
    """What kineto draws of an annotation on each stream that a kernel below it ran on."""
    streams = (DEFAULT_STREAM, NCCL_STREAM)
    return [event("gpu_user_annotation", name, ts + i, dur, s) for i, s in enumerate(streams)]


def kernel(name, launched, ts, dur, *, by=("cuda_runtime", "")):
    """A kernel and its launch, which have the correlation in common."""
    stream = NCCL_STREAM if name.startswith("nccl") else DEFAULT_STREAM
    same = {"correlation": int(launched), "External id": int(launched) + 1}
    cat, call = by[0], by[1] or "cudaLaunchKernel"
    return [
        event(cat, call, launched, 3, cbid=211, **same),
        event("kernel", name, ts, dur, stream, device=GPU, stream=stream, **same),
    ]


def step_of(host, gpu):
    """A step with two buckets, for which the host takes 100 and the GPU 400.

    On the GPU: broadcast of buffers 0-10, forward 10-110, backward 110-310, all-reduces 150-250 and 260-360,
    optimizer 360-400. Compute runs during all of the first all-reduce, and during 50 of the second.
    """
    exc = ("cuda_driver", "cuLaunchKernelEx")
    return [
        annotation("step", host, 100),
        annotation("data", host + 1, 4),
        annotation("forward", host + 5, 25),
        *kernel(BROADCAST, host + 6, gpu, 10, by=exc),
        *kernel("sm90_xmma_fprop", host + 10, gpu + 10, 100),
        annotation("backward", host + 30, 50),
        *kernel("void at::native::vectorized_elementwise_kernel<FillFunctor>", host + 31, gpu + 110, 2),
        *kernel("sm90_xmma_dgrad", host + 35, gpu + 112, 138),
        event("cpu_op", "c10d::allreduce_", host + 40, 3, tid=HOST + 1),
        event("cpu_op", "aten::mm", host + 35, 2000),  # the host's operators are not the GPU's work
        *kernel(NCCL, host + 41, gpu + 150, 100, by=exc),
        *kernel("sm90_xmma_wgrad", host + 50, gpu + 250, 60),
        *kernel(NCCL, host + 60, gpu + 260, 100, by=exc),
        annotation("optimizer", host + 80, 20),
        *kernel("multi_tensor_apply_kernel", host + 85, gpu + 360, 40),
    ]


ONE_STEP = step_of(1000, 2000)
RUNS_OF_ONE = (2110, [(2150, 2250), (2260, 2360)])
NO_RUNS = (0, [])
OVERLAP = 100 * (100 + 50) / (10 + 100 + 100)
"""Of `ONE_STEP`: broadcasts are communication, too."""


CLOSE = [e for e in step_of(1000, 1000) if e["cat"] not in ("cuda_runtime", "cuda_driver")]
RUNS_OF_CLOSE = (1110, [(1150, 1250), (1260, 1360)])
EXTRA = kernel(NCCL.replace("f32", "u32"), 1070, 2361, 5)


def renamed(name):
    """As other versions of NCCL call their kernels."""
    return [{**e, "name": e["name"].replace(NCCL, name)} for e in ONE_STEP]


@pytest.mark.parametrize(
    ("events", "runs"),
    [
        # From the first kernel of the backward.
        (ONE_STEP, RUNS_OF_ONE),
        # Copies of annotations on streams are no steps. The backward's copy ends with what its own thread
        # launched, kineto#1022: 2112 instead of 2310.
        (
            [*copies("step", 2000, 5), *copies("backward", 2110, 2), *copies("nccl:x", 2150, 9), *ONE_STEP],
            RUNS_OF_ONE,
        ),
        # Of several backwards the last counts: the first micro-batch accumulates without communication.
        ([*ONE_STEP, annotation("backward", 1003, 2), *kernel("dgrad", 1004, 1990, 5)], RUNS_OF_ONE),
        # A kernel without its launch is placed by its own time, of a GPU that keeps up with its host.
        (CLOSE, RUNS_OF_CLOSE),
        # 0 is CUPTI's word for no correlation.
        (
            [
                event("cuda_runtime", "cudaLaunchKernel", 1, 3, correlation=0),
                *({**e, "args": {"correlation": 0}} if e["cat"] == "kernel" else e for e in CLOSE),
            ],
            RUNS_OF_CLOSE,
        ),
        # One all-reduce too many, as of `find_unused_parameters`, says nothing of the buckets.
        ([*ONE_STEP, *EXTRA], NO_RUNS),
        (GLOO_STEP[:-1], NO_RUNS),
        ([e for e in GLOO_STEP if e["name"] != "backward"], NO_RUNS),
        *((renamed(name), RUNS_OF_ONE) for name in (OLDER_NCCL, SYMMETRIC_NCCL)),
    ],
)
def test_when_the_buckets_ran(events, runs):
    assert trace.find_all_reduces(events, 2) == runs


@pytest.mark.parametrize("name", [NCCL, OLDER_NCCL, SYMMETRIC_NCCL])
def test_communication_is_what_any_version_of_nccl_does(name):
    assert compute_overlap_pct(*trace.split_spans(renamed(name))) == pytest.approx(OVERLAP)


def test_what_precedes_the_step_does_not_count():
    """The small all-reduce, and the step to warm up; what it launched last runs beside the second bucket."""
    warm_up = [e for e in step_of(900, 1600) if e["name"] not in ("step", "backward")]
    before = [*kernel(NCCL, 850, 1500, 30), annotation("warm-up", 900, 100), *warm_up]
    late = kernel("sm90_xmma_last", 999, 2310, 50)
    events = trace.select_step_events([*before, *late, *ONE_STEP])
    assert trace.find_all_reduces(events, 2) == RUNS_OF_ONE
    assert compute_overlap_pct(*trace.split_spans(events)) == pytest.approx(OVERLAP)
    assert compute_overlap_pct(*trace.split_spans([*before, *ONE_STEP])) != pytest.approx(OVERLAP)


def test_without_a_step_everything_counts():
    events = [e for e in ONE_STEP if e["name"] != "step"]
    assert trace.select_step_events(events) == events


GLOO_ON_A_GPU = [
    annotation("step", 0, 100),
    annotation("backward", 20, 60),
    *kernel("dgrad", 25, 30, 40),
    event("cpu_op", "aten::convolution_backward", 20, 60),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 40, 10, NCCL_STREAM, correlation=39),
    event("user_annotation", "gloo:all_reduce", 50, 40, tid=HOST + 2),
    *copies("gloo:all_reduce", 40, 60),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 80, 10, NCCL_STREAM, correlation=79),
    *kernel("multi_tensor_apply_kernel", 96, 105, 5),
]


def test_gloo_on_a_gpu_runs_beside_kernels_alone():
    """All-reduce 50-90, kernel 30-70: neither the operator until 80 nor the copies are compute."""
    assert compute_overlap_pct(*trace.split_spans(GLOO_ON_A_GPU)) == 100 * 20 / 40
    assert trace.find_all_reduces(GLOO_ON_A_GPU, 1) == (30, [(50, 90)])


def traced(events, monkeypatch):
    """A trace pass on a GPU whose profiler saw `events`, and what was done meanwhile."""
    return traced_to(json.dumps({"schemaVersion": 1, "traceEvents": events}), monkeypatch)


def traced_to(content, monkeypatch):
    """The same where the profiler's file has this content."""
    done = []

    def profile(**_):
        return nullcontext(SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(content)))

    monkeypatch.setattr(trace, "profile", profile)
    monkeypatch.setattr(trace, "make_clock", lambda _: Clock())
    stand_in(monkeypatch, trace, {"torch.cuda.synchronize": lambda _: done.append("wait")})
    trainer = SimpleNamespace(
        step=lambda: done.append("step"), hook_phases=lambda around: nullcontext(done.append(around.__name__))
    )
    device = torch.device("cuda", 0)
    return trace.run_trace(trainer, device, 2, group=None, keep=True), done


def test_the_step_that_warms_up_is_neither_timed_nor_evaluated(monkeypatch):
    warm_up = [e for e in step_of(900, 1600) if e["name"] not in ("step", "backward")]
    times, done = traced([*warm_up, *ONE_STEP], monkeypatch)
    assert done == ["wait", "step", "record_function", "step"]
    assert len(times.steps_ms) == 1
    assert times.detail["start_ms"] == [0.04, 0.15]
    assert times.detail["done_ms"] == [0.14, 0.25]
    assert times.detail["overlap_trace_pct"] == pytest.approx(OVERLAP, abs=0.001)
    kept = json.loads(gzip.decompress(times.trace))
    assert kept["traceEvents"] == [*warm_up, *ONE_STEP], "the trace is kept as it was"


def test_a_trace_without_kernels_says_nothing_of_a_gpu(monkeypatch):
    """CUPTI was not to be had: the host's operators and gloo's threads are there all the same."""
    host = [e for e in GLOO_ON_A_GPU if e["cat"] in ("user_annotation", "cpu_op")]
    times, _ = traced(host, monkeypatch)
    assert not times.detail


@pytest.mark.parametrize(
    "content", ['{"traceEvents": [{"ph": "X", "na', "", "[]", '{"traceEvents": [{"ph": "X"}]}']
)
def test_a_trace_that_cannot_be_read_costs_the_pass_its_detail_alone(content, monkeypatch):
    times, done = traced_to(content, monkeypatch)
    assert (len(times.steps_ms), set(times.detail)) == (1, {TRACE_FAILED})
    assert "/" not in times.detail[TRACE_FAILED], "a public file holds it, and the folder may name a user"
    assert done == ["wait", "step", "record_function", "step"]
