"""What a link does by itself: the first all-reduce, curves of all-reduces, what NCCL is asked."""

from collections import Counter
from types import SimpleNamespace

import pytest
from made import case_of, planned, resolved

from ddp_bench.bench.common.errors import NotMeasuredError
from ddp_bench.bench.machine.manifest import RankPlace
from ddp_bench.bench.plan.buckets import BucketLayout
from ddp_bench.bench.results.block_times import Fault
from ddp_bench.bench.run.communication import (
    CURVE_BYTES,
    CURVE_REPETITIONS,
    MIN_REPETITIONS,
    _time_curve,
    _time_once,
    ask_nccl,
    check_links,
)
from ddp_bench.bench.run.failures import Failure, RestartError
from ddp_bench.bench.worker import messages as m

MIB = 2**20


def measured(bytes_per_ms, largest, *, fails=None):
    """On a link of that rate, whose time is the clock's."""
    clock = [0.0]

    def once(size):
        clock[0] += size / bytes_per_ms / 1000
        return None if size == fails else size / bytes_per_ms

    return _time_curve(once, largest, lambda: clock[0])


@pytest.mark.parametrize(
    ("bytes_per_ms", "largest", "last"),
    [
        (100e6, 4 * MIB, 256 * MIB),  # NVLink: all of it
        (125e3, 47 * MIB, 256 * MIB),  # 1 Gbit/s: 256 MiB take 2.1 s
        (25e3, 47 * MIB, 64 * MIB),  # 200 Mbit/s: no more than the gradients need
        (25e3, 200 * MIB, 256 * MIB),
    ],
)
def test_a_curve_goes_as_far_as_the_gradients_and_further_while_there_is_time(bytes_per_ms, largest, last):
    found = measured(bytes_per_ms, largest)
    assert sorted(found) == [size for size in CURVE_BYTES if size <= last]
    further = {size: len(ms) for size, ms in found.items() if size >= 2 * largest}
    assert set(further.values()) <= {MIN_REPETITIONS}


def test_a_slow_link_is_measured_less_often_and_a_size_that_fails_has_no_time():
    assert {len(ms) for ms in measured(1e6, 200 * MIB).values()} == {CURVE_REPETITIONS}
    assert {len(ms) for ms in measured(5e3, 47 * MIB).values()} == {MIN_REPETITIONS}
    found = measured(1e6, 200 * MIB, fails=MIB)
    assert MIB not in found
    assert Counter(map(len, found.values())) == {CURVE_REPETITIONS: len(found)}


def link_checked(answer, limits_s=None, **more):
    """The first all-reduce of four ranks, which answer so; what they were asked."""
    asked, limits_s = [], [] if limits_s is None else limits_s
    settings = resolved(gpus=(1, 4), modes=("ddp",), bucket_cap_mb=("default",), **more)

    def ask(command, _, limit_s, *, num_ranks):
        limits_s.append(limit_s)
        asked.append((command, num_ranks))
        return answer()

    run = SimpleNamespace(
        ask=ask,
        workers=range(4),
        settings=settings,
        plan=planned(settings),
        places=[RankPlace(rank=rank, host="h", device=f"cuda:{rank}") for rank in range(4)],
    )
    check_links(run)
    return asked


def hangs():
    raise RestartError(Failure("timeout", "no end of it within 20 s"))


def test_the_first_all_reduce_is_asked_for_once_and_ranks_that_do_not_communicate_are_named():
    asked = (m.Link(group=(4, "gloo")), 4)
    assert link_checked(lambda: {rank: m.Report() for rank in range(4)}) == [asked]
    bad = m.Report(fault=Fault("failed", "unhandled system error"))
    for answer, why in (
        (hangs, "no end of it within 20 s; where it is only slow, a longer --case-timeout waits for it"),
        (lambda: {0: m.Report(), 3: bad}, r"unhandled system error \(rank 3\)"),
    ):
        who = r"^4 ranks, rank 0 \(cuda:0 on h\) to rank 3 \(cuda:3 on h\), do not communicate by gloo: "
        with pytest.raises(NotMeasuredError, match=who + why):
            link_checked(answer)


def test_a_longer_time_limit_waits_longer_for_the_first_all_reduce():
    """Large jobs, and drivers that begin with each process, take their time."""
    limits_s = []
    for asked in ({}, {"case_timeout": 5.0}, {"case_timeout": 300.0}):
        link_checked(lambda: {rank: m.Report() for rank in range(4)}, limits_s, **asked)
    usual, short, longer = limits_s
    assert short == usual < longer == 300.0


def test_a_failed_curve_after_which_the_ranks_start_again_is_not_measured_once_more():
    """The conductor gives up what has failed: without a failure it would meet this one again and again."""

    def release_ranks(*_):
        raise RestartError

    reports = {0: m.Report(fault=Fault("oom", "out of GPU memory"), launched=3), 1: m.Report(launched=4)}
    under_way = []
    run = SimpleNamespace(
        ask=lambda *_, **__: reports,
        settings=resolved(),
        release_ranks=release_ranks,
        recorder=SimpleNamespace(record_start=lambda *what: under_way.append(what)),
    )
    with pytest.raises(RestartError) as lost:
        _time_once(run, (2, "gloo"), MIB)
    assert under_way == [(None, "the all-reduce curve of 2 ranks", (2, "gloo"))]
    assert (lost.value.failure.status, lost.value.failure.reason) == ("oom", "out of GPU memory")


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
        update_manifest=lambda **facts: done.append(facts),
    )
    run = SimpleNamespace(
        settings=SimpleNamespace(backend=backend),
        plan=[SimpleNamespace(case=one) for one in cases],
        recorder=recorder,
        console=SimpleNamespace(print_note=done.append),
        await_turn=lambda: done.append("turn"),
        ask_all=lambda command, *_, num_ranks: done.append(command) or [log] * num_ranks,
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
