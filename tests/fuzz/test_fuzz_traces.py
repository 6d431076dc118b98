"""Any bytes where a trace should be: spans, or a refusal in one line; and overlap stays a share."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzzing import HOSTILE_TEXT, bounded, read_or_refused
from hypothesis import example, given
from hypothesis import strategies as st

from bench.measure.overlap import overlap_pct
from bench.measure.trace import bucket_runs, communication_and_compute, read_trace

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
        "cat": st.sampled_from(["cpu_op", "kernel", "gpu_user_annotation", 3, []]),
    },
)
GOOD = st.builds(
    lambda name, ts, dur, cat: {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat},
    NAMES,
    st.floats(-1e6, 1e6),
    st.floats(-1e6, 1e6),
    st.sampled_from(["cpu_op", "kernel"]),
)


def read(path: Path, content: bytes) -> bool:
    path.write_bytes(content)

    def use() -> None:
        events = read_trace(path)
        share = overlap_pct(*communication_and_compute(events))
        assert share is None or 0 <= share <= 100.001
        bucket_runs(events, 2)

    return read_or_refused(use)


@bounded(200)
@given(events=st.lists(EVENTS | st.none() | st.lists(NUMBERS, max_size=2), max_size=4))
def test_any_events(tmp_path: Path, events: list[Any]) -> None:
    read(tmp_path / "t.json.gz", gzip.compress(json.dumps({"traceEvents": events}).encode()))


@bounded(200)
@given(events=st.lists(GOOD, max_size=8))
def test_whole_events_are_read(tmp_path: Path, events: list[Any]) -> None:
    assert read(tmp_path / "t.json.gz", gzip.compress(json.dumps({"traceEvents": events}).encode()))


@bounded(100)
@given(content=st.binary(max_size=40), pack=st.sampled_from([bytes, gzip.compress]))
@example(content=b"[" * 100_000, pack=gzip.compress)
@example(content=b'{"traceEvents": {"ph": "X"}}', pack=gzip.compress)
@example(content=b'{"traceEvents": [' + b"1" * 5000 + b"]}", pack=gzip.compress)
def test_any_bytes(tmp_path: Path, content: bytes, pack: Callable[[bytes], bytes]) -> None:
    assert not read(tmp_path / "t.json.gz", pack(content))
