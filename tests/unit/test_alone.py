"""What a link does by itself: curves of all-reduces, what NCCL is asked."""

from collections import Counter
from types import SimpleNamespace

import pytest
from made import case_of

from ddp_bench.bench.buckets import BucketLayout
from ddp_bench.bench.run.standalone import (
    CURVE_BYTES,
    CURVE_REPETITIONS,
    LEAST_REPETITIONS,
    _curve,
    ask_nccl,
)

MIB = 2**20


def measured(bytes_per_ms, largest, *, further_s=10.0, fails=None):
    """On a link of that rate, whose time is the clock's."""
    clock = [0.0]

    def once(size):
        clock[0] += size / bytes_per_ms / 1000
        return None if size == fails else size / bytes_per_ms

    return _curve(once, largest, lambda: clock[0], further_s=further_s)


@pytest.mark.parametrize(
    ("bytes_per_ms", "largest", "further_s", "last"),
    [
        (100e6, 4 * MIB, 10, 256 * MIB),  # NVLink: all of it
        (125e3, 47 * MIB, 10, 256 * MIB),  # 1 Gbit/s: 256 MiB take 2.1 s
        (125e3, 47 * MIB, 4, 64 * MIB),
        (25e3, 47 * MIB, 10, 64 * MIB),  # 200 Mbit/s: no more than the gradients need
        (25e3, 47 * MIB, float("inf"), 256 * MIB),
        (25e3, 200 * MIB, 0, 256 * MIB),
        (1e6, 4 * MIB, 0.2, 64 * MIB),  # what 16 and 64 MiB take is no longer there for 256 MiB
    ],
)
def test_a_curve_goes_as_far_as_the_gradients_and_further_while_there_is_time(
    bytes_per_ms, largest, further_s, last
):
    found = measured(bytes_per_ms, largest, further_s=further_s)
    assert sorted(found) == [size for size in CURVE_BYTES if size <= last]
    further = {size: len(ms) for size, ms in found.items() if size >= 2 * largest}
    assert set(further.values()) <= {LEAST_REPETITIONS}


def test_a_slow_link_is_measured_less_often_and_a_size_that_fails_has_no_time():
    assert {len(ms) for ms in measured(1e6, 200 * MIB).values()} == {CURVE_REPETITIONS}
    assert {len(ms) for ms in measured(5e3, 47 * MIB).values()} == {LEAST_REPETITIONS}
    found = measured(1e6, 200 * MIB, fails=MIB)
    assert MIB not in found
    assert Counter(map(len, found.values())) == {CURVE_REPETITIONS: len(found)}


def asked_of_nccl(log, backend="nccl", known=None):
    """What a run of two and four ranks, the larger of them with two layouts, asks NCCL and writes down."""
    cases = [case_of(num_devices=n, bucket_cap_mb=cap, comm_hook=hook, backend=backend) for n, cap, hook in (
        (2, "1", "none"), (4, "1", "none"), (4, "25", "bf16"))]  # fmt: skip
    sizes = [(4 * MIB,), (MIB, 3 * MIB), (4 * MIB,)]
    layouts = {one.case_id: BucketLayout(size, (), ()) for one, size in zip(cases, sizes, strict=True)}
    done = []
    recorder = SimpleNamespace(
        manifest=SimpleNamespace(nccl=known),
        journal=SimpleNamespace(state=SimpleNamespace(layouts=layouts)),
        launch=1,
        note=lambda *_: None,
        tell=lambda **facts: done.append(facts),
    )
    run = SimpleNamespace(
        settings=SimpleNamespace(backend=backend),
        plan=[SimpleNamespace(case=one) for one in cases],
        recorder=recorder,
        console=SimpleNamespace(note=done.append),
        next_turn=lambda: done.append("turn"),
        between=lambda command, *_, num_ranks: done.append(command) or [log] * num_ranks,
    )
    ask_nccl(run)
    return done


def test_nccl_is_asked_on_the_most_ranks_with_every_size_they_sent_once_it_is_the_run_s_turn():
    line = "NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}"
    turn, asked, told = asked_of_nccl(line)
    assert turn == "turn"
    assert (asked.num_ranks, asked.sizes, asked.backend) == (4, (MIB, 2 * MIB, 3 * MIB), "nccl")
    assert [(one.bytes, one.algorithm) for one in told["nccl"].messages] == [(MIB, "RING")]


def test_nccl_is_asked_once_and_where_it_sends_and_an_answer_that_says_nothing_is_said():
    assert asked_of_nccl("", backend="gloo") == []
    assert asked_of_nccl("", known=object()) == []
    assert asked_of_nccl("")[2:] == ["How NCCL sends the buckets is not known: its log does not say it"]
