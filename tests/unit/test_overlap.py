import itertools

from hypothesis import given
from hypothesis import strategies as st

from ddp_bench.bench.measure.trace import (
    bucket_runs,
    communication_and_compute,
    intersection,
    length,
    overlap_pct,
    union,
)

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def covered(spans):
    """The oracle: unit cells, counted one by one."""
    return {cell for start, end in spans for cell in range(start, end)}


@given(SPANS, SPANS)
def test_interval_arithmetic_equals_counting_cells(a, b):
    assert length(a) == len(covered(a))
    assert length(intersection(a, b)) == len(covered(a) & covered(b))
    merged = union(a)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(merged)), "disjoint and in order"


def test_overlap_by_hand():
    assert overlap_pct([(0, 10)], [(5, 20)]) == 50
    assert overlap_pct([(0, 10), (0, 10)], [(0, 10)]) == 100, "time counts once"
    assert overlap_pct([(0, 10)], []) == 0
    assert overlap_pct([], [(0, 10)]) is None, "nothing communicated is not 0% hidden"


def event(name, ts, dur, cat="user_annotation"):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 1, "tid": 1}


GLOO_STEP = [
    event("step", 0, 100),
    event("backward", 30, 60),
    event("aten::convolution", 0, 30, "cpu_op"),
    event("aten::mm", 30, 40, "cpu_op"),
    event("c10d::allreduce_", 50, 50, "cpu_op"),
    event("gloo:all_reduce", 50, 10),
    event("gloo:all_reduce", 65, 20),
]


def test_gloo_trace():
    comm, compute = communication_and_compute(GLOO_STEP)
    assert overlap_pct(comm, compute) == 100 * 15 / 30, "waiting inside c10d is not compute"
    assert bucket_runs(GLOO_STEP, 2) == [(30, [(50, 60), (65, 85)])]


def test_nccl_trace():
    events = [
        event("step", 0, 50),
        event("backward", 5, 10),
        event("backward", 20, 60, "gpu_user_annotation"),
        event("sm90_gemm", 20, 40, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 40, "kernel"),
        event("aten::mm", 0, 1000, "cpu_op"),
    ]
    comm, compute = communication_and_compute(events)
    assert overlap_pct(comm, compute) == 50, "the host's operators are not the GPU's work"
    assert bucket_runs(events, 1) == [(20, [(40, 80)])], "the GPU's clock, not the host's annotation"


def test_a_trace_that_does_not_show_one_all_reduce_per_bucket_says_nothing_of_buckets():
    assert bucket_runs(GLOO_STEP, 3) == []
    assert bucket_runs([e for e in GLOO_STEP if e["name"] != "backward"], 2) == []
