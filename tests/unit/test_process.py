"""Processes and turns, over real pipes, locks and sockets."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from ddp_bench.bench.common import process as processes
from ddp_bench.bench.common.turns import TurnClient, TurnServer


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (None, {"hugetlb": "1"}),
        ("glibc.malloc.check=3", {"check": "3", "hugetlb": "1"}),
        ("glibc.malloc.hugetlb=0", {"hugetlb": "0"}),
    ],
)
def test_settings_of_the_users_own_stay(given, added):
    environment = {"GLIBC_TUNABLES": given} if given else {}
    env = environment | processes.choose_huge_pages_env(environment)
    assert dict(one.split("=") for one in env["GLIBC_TUNABLES"].split(":")) == {
        f"glibc.malloc.{name}": value for name, value in added.items()
    }
    assert processes.choose_huge_pages_env(env) == {}


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("worker.main", "torch"),
        ("worker.rank", "pandas scipy.stats ddp_bench.report.build"),
        ("run.conductor", "torch"),
        ("measure.telemetry", "torch"),
    ],
)
def test_neither_loads_what_the_other_works_with(module, others):
    loaded = f"import sys, ddp_bench.bench.{module}; sys.exit(bool(set(sys.modules) & set({others.split()})))"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


KILLED = """
import os, signal, subprocess, sys
from ddp_bench.bench.common.process import tie_to_parent
ready = 'import sys, time; print(f"ready {sys.argv}", flush=True); time.sleep(600)'
with subprocess.Popen(tie_to_parent([sys.executable, "-c", ready, "--option"])):
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_command_ends_with_its_parent_however_that_ends():
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready ['-c', '--option']\n"
        said, _ = parent.communicate("go on\n", timeout=60)  # until the command's end, which closes the pipe
    assert said == ""
    assert parent.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_command_that_is_not_there_is_named():
    command = processes.tie_to_parent(["no-such-command"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "no-such-command cannot be started: No such file or directory\n"


DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
)


def test_a_process_that_had_to_be_killed_has_ended_too():
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as deaf:
        assert deaf.stdout.readline()
        processes.end_all([deaf], within_s=0.0)
        assert deaf.returncode == -signal.SIGKILL


class Held:
    """A process that the kernel holds: killed, it does not end."""

    pid = 2**30  # no process has it

    def poll(self):
        return None


def test_one_that_the_kernel_holds_is_waited_for_no_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(processes, "KILL_TIMEOUT_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"]) as well:
        assert processes.wait_or_kill([Held(), well, Held()], within_s=0.5) == [None, 3, None]


@pytest.mark.parametrize(("before", "interrupts"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_terminal_that_closes_interrupts_unless_nohup_asks_for_the_contrary(before, interrupts):
    at_start = signal.signal(signal.SIGHUP, before)
    try:
        went_on = False
        with contextlib.suppress(KeyboardInterrupt), processes.raise_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            went_on = True
        assert went_on != interrupts
    finally:
        signal.signal(signal.SIGHUP, at_start)


def test_a_signal_waits_for_the_end_of_what_may_not_stay_half_done():
    done = []

    def work():
        with processes.hold_signals(), processes.hold_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("whole")
        done.append("more")

    with pytest.raises(KeyboardInterrupt), processes.raise_on_signals():
        work()
    assert done == ["whole"]


# Clients and a turn server: never two at once, and nobody waits for the dead.

LIMIT_S = 30.0
"""Ends a test that has failed; nothing waits for it otherwise."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "turns"


def all_end(sides):
    for side in sides:
        side.start()
    for side in sides:
        side.join(LIMIT_S)
        assert not side.is_alive()


class Turn:
    """Who holds the turn: a second holder at the same time is noted, and given every chance to come."""

    def __init__(self):
        self.order = []
        self.met = []
        self._inside = set()
        self._entered = threading.Condition()

    def hold(self, name, wait_s=0.0):
        with self._entered:
            self._inside.add(name)
            self.order.append(name)
            if len(self._inside) > 1:
                self.met.append(set(self._inside))
            self._entered.notify_all()
            self._entered.wait_for(lambda: bool(self.met), wait_s)
            self._inside.discard(name)


def test_any_number_takes_turns_each_once_per_round_and_never_meet(path):
    made = TurnServer(path, seed=1, num_clients=4)
    turn = Turn()

    def take_turns(name, turns):
        client = TurnClient(str(path))
        for _ in range(turns):
            client.await_turn()
            turn.hold(name, wait_s=0.01)
        client.close()

    sides = [threading.Thread(target=take_turns, args=(name, 5 + 5 * (name == "d"))) for name in "abcd"]
    all_end(sides)
    made.close()
    assert turn.met == [], "one leaves before the other enters"
    rounds = [tuple(turn.order[i : i + 4]) for i in range(0, 20, 4)]
    assert [set(found) for found in rounds] == [set("abcd")] * 5
    assert len(set(rounds)) > 1, "in random order"
    assert turn.order[20:] == ["d"] * 5, "the last one goes on alone"
    assert made.turns == 5


def test_nobody_waits_for_a_client_that_never_connected(path):
    made = TurnServer(path, seed=1, num_clients=3)
    granted = threading.Semaphore(0)

    def take_turns():
        client = TurnClient(str(path))
        client.await_turn()
        granted.release()
        client.close()

    sides = [threading.Thread(target=take_turns, daemon=True) for _ in range(2)]
    for side in sides:
        side.start()
    assert not granted.acquire(timeout=0.2), "the third has not come"
    made.drop_client()
    assert granted.acquire(timeout=LIMIT_S)
    assert granted.acquire(timeout=LIMIT_S)
    for side in sides:
        side.join(LIMIT_S)
    made.drop_client()  # of one that took its turn and ended: nothing happens
    made.close()


def test_who_connects_late_takes_part_although_another_left_after_it_had_connected(path):
    """Of three one connects and dies: two connections are its own; the last connects beside the other."""
    made = TurnServer(path, seed=1, num_clients=3)
    gone = socket.socket(socket.AF_UNIX)
    gone.connect(str(path))
    other = TurnClient(str(path))
    gone.close()
    made.drop_client()
    other.await_turn()
    came, turn = threading.Event(), Turn()

    def come_late():
        late = TurnClient(str(path))
        came.set()
        late.await_turn()
        turn.hold("late")
        late.close()

    side = threading.Thread(target=come_late, daemon=True)
    side.start()
    assert came.wait(LIMIT_S)
    turn.hold("other", wait_s=0.2)
    assert turn.met == [], "the other holds the turn"
    # The round in which it is let in, then one that it takes part in, then the proof that this is over.
    for _ in range(3):
        other.await_turn()
    assert turn.order == ["other", "late"]
    other.close()
    side.join(LIMIT_S)
    assert not side.is_alive()
    made.close()


def test_without_a_server_and_when_all_have_left_every_turn_is_free(path):
    made = TurnServer(path, seed=1, num_clients=2)
    made.drop_client()
    made.drop_client()
    made.close()
    for client in (TurnClient(str(path)), TurnClient(None)):
        client.await_turn()
        client.await_turn()
        client.close()


def test_a_server_is_closed_while_it_looks_for_late_clients(path, monkeypatch):
    looks, goes_on = threading.Event(), threading.Event()
    looked = select.select

    def held_up(*waiting):
        looks.set()
        goes_on.wait(10)
        return looked(*waiting)

    monkeypatch.setattr(select, "select", held_up)
    made = TurnServer(path, seed=1, num_clients=1)
    made.drop_client()
    assert looks.wait(10)
    closing = threading.Thread(target=made.close)
    closing.start()
    closing.join(0.2)  # by now it has done what it can before the server goes on
    goes_on.set()
    closing.join(10)
    assert not closing.is_alive()
