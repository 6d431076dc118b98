"""Anything where a trace should be: spans, or a refusal in one line; and overlap stays a share."""

from __future__ import annotations

from typing import Any

from fuzzing import HOSTILE_TEXT, bounded, read_or_refused
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_bench.bench.measure.trace import (
    bucket_runs,
    communication_and_compute,
    in_steps,
    overlap_pct,
    spans_of,
)

NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(10**400), True, None, "1"]))
NAMES = st.sampled_from(
    ["step", "backward", "gloo:all_reduce", "ncclDevKernel_AllReduce_x", "aten::mm", 5, None]
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.just("X")},
    optional={
        "name": NAMES | HOSTILE_TEXT,
        "ts": NUMBERS,
        "dur": NUMBERS,
        "cat": st.sampled_from(
            ["cpu_op", "kernel", "user_annotation", "gpu_user_annotation", "cuda_runtime", 3, []]
        ),
        "args": NUMBERS | st.fixed_dictionaries({"correlation": NUMBERS | st.just([])}),
    },
)
GOOD = st.builds(
    lambda name, ts, dur, cat, number: {
        "ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": {"correlation": number}
    },
    NAMES,
    st.floats(-1e6, 1e6),
    st.floats(-1e6, 1e6),
    st.sampled_from(["cpu_op", "kernel", "user_annotation", "cuda_runtime"]),
    st.integers(0, 3),
)  # fmt: skip


def read(trace: Any) -> bool:
    def use() -> None:
        events = in_steps(spans_of(trace, "a trace"))
        share = overlap_pct(*communication_and_compute(events))
        assert share is None or 0 <= share <= 100.001
        bucket_runs(events, 2)

    return read_or_refused(use)


@bounded(200)
@given(events=st.lists(EVENTS | st.none() | st.lists(NUMBERS, max_size=2), max_size=4))
def test_any_events(events: list[Any]) -> None:
    read({"traceEvents": events})


@bounded(200)
@given(events=st.lists(GOOD, max_size=8))
def test_whole_events_are_read(events: list[Any]) -> None:
    assert read({"traceEvents": events})


@bounded(100)
@given(trace=NUMBERS | st.text(max_size=4) | st.dictionaries(st.text(max_size=4), NUMBERS, max_size=2))
@example(trace=[])
@example(trace={"traceEvents": {"ph": "X"}})
def test_anything_else(trace: Any) -> None:
    assert not read(trace)
