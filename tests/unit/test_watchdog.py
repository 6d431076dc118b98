"""One rank's watchdog at a real store: whom it kills, and that it never sleeps through a limit."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from ddp_bench.bench.cluster.meeting import Meeting, Peer, host_name
from ddp_bench.bench.cluster.process import process_name
from ddp_bench.bench.recovery import watchdog as module
from ddp_bench.bench.recovery.failures import Failure
from ddp_bench.bench.recovery.watchdog import Watchdog

LIMIT_S = 30.0
"""Ends a test that has failed; nothing waits for it otherwise."""


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    # A rank ends itself after so long if it is not ended: this one is the test.
    monkeypatch.setattr(module, "LAST_RESORT_S", 10_000.0)
    yield
    del made


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that answers nobody."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def guard(*others: Peer) -> tuple[Watchdog, queue.Queue[Failure]]:
    """The watchdog of rank 0, and what it reports as lost."""
    own = Peer(0, host_name(), os.getpid(), process_name(os.getpid()))
    made = Watchdog(Meeting("meeting", 0, (own, *others)))
    lost: queue.Queue[Failure] = queue.Queue()
    made.report_to(lost.put)
    return made, lost


def test_a_rank_that_does_not_answer_is_killed_and_named(other: subprocess.Popen[bytes]) -> None:
    made, lost = guard(Peer(1, host_name(), other.pid, process_name(other.pid)))
    made.arm("the test", 0.1)
    reason = lost.get(timeout=LIMIT_S).reason
    silent = f"rank 1 on {host_name()} gave no answer, rank 0 on {host_name()} in "
    assert f"no end of the test within 0.1 s: {silent}" in reason
    assert other.wait(LIMIT_S) < 0
    made.close()


def test_a_process_that_only_has_the_number_of_a_rank_is_left_alone(other: subprocess.Popen[bytes]) -> None:
    """As where that rank is in another container of one host name."""
    *before, ticks = process_name(other.pid).rsplit("/", 1)
    earlier = "/".join([*before, str(float(ticks) - 1)])
    made, lost = guard(Peer(1, host_name(), other.pid, earlier), Peer(2, host_name(), other.pid, ""))
    made.arm("the test", 0.1)
    lost.get(timeout=LIMIT_S)
    assert other.poll() is None
    made.close()


def test_a_limit_set_while_the_watcher_falls_asleep_is_not_slept_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, lost = guard()
    arms, armed = threading.Event(), threading.Event()
    clock = time.monotonic

    def held_up() -> float:
        """The watcher reads the clock: another limit is set before it decides how long to sleep."""
        now_s = clock()
        if threading.current_thread() is made._threads[0] and not arms.is_set():
            arms.set()
            armed.wait(0.5)
        return now_s

    made.arm("a long piece", 1.0)
    while made._wakes_s != made._deadline_s:
        time.sleep(0.01)
    made.arm("a longer piece", 100.0)  # the watcher still wakes for the first
    monkeypatch.setattr(module.time, "monotonic", held_up)
    assert arms.wait(LIMIT_S)
    made.arm("a short piece", 1.0)
    armed.set()
    assert "a short piece" in lost.get(timeout=20).reason
    made.close()


def test_an_error_after_which_no_rank_can_go_on_is_not_waited_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may come and tell of the same; after this one they need not."""
    monkeypatch.setattr(module, "ERROR_GRACE_S", 10_000.0)
    made, lost = guard()
    made.arm("a block", 1000.0)
    made.tell("failed", "AcceleratorError: CUDA error: device-side assert triggered", at_once=True)
    reason = "AcceleratorError: CUDA error: device-side assert triggered (rank 0)"
    assert lost.get(timeout=LIMIT_S) == Failure("failed", reason)
    made.arm("the next block", 1000.0)  # the watchdog's thread ends
    made.close()


def test_the_tracebacks_of_all_ranks_that_raised_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two raised, one waits for them: who told of it first is the cause, and who waits is none."""
    monkeypatch.setattr(module, "ERROR_GRACE_S", 1.0)
    peers = [Peer(rank, host_name(), 0, "") for rank in (1, 2)]
    made, lost = guard(*peers)
    others = {rank: Watchdog(Meeting("meeting", rank, made._peers)) for rank in (2, 1)}
    for one in (made, *others.values()):
        one.arm("a block", 1000.0)
    for rank, place in ((2, "net.py:6, in late"), (1, "net.py:9, in other")):
        others[rank].tell("failed", "ValueError: late bug", place=place, traceback=f"Traceback of {rank}\n")
    found = lost.get(timeout=LIMIT_S)
    assert found.reason == "ValueError: late bug (net.py:6, in late; rank 2)"
    assert found.ranks == {
        0: "ended because another rank failed",
        1: "raised\nTraceback of 1\n",
        2: "raised\nTraceback of 2\n",
    }
    for one in (made, *others.values()):
        one.arm("the next block", 1000.0)
        one.close()
