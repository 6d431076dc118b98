"""What a device or a link does by itself: the first all-reduce, curves of all-reduces, rates of products."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from made import case_of, planned, resolved

from ddp_bench.bench.buckets import BucketLayout
from ddp_bench.bench.errors import GaveUpError
from ddp_bench.bench.manifest import RankPlace
from ddp_bench.bench.measure import standalone
from ddp_bench.bench.measure.standalone import MATRIX_SIZE, MOST_REPETITIONS
from ddp_bench.bench.modes import Place
from ddp_bench.bench.resolve import with_device_defaults
from ddp_bench.bench.run.case_runner import CaseRunner
from ddp_bench.bench.run.failures import Failure, RestartError, preparing_s
from ddp_bench.bench.run.standalone import (
    CURVE_BYTES,
    CURVE_REPETITIONS,
    LEAST_REPETITIONS,
    _curve,
    ask_nccl,
    check_links,
    measure_rates,
)
from ddp_bench.bench.settings import Settings
from ddp_bench.bench.sharing import TurnClient
from ddp_bench.bench.worker import messages as m
from ddp_bench.bench.worker.rank import Rank

MIB = 2**20


def measured(bytes_per_ms, largest, *, fails=None):
    """On a link of that rate, whose time is the clock's."""
    clock = [0.0]

    def once(size):
        clock[0] += size / bytes_per_ms / 1000
        return None if size == fails else size / bytes_per_ms

    return _curve(once, largest, lambda: clock[0])


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
    assert set(further.values()) <= {LEAST_REPETITIONS}


def test_a_slow_link_is_measured_less_often_and_a_size_that_fails_has_no_time():
    assert {len(ms) for ms in measured(1e6, 200 * MIB).values()} == {CURVE_REPETITIONS}
    assert {len(ms) for ms in measured(5e3, 47 * MIB).values()} == {LEAST_REPETITIONS}
    found = measured(1e6, 200 * MIB, fails=MIB)
    assert MIB not in found
    assert Counter(map(len, found.values())) == {CURVE_REPETITIONS: len(found)}


class Four(SimpleNamespace):
    def __len__(self):
        return 4


def link_checked(answer):
    """The first all-reduce of four ranks, which answer so; what they were asked."""
    asked = []
    run = SimpleNamespace(
        workers=Four(ask=lambda commands, *_: asked.extend(commands.values()) or answer()),
        plan=planned(resolved(gpus=(1, 4), modes=("ddp",), bucket_cap_mb=("default",))),
        recorder=SimpleNamespace(note=lambda *_: None),
        places=[RankPlace(rank=rank, host="h", device=f"cuda:{rank}") for rank in range(4)],
    )
    check_links(run)
    return asked


def hangs():
    raise RestartError(Failure("timeout", "no end of it within 20 s"))


def test_the_first_all_reduce_is_asked_for_once_and_ranks_that_do_not_communicate_are_named():
    link = m.Link(num_ranks=4, backend="gloo")
    assert link_checked(lambda: {rank: m.Report() for rank in range(4)}) == [link] * 4
    bad = m.Report(status="failed", reason="unhandled system error")
    for answer, why in (
        (hangs, "no end of it within 20 s"),
        (lambda: {0: m.Report(), 3: bad}, r"unhandled system error \(rank 3\)"),
    ):
        who = r"^4 ranks, rank 0 \(cuda:0 on h\) to rank 3 \(cuda:3 on h\), do not communicate by gloo: "
        with pytest.raises(GaveUpError, match=who + why):
            link_checked(answer)


SETTINGS = with_device_defaults(Settings(), device_type="cpu", num_local_devices=2)
CPU = torch.device("cpu")
FLOPS = 2 * MATRIX_SIZE["cpu"] ** 3


class HandClock:
    """Says that work `i` of a block took `times_ms[i]`, and all after the last as long as that."""

    def __init__(self, times_ms):
        self.said = []
        self._times_ms = times_ms

    def begin(self):
        self.mark()

    def mark(self):
        self.said.append("mark")

    def read_ms(self):
        since = " ".join(self.said).rpartition("read")[2]
        self.said.append("read")
        last = len(self._times_ms) - 1
        return [self._times_ms[min(i, last)] for i in range(since.count("mark") - 1)]


def timed_by(monkeypatch, *times_ms):
    made = HandClock(times_ms)
    monkeypatch.setattr(standalone, "make_clock", lambda _: made)
    return made


def test_the_rate_is_arithmetic_over_the_median_time(monkeypatch):
    timed_by(monkeypatch, 10.0, 8.0, 20.0)  # so long that each is repeated three times
    found = standalone.matrix_rate(CPU, "fp32")
    by_ms = {"": 10, "_low": 20, "_high": 8}
    assert found == pytest.approx({f"matrix_tflop_per_s{end}": FLOPS / ms / 1e9 for end, ms in by_ms.items()})


@pytest.mark.parametrize(
    ("once_ms", "number"),
    [(0.0, MOST_REPETITIONS), (0.01, MOST_REPETITIONS), (10.0, 10), (1000.0, standalone.LEAST_REPETITIONS)],
)
def test_a_gpu_warms_up_and_is_not_waited_for_within_repetitions_that_fill_their_time(
    once_ms, number, monkeypatch
):
    made = timed_by(monkeypatch, once_ms)
    found = standalone._times_ms(lambda: made.said.append("work"), torch.device("cuda"))
    assert len(found) == number
    once, in_a_row = "mark work mark read", f"mark {'work mark ' * number}read"
    assert " ".join(made.said) == f"{once} {once} {in_a_row} {in_a_row}"


class FakeWorkers:
    """Two workers, of which the second one says why it cannot at some counts."""

    def __init__(self, fails=()):
        self.asked = []
        self._fails = fails

    def __len__(self):
        return 2

    def values(self, commands, what, limit_s):
        assert limit_s == preparing_s(SETTINGS)
        self.asked.append((what, [type(command).__name__.lower() for command in commands.values()]))
        told = {"matrix_tflop_per_s": 1.0}
        return {0: told, 1: "OutOfMemoryError: full" if what in self._fails else told}


def rates(workers, *counts):
    """With what the user hears."""
    plan = [SimpleNamespace(case=SimpleNamespace(num_devices=n), skip_reason=None) for n in counts]
    skipped = SimpleNamespace(case=SimpleNamespace(num_devices=3), skip_reason="no device")
    said, found = [], []
    run = CaseRunner.__new__(CaseRunner)
    run.workers, run.plan, run.settings = workers, [*plan, skipped], SETTINGS
    manifest, tell = SimpleNamespace(roofline=()), lambda *, roofline: found.extend(roofline)
    run.recorder = SimpleNamespace(note=lambda *_: None, manifest=manifest, tell=tell)
    run.console, run._turns = SimpleNamespace(note=said.append), TurnClient(None)
    measure_rates(run)
    return found, said


def test_every_device_count_is_measured_at_once_as_far_as_there_are_ranks():
    """A count that fails on any of them has no rates, and the user hears why."""
    workers = FakeWorkers()
    found, said = rates(workers, 2, 1, 2, 4)
    assert workers.asked == [
        ("memory for the devices' rates", ["rate", "rate"]),
        ("the rates of 1 device", ["rate", "wait"]),
        ("the rates of 2 devices", ["rate", "rate"]),
        ("giving their memory back", ["settle", "settle"]),
    ]
    assert [(row.num_devices, row.rank) for row in found] == [(1, 0), (2, 0), (2, 1)]
    assert not said
    found, said = rates(FakeWorkers(fails=["the rates of 2 devices"]), 1, 2)
    assert [row.num_devices for row in found] == [1]
    assert said == ["the rates of 2 devices are not known: OutOfMemoryError: full"]


@pytest.mark.parametrize(
    ("error", "status", "value", "restart"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "ok", "OutOfMemoryError: CUDA out of memory", False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was met"), "failed", None, True),
    ],
)
def test_a_device_without_the_memory_says_why_and_a_broken_one_starts_the_ranks_again(
    error, status, value, restart, monkeypatch
):
    def fails(*_):
        raise error

    monkeypatch.setattr("torch.distributed.barrier", lambda *_: None)
    monkeypatch.setattr("ddp_bench.bench.worker.rank.matrix_rate", fails)
    rank = Rank(0, 0)
    rank.place = Place(rank=0, device=CPU, cores=(0,))
    rank._shared = SimpleNamespace(settings=SETTINGS)
    found = rank.do(m.Rate())
    assert (found.status, found.value, found.restart) == (status, value, restart)


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
    assert told["nccl"].num_ranks == 4
    assert [(one.bytes, one.algorithm) for one in told["nccl"].messages] == [(MIB, "RING")]


def test_nccl_is_asked_once_and_where_it_sends_and_an_answer_that_says_nothing_is_said():
    assert asked_of_nccl("", backend="gloo") == []
    assert asked_of_nccl("", known=object()) == []
    assert asked_of_nccl("")[2:] == ["How NCCL sends the buckets is not known: its log does not say it"]
