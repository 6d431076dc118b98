"""The conductor's end of its workers: who dies, hangs, raises alone or has no business here."""

import contextlib
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
from commands import eventually, listening
from made import inspected, planned, resolved, torchrun

from ddp_bench.bench.common.errors import ExitCode, UsageError
from ddp_bench.bench.machine.manifest import Gpu
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.plan.sweep import Machine
from ddp_bench.bench.results.block_times import BlockTimes, Fault
from ddp_bench.bench.run import connections
from ddp_bench.bench.run import main as main_module
from ddp_bench.bench.run import workers as module
from ddp_bench.bench.run.close import RunOptions
from ddp_bench.bench.run.conductor import Conductor
from ddp_bench.bench.run.connections import Meeting
from ddp_bench.bench.run.failures import RestartError
from ddp_bench.bench.run.job import Job
from ddp_bench.bench.run.workers import Workers
from ddp_bench.bench.worker import messages as m
from ddp_bench.bench.worker.facts import Devices

LIMIT_S = 30.0
NO_END = "no end of the test within 0.1 s"
TOLD = m.RankStatus(waits_for="the other ranks", where="", stacks="stacks")


class FakeProcesses:
    """Workers that are threads of this process, with a deed each; one that raises ends its connection."""

    variables: Mapping[str, str] = {}

    stuck: Sequence[int] = ()

    def __init__(self, *deeds, codes=None):
        self._deeds, self._codes = deeds, codes or {}

    def start(self, rank, connection, _):
        threading.Thread(target=self._serve, args=(rank, connection.dup()), daemon=True).start()

    def _serve(self, rank, connection):
        # Unbuffered: what is not asked for stays unread.
        with connection, connection.makefile("rb", buffering=0) as lines:
            connection.sendall(m.encode(hello(rank)))
            lines.readline()
            if self._deeds[rank] is unread:
                connection.recv(1, socket.MSG_PEEK)
                return
            for line in lines:
                command = m.decode(line, m.AnyCommand)
                answer = None
                if isinstance(command, m.Open):
                    self.opened(command.address)
                    answer = m.Report(value=1)
                try:
                    answer = answer or self._deeds[rank](command)
                except EOFError:
                    return
                if answer is not None:
                    connection.sendall(m.encode(answer))
                if self._deeds[rank] is leaving:
                    return

    def opened(self, address): ...

    def collect_exit_codes(self, ranks, **_):
        return {rank: self._codes[rank] for rank in ranks if rank in self._codes}

    def end_all(self): ...

    def close(self): ...


def hello(rank, *, token="", host="here"):
    return m.Hello(token=token, rank=rank, host=host)


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 0.5)
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
    return {0: m.Load(), 1: m.Load()}


def well(command):
    return TOLD if isinstance(command, m.AskStatus) else m.Report(value=type(command).__name__.lower())


def raising(reason, **more):
    return lambda _: m.Report(fault=Fault("failed", reason, **more), traceback=f"Traceback: {reason}")


def silent(_):
    return None


def stuck(status):
    return lambda command: status if isinstance(command, m.AskStatus) else None


waiting = stuck(TOLD)
at_work = stuck(m.RankStatus(waits_for="", where="in work (net.py:3)", stacks=""))


def unread(_):
    """It goes once a command has come, without a look at it."""


def leaving(command):
    """It goes as soon as it has answered."""
    return well(command)


def dies(_):
    raise EOFError


def failure_of(workers, commands, what="the test", limit_s=LIMIT_S):
    """The failure after which the workers have to start again."""
    with pytest.raises(RestartError) as lost:
        workers.ask(commands, what, limit_s)
    return lost.value.failure


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
    failure = failure_of(workers, {1: m.Wait()})
    assert failure.reason == "rank 1 was killed by signal 9 (SIGKILL) in its wait for the next command"
    assert failure.was_idle


def test_a_case_is_not_to_blame_for_a_rank_that_takes_no_part_in_it(started):
    assert failure_of(started(waiting, dies, codes={1: -9}), {0: m.Load(), 1: m.Wait()}).was_idle


def test_a_case_is_not_to_blame_for_a_rank_that_was_told_nothing(started):
    """As where the first rank alone splits a model's layers."""

    def lets_the_other_go(command):
        if isinstance(command, m.AskStatus):
            return TOLD
        workers._workers[1].connection.shutdown(socket.SHUT_RD)
        return None

    workers = started(lets_the_other_go, waiting, codes={1: -9})
    assert failure_of(workers, {0: m.Load()}).was_idle


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
    failure = failure_of(started(*deeds, codes=codes), both(), limit_s=limit_s)
    assert failure.reason == reason
    if "bug" in reason:
        ranks = {0: "ended because another rank failed", 1: "raised\nTraceback: ValueError: bug"}
        assert failure.ranks == ranks


def test_one_that_does_not_answer_is_named(started):
    failure = failure_of(started(waiting, silent), both(), limit_s=0.1)
    assert failure.reason == f"{NO_END}: rank 1 on here gave no answer"
    assert failure.ranks == {0: "waited for the other ranks\nstacks", 1: "gave no answer"}


def test_errors_of_all_are_reports_of_all(started):
    bug = raising("ValueError: bug")
    found = started(bug, late(bug)).ask(both(), "the test", LIMIT_S)
    assert [report.fault.reason for report in found.values()] == ["ValueError: bug"] * 2


def test_an_error_after_which_no_rank_can_go_on_is_not_waited_with(started, monkeypatch):
    monkeypatch.setattr(module, "ERROR_GRACE_S", 1000.0)
    with pytest.raises(RestartError, match=r"CUDA error \(rank 1\)"):
        started(waiting, raising("CUDA error", restart=True)).ask(both(), "the test", 10_000.0)


def test_a_mistake_of_the_user_ends_the_wait_for_all(started):
    mistake = m.Report(fault=Fault("usage", "no such folder"), exit_code=2, label="error")
    with pytest.raises(UsageError, match="no such folder") as caught:
        started(waiting, lambda _: mistake).ask(both(), "the test", LIMIT_S)
    assert caught.value.exit_code == 2


def test_nobody_can_connect_to_a_run_that_starts_its_own_workers(started):
    before = listening(psutil.Process())
    started(well, well)
    assert listening(psutil.Process()) == before


@pytest.fixture
def meeting():
    with contextlib.closing(Meeting(one_host=True)) as made:
        yield made


def connected(meeting):
    _, port, token = meeting.address.split()
    return socket.create_connection((m.LOOPBACK, int(port)), timeout=LIMIT_S), token


def heard(meeting, within_s=LIMIT_S):
    """The first that have come."""
    until_s = time.monotonic() + within_s
    while not (found := meeting.accept_workers(0.1)) and time.monotonic() < until_s:
        pass
    return found


WRONG_TOKEN = m.encode(hello(0, token="0" * 32))
NO_TOKEN = m.encode(hello(0))


@pytest.mark.parametrize(
    "said",
    [b"", b"\n", b"\x80\x04.\n", b"x" * 2**17, WRONG_TOKEN, NO_TOKEN, WRONG_TOKEN.replace(b"00", b"\\u00e9")],
    ids=["none", "empty", "pickle", "long", "wrong token", "no token", "odd token"],
)
def test_a_stranger_is_refused_and_disturbs_nobody(said, meeting):
    stranger, token = connected(meeting)
    with stranger, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        stranger.sendall(said)
        if not said:
            stranger.shutdown(socket.SHUT_WR)
        with connected(meeting)[0] as worker:
            worker.sendall(m.encode(hello(1, token=token)))
            ((found, connection),) = heard(meeting)
            assert found.rank == 1
            connection.close()
        heard(meeting, 0.5)
        stranger.settimeout(LIMIT_S)
        assert stranger.recv(1) == b""


def test_a_thousand_connections_that_say_nothing_keep_nobody_out(meeting):
    """More than there are descriptors left for: a worker comes all the same."""
    kept = (600, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, port, token = meeting.address.split()
    flood = [sys.executable, "-c", FLOOD, port]
    with subprocess.Popen(flood, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as idle:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
        try:
            idle_came = threading.Thread(target=idle.stdout.readline)
            idle_came.start()
            while idle_came.is_alive():
                assert meeting.accept_workers(0.01) == []
            while meeting.accept_workers(0.1):
                pass
            assert len(psutil.Process().net_connections()) < 200
            with connected(meeting)[0] as worker:
                worker.sendall(m.encode(hello(1, token=token)))
                ((found, connection),) = heard(meeting)
                connection.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            idle.communicate("end\n")
    assert found.rank == 1


FLOOD = """
import resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
idle = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(1000)]
print("all", flush=True)
sys.stdin.readline()
"""


def test_one_that_says_nothing_has_little_time(meeting, monkeypatch):
    monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 0.1)
    with connected(meeting)[0] as idle:
        heard(meeting, 0.5)
        assert idle.recv(1) == b""


@pytest.fixture
def launched():
    """Workers under a launcher, which others join by the address that the first has stored."""
    addresses = queue.SimpleQueue()
    processes = FakeProcesses(well)
    processes.opened = addresses.put
    made = Workers(processes, torchrun(2))
    opening = threading.Thread(target=made.open)
    yield made, opening, addresses
    made.close()


def test_a_rank_that_is_alive_is_nobody_elses(launched):
    workers, opening, addresses = launched
    opening.start()
    _, port, token = addresses.get(timeout=LIMIT_S).split()
    address = (m.LOOPBACK, int(port))
    with socket.create_connection(address, timeout=LIMIT_S) as thief:
        thief.sendall(m.encode(hello(0, token=token, host="elsewhere")))
        assert thief.recv(1) == b"", "the conductor has started that one itself"
        with socket.create_connection(address, timeout=LIMIT_S) as real:
            real.sendall(m.encode(hello(1, token=token)))
            opening.join(LIMIT_S)
            assert [workers._workers[rank].host for rank in (0, 1)] == ["here", "here"]
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=LIMIT_S)


STARTS_ONE = """
import signal, sys
from ddp_bench.bench.run.processes import Processes
print(Processes({}, ["never_imported"]).server.pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_conductor_that_is_killed_while_torch_is_imported_leaves_nothing(tmp_path):
    (tmp_path / "never_imported.py").write_text("import signal\nopen('imports', 'w').close()\nsignal.pause()")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    how = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": environment}
    with subprocess.Popen([sys.executable, "-c", STARTS_ONE], **how) as conductor:
        server = psutil.Process(int(conductor.stdout.readline()))
        eventually((tmp_path / "imports").exists, LIMIT_S)
        conductor.kill()
    eventually(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, 5)


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from ddp_bench.bench.run.main import main
sys.exit(main(["--modes", "ddp", "--gpus", "2", "--device", "cpu", "--quiet"]))
"""


@pytest.mark.parametrize(
    ("allowed", "num_launched", "needed"),
    [(32, None, 128), (131, None, 134), (1024, 1024, 1152)],
    ids=["conductor", "groups of two ranks", "1,024 ranks"],
)
def test_a_shell_that_allows_few_open_files_is_said_at_once(allowed, num_launched, needed, tmp_path):
    own = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_launched, "LOCAL_WORLD_SIZE": 8}
    own |= {"MASTER_ADDR": m.LOOPBACK, "MASTER_PORT": 29500}
    launcher = {name: str(value) for name, value in own.items()} if num_launched else {}
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(allowed)],
        cwd=tmp_path,
        env={**os.environ, "BENCH_HOST": "here", **launcher},
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * LIMIT_S,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"here allows {allowed} open files, this run needs {needed} in each process; allow" in done.stderr
    assert done.stderr.endswith(f": sudo prlimit --pid $$ --nofile={2 * needed}\n")
    assert list(tmp_path.iterdir()) == []


def test_so_many_ranks_are_not_started_as_a_process_cannot_connect_to(started):
    with pytest.raises(UsageError, match=" this run needs 1000000128 in each process"):
        started(well).grow(10**9)


def test_1024_ranks_meet_that_come_at_once_where_the_soft_limit_is_as_many(monkeypatch):
    num_ranks, (soft, hard) = 1024, resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < 3 * num_ranks:
        pytest.skip(f"this machine allows {hard} open files")
    most_waiting = Path("/proc/sys/net/core/somaxconn")
    if not most_waiting.exists() or int(most_waiting.read_text()) < num_ranks:
        pytest.skip("this machine may let fewer connections wait")
    there, fake, ranks = torchrun(num_ranks), FakeProcesses(well), []

    def all_come(address):
        """Connect the other ranks while the conductor accepts none: it waits for the first rank's answer."""
        _, port, token = address.split()
        for rank in range(1, num_ranks):
            ranks.append(socket.create_connection((m.LOOPBACK, int(port)), timeout=LIMIT_S))
            ranks[-1].sendall(m.encode(hello(rank, token=token)))

    fake.opened = all_come
    monkeypatch.setattr(main_module, "Processes", lambda *_: fake)
    monkeypatch.setattr(main_module, "read_launch", lambda _: there)
    monkeypatch.setattr(module, "MEETING_TIMEOUT_S", LIMIT_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_ranks, hard))
    try:
        with main_module.hold_workers(Settings()) as workers:
            workers.open()
            assert len(workers) == num_ranks
            for connection in ranks:
                assert m.decode(connection.recv(2**10).rstrip(), m.AnyCommand) == m.AskStatus()
    finally:
        for connection in ranks:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_conductor_sleeps_while_a_block_runs(started):
    def works(command):
        if isinstance(command, m.Block) and command.phase == "timed":
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


def test_what_a_rank_is_told_does_not_grow_with_the_cases_or_with_the_gpus_of_other_hosts():
    """Hold the bytes of a plan against those of a larger one: 20,000 cases told to 1,024 ranks are 16 GB."""
    told = []

    def listening_to_begin(command):
        if isinstance(command, m.Begin):
            told.append(command)
            raise EOFError
        return waiting(command)

    def begun(num_caps, num_others):
        caps = [*map(str, range(1, num_caps + 1))]
        settings = resolved(modes=["single", "ddp"], gpus=[2], bucket_cap_mb=caps)
        saw = [
            Devices(cores=(0,), host=host, gpus={f"GPU-{number}": Gpu(name="A")})
            for number, host in enumerate(("here", *"t" * num_others))
        ]
        machine = Machine(device_type="cpu", devices_per_node=2)
        plan = tuple(planned(settings))
        job = Job(settings=settings, machine=machine, plan=plan, inspected=inspected(), ranks=tuple(saw))
        workers = Workers(FakeProcesses(listening_to_begin, listening_to_begin))
        with contextlib.closing(workers), pytest.raises(RestartError):
            Conductor(Settings(), RunOptions(), workers, began_s=0.0)._start(job)
        return {len(m.encode(one)) for one in told[-2:]}

    few, many = begun(2, 1), begun(200, 1000)
    assert max(many) - min(few) < 2000, "but for the list of caps"
    assert [*told[-1].gpus] == ["GPU-0"]
    assert {case.mode for case in told[-1].cases} == {"single", "ddp"}


def test_a_command_reads_its_own_reply_and_no_other():
    block, curve = m.Block(index=0, phase="timed", steps=2), m.Curve(group=(2, "gloo"), num_bytes=4)
    times = BlockTimes(1.5, (1.0, 0.5))
    assert block.read_reply(m.decode(m.encode(m.Report(value=times)), m.AnyAnswer)) == times
    with pytest.raises(msgspec.ValidationError, match="float"):
        curve.read_reply(m.decode(m.encode(m.Report(value=times)), m.AnyAnswer))


def test_what_is_not_finite_arrives_as_nothing():
    found = m.decode(m.encode(m.Report(value=[float("nan"), float("inf"), 1.0])), m.AnyAnswer)
    assert found.value == [None, None, 1.0]


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


def test_a_signal_while_the_workers_start_ends_the_command_as_ctrl_c_does(monkeypatch):
    @contextlib.contextmanager
    def signalled(_settings):
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    monkeypatch.setattr(main_module, "hold_workers", signalled)
    assert (
        main_module.main(["--modes", "ddp", "--gpus", "1", "--device", "cpu", "--dry-run"])
        == ExitCode.INTERRUPTED
    )
