"""The conductor's end of its workers: who dies, hangs, raises alone or has no business here."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping

import msgspec
import pytest
from made import case_of

from ddp_bench.bench.buckets import BucketCaps, BucketLayout
from ddp_bench.bench.cluster.process import process_name
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.manifest import Cgroup, FirstHost, Gpu, RankPlace
from ddp_bench.bench.results.measured import BlockTimes, DeviceMemory
from ddp_bench.bench.run import workers as module
from ddp_bench.bench.run.workers import LostError, Workers
from ddp_bench.bench.settings import Settings
from ddp_bench.bench.worker import messages as m

Deed = Callable[[m.Command], m.Answer | None]
"""What a worker answers to a command; None for nothing at all."""

LIMIT_S = 30.0
NO_END = "no end of the test within 0.1 s"
TOLD = m.Told(waits_for="the other ranks", where="", stacks="stacks")


class FakeProcesses:
    """Workers that are threads of this process, with a deed each; one that raises ends its connection."""

    variables: Mapping[str, str] = {}

    def __init__(self, *deeds, codes=None, pid=0):
        self._deeds, self._codes, self._pid = deeds, codes or {}, pid

    def start(self, rank, address, token, _):
        threading.Thread(target=self._serve, args=(rank, address, token), daemon=True).start()

    def _serve(self, rank, address, token):
        # Unbuffered: what is not asked for stays unread.
        with socket.create_connection(address) as connection, connection.makefile("rb", buffering=0) as lines:
            process = process_name(self._pid) if self._pid else ""
            hello = m.Hello(
                token=token, rank=rank, local_rank=rank, host="here", pid=self._pid, process=process
            )
            connection.sendall(m.encode(hello))
            lines.readline()
            if self._deeds[rank] is unread:
                connection.recv(1, socket.MSG_PEEK)
                return
            for line in lines:
                command = m.decode(line, m.AnyCommand)
                answer = m.Report(value=1) if isinstance(command, m.Open) else None
                try:
                    answer = answer or self._deeds[rank](command)
                except EOFError:
                    return
                if answer is not None:
                    connection.sendall(m.encode(answer))
                if self._deeds[rank] is leaving:
                    return

    def code(self, rank, **_):
        return self._codes.get(rank)

    def ended(self, _):
        return None

    def end_all(self): ...

    def close(self): ...


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monkeypatch.setattr(module, "LINGER_S", 0.2)
    monkeypatch.setattr(module, "ERROR_GRACE_S", 0.3)
    made = []

    def start(*deeds, **more):
        made.append(Workers(FakeProcesses(*deeds, **more)))
        made[0].open()
        made[0].grow(len(deeds))
        return made[0]

    yield start
    for one in made:
        one.close()


def both():
    return {0: m.Wait(), 1: m.Wait()}


def well(command):
    return TOLD if isinstance(command, m.Tell) else m.Report(value=command.name)


def raising(reason, **more):
    return lambda _: m.Report(status="failed", reason=reason, traceback=f"Traceback: {reason}", **more)


def silent(_):
    return None


def waiting(command):
    return TOLD if isinstance(command, m.Tell) else None


def unread(_):
    """It goes once a command has come, without a look at it."""


def leaving(command):
    """It goes as soon as it has answered."""
    return well(command)


def dies(_):
    raise EOFError


def at_work(command):
    return m.Told(waits_for="", where="in work (net.py:3)", stacks="") if command.name == "tell" else None


def late(deed):
    def later(command):
        time.sleep(0.1)
        return deed(command)

    return later


@pytest.mark.parametrize(
    ("deed", "looks"),
    [(unread, True), (leaving, True), (leaving, False)],
    ids=["with a command unread", "after its answer", "between the look and the command"],
)
def test_one_that_died_before_it_read_a_command_did_not_die_of_it(started, monkeypatch, deed, looks):
    workers = started(waiting, deed, codes={1: -9})
    poll = workers._poll
    monkeypatch.setattr(workers, "_poll", lambda timeout_s: poll(timeout_s) if timeout_s or looks else [])
    if deed is leaving:
        workers.ask({1: m.Wait()}, "round 1 (timed)", LIMIT_S)
        time.sleep(0.2)
    with pytest.raises(LostError) as lost:
        workers.ask({1: m.Wait()}, "round 2 (timed)", LIMIT_S)
    failure = lost.value.failure
    assert failure.reason == "rank 1 was killed by signal 9 (SIGKILL) in its wait for the next command"
    assert failure.was_idle


MISSING = raising("gloo: Connection closed by peer", restart=True, is_cause=False)


@pytest.mark.parametrize(
    ("deeds", "codes", "limit_s", "reason"),
    [
        ((waiting, dies), {1: -9}, LIMIT_S, "rank 1 was killed by signal 9 (SIGKILL) in the test"),
        ((waiting, dies), {}, LIMIT_S, "rank 1 ended unexpectedly in the test"),  # somebody else started it
        ((waiting, at_work), {}, 0.1, f"{NO_END}: rank 1 on here in work (net.py:3)"),
        ((waiting, waiting), {}, 0.1, f"{NO_END}: rank 0 on here waits for the other ranks"),
        ((waiting, raising("ValueError: bug")), {}, LIMIT_S, "ValueError: bug (rank 1)"),
        ((waiting, raising("ValueError: bug")), {}, 0.1, "ValueError: bug (rank 1)"),
        ((MISSING, late(dies)), {1: -9}, LIMIT_S, "rank 1 was killed by signal 9 (SIGKILL) in the test"),
    ],
    ids=["killed", "ended", "at work", "all wait", "raises alone", "raises late", "missed by another"],
)
def test_the_one_to_blame_is_named(started, deeds, codes, limit_s, reason):
    with pytest.raises(LostError) as lost:
        started(*deeds, codes=codes).ask(both(), "the test", limit_s)
    assert lost.value.failure.reason == reason
    if "bug" in reason:
        ranks = {0: "ended because another rank failed", 1: "raised\nTraceback: ValueError: bug"}
        assert lost.value.failure.ranks == ranks


def test_one_that_does_not_answer_is_killed_and_named(started):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        workers = started(waiting, silent, pid=other.pid)
        with pytest.raises(LostError) as lost:
            workers.ask(both(), "the test", 0.1)
        assert other.wait(LIMIT_S) == -9
    failure = lost.value.failure
    assert failure.reason == f"{NO_END}: rank 1 on here gave no answer"
    assert failure.ranks == {0: "waited for the other ranks\nstacks", 1: "gave no answer"}
    assert failure.stacks == {0: "stacks"}


def test_a_process_that_only_has_the_number_of_a_rank_is_left_alone(started, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        workers = started(waiting, silent, pid=other.pid)
        monkeypatch.setattr(module, "process_name", lambda _: "another process")
        with pytest.raises(LostError):
            workers.ask(both(), "the test", 0.1)
        assert other.poll() is None
        other.kill()


def test_errors_of_all_are_reports_of_all(started):
    bug = raising("ValueError: bug")
    found = started(bug, late(bug)).ask(both(), "the test", LIMIT_S)
    assert [report.reason for report in found.values()] == ["ValueError: bug"] * 2


def test_an_error_after_which_no_rank_can_go_on_is_not_waited_with(started, monkeypatch):
    monkeypatch.setattr(module, "ERROR_GRACE_S", 1000.0)
    with pytest.raises(LostError, match=r"CUDA error \(rank 1\)"):
        started(waiting, raising("CUDA error", restart=True)).ask(both(), "the test", 10_000.0)


def test_a_mistake_of_the_user_ends_the_wait_for_all(started):
    mistake = m.Report(status="usage", reason="no such folder", exit_code=2, label="error")
    with pytest.raises(UsageError, match="no such folder") as caught:
        started(waiting, lambda _: mistake).ask(both(), "the test", LIMIT_S)
    assert caught.value.exit_code == 2


WRONG_TOKEN = m.Hello(token="0" * 32, rank=0, local_rank=0, host="", pid=os.getpid(), process="")


@pytest.mark.parametrize(
    "said",
    [b"", b"\n", b"\x80\x04.\n", b"x" * 2**17, m.encode(WRONG_TOKEN)],
    ids=["none", "empty", "pickle", "long", "wrong token"],
)
def test_a_stranger_is_refused_and_disturbs_nobody(started, said):
    workers = started(well, well)
    address = workers._listener.getsockname()
    with socket.create_connection(address) as stranger:
        stranger.sendall(said)
        if not said:
            stranger.shutdown(socket.SHUT_WR)
        for _ in range(3):
            found = workers.ask(both(), "the test", LIMIT_S)
            assert {rank: report.value for rank, report in found.items()} == {0: "wait", 1: "wait"}
        stranger.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_the_conductor_sleeps_while_a_block_runs(started):
    def works(command):
        if command.name == "block" and command.phase == "timed":
            time.sleep(1.0)
        return well(command)

    workers = started(works, works)
    block = m.Block(index=0, phase="timed", steps=1)
    warm_up = m.Block(index=0, phase="warmup", steps=1)
    workers.ask({0: warm_up, 1: warm_up}, "warm-up", LIMIT_S)
    used_s = []
    for _ in range(2):
        began_s = time.thread_time()
        workers.ask({0: block, 1: block}, "a block", LIMIT_S)
        used_s.append(time.thread_time() - began_s)
    assert min(used_s) <= 1e-3, "of a processor, with sending and hearing"


SETTINGS = Settings(modes=("ddp",), bucket_cap_mb=(BucketCaps(), BucketCaps((1.0, 25.0))), max_time=0.1)
SEEN = m.SeenGpus(host="node", local_rank=0, uuids=("GPU-1",), facts=(Gpu(uuid="GPU-1"),))


@pytest.mark.parametrize(
    "command",
    [
        m.Tell(),
        m.Quit(),
        m.Resolve(asked=SETTINGS, launched=m.Launched(world_size=4, ranks_per_node=2, seen=(SEEN,))),
        m.Warm(index=3, case=case_of(bucket_cap_mb="1/25"), by_device=(1, 2), least_s=0.1),
        m.Settle(index=None, group=(2, "gloo")),
    ],
    ids=lambda one: one.name,
)
def test_a_command_arrives_as_it_was_sent(command):
    line = m.encode(command)
    assert line.count(b"\n") == 1
    assert m.decode(line, m.AnyCommand) == command


@pytest.mark.parametrize(
    "value",
    [
        m.Warmed(
            times=BlockTimes(1.5, (1.0, 0.1), {"ready_ms": [0.25]}, b"a trace"),
            memory=(DeviceMemory(1.0, 2.0),),
            layout=BucketLayout((8, 16), ((1,), (0,)), (2, 4)),
        ),
        m.Begun(
            place=RankPlace(rank=1, host="node"),
            fingerprint="f",
            machine=FirstHost(host="node", memory_gib=0.1, cgroup=Cgroup(cpuset="0-3")),
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_result_arrives_as_it_was_sent(value):
    found = m.decode(m.encode(m.Report(value=value)), m.AnyAnswer)
    assert msgspec.convert(found.value, type(value)) == value


def test_what_is_not_finite_arrives_as_nothing():
    found = m.decode(m.encode(m.Report(value=[float("nan"), float("inf"), 1.0])), m.AnyAnswer)
    assert found.value == [None, None, 1.0]


class Unknown:
    def __reduce__(self):
        raise AssertionError("it is pickled")


@pytest.mark.parametrize("value", [object(), Unknown(), print])
def test_nothing_else_is_sent(value):
    with pytest.raises(TypeError):
        m.encode(m.Report(value=value))


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\x80\x04.", b"{", b"[]", b"1", b"null", b"[" * 100_000, b'{"do": 1}', b'{"do": "leave"}'),
        *(b'{"do": "block"}', b'{"do": "drop", "index": "x"}', b'{"is": "report"}'),
    ],
)
def test_what_no_conductor_sent_is_refused(line):
    with pytest.raises(ValueError, match=r"."):
        m.decode(line, m.AnyCommand)


@pytest.mark.parametrize(("kernel", "is_shown"), [("1, 1", False), ("3, 3", True)])
def test_strides_of_one_element_are_no_warning(kernel, is_shown):
    """The words of torch 2.11's reducer on an H200."""
    from ddp_bench.bench.worker.main import SPURIOUS  # torch, which no other test here needs

    sizes = f"grad.sizes() = [2048, 512, {kernel}], strides() = [512, 1, 1, 1]"
    said = f"Grad strides do not match bucket view strides. This may impair performance.\n{sizes}"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=SPURIOUS)
        warnings.warn(said, stacklevel=1)
    assert bool(seen) == is_shown
