"""Ends what does not end: time limits on the ranks' work, alarms between them, and what signals do to them.

The ranks tell each other of trouble through the launcher's store, on threads that sleep until there is
some: a main thread may sit in a collective that never returns. Rank 0 writes down what happened and ends; the
launcher then starts all ranks again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stub forgets it

from ddp_bench.bench.cli import speaker
from ddp_bench.bench.cluster.meeting import Meeting, Peer, meet
from ddp_bench.bench.cluster.process import STOP_SIGNALS, process_name
from ddp_bench.bench.cluster.ranks import waits_for
from ddp_bench.bench.recovery.failures import (
    AFTER_ANOTHER,
    RESTART_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    placed,
)
from ddp_bench.bench.recovery.tracebacks import bounded

FOREVER = timedelta(days=20)
"""A thread waits so long for alarms: longer than any run, and short enough for the store's milliseconds."""

ERROR_GRACE_S = 5.0
"""How long the other ranks may take to come and hear of a rank's error before they count as stuck."""

ANSWER_S = 3.0
"""How long ranks have to send their stacks."""

LAST_RESORT_S = 20.0
"""A rank that sent an alarm ends itself after so long: rank 0 hangs then, or the store is gone."""

START_LIMIT_S = 600.0
"""Limit for what is done before the first case, such as reading drivers and slow file systems."""

MOST_NAMED = 4
"""So many ranks a message names; of more it gives the number."""

OnLoss = Callable[[Failure], None]


class Watchdog:
    """One rank's guard, from the meeting of the ranks to their end; it begins with a limit for start-up."""

    def __init__(self, meeting: Meeting) -> None:
        self._token = meeting.name
        self._peers = meeting.peers
        self._rank = meeting.own
        self._folder: Path | None = None
        self._on_loss: OnLoss = say_and_end
        self._main = threading.get_ident()
        self._changed = threading.Condition()
        self._what = ""
        self._limit_s = self._deadline_s = self._wakes_s = float("inf")
        self._piece = 0
        self._closed = False
        self.arm("start-up", START_LIMIT_S)
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._watch, self._listen)]
        for thread in self._threads:
            thread.start()

    def report_to(self, on_loss: OnLoss, folder: Path | None = None) -> None:
        """On rank 0, let `on_loss` write down what is lost, and end; stacks go into `folder`."""
        self._on_loss, self._folder = on_loss, folder

    def arm(self, what: str, limit_s: float) -> None:
        """From now on `what` is under way, for at most `limit_s` seconds; microseconds."""
        # The thread that watches decides how long to sleep under the same lock, so it cannot miss this.
        with self._changed:
            self._piece += 1
            self._what, self._limit_s = what, limit_s
            self._deadline_s = time.monotonic() + limit_s
            if self._deadline_s < self._wakes_s:
                self._changed.notify()

    def tell(
        self, status: str, reason: str, *, place: str = "", traceback: str = "", at_once: bool = False
    ) -> None:
        """Tell rank 0 of an error of this rank; it waits a little, for the others may have it too.

        `at_once`: the ranks have to start again whatever the others do. NCCL's own watchdog ends a process
        whose device is lost within a second, and with it the reason.
        """
        error = {"kind": "error", "piece": self._piece, "status": status, "reason": reason}
        error |= {"place": place, "traceback": traceback}
        with contextlib.suppress(RuntimeError):
            self._send({**error, "grace_s": 0.0 if at_once else ERROR_GRACE_S})

    def close(self) -> None:
        """Stop watching; every rank calls it at the end."""
        self._closed = True
        with self._changed:
            self._changed.notify()
        if self._rank == 0:
            with contextlib.suppress(RuntimeError):
                self._send({"kind": "close"})
        for thread in self._threads:
            thread.join(ANSWER_S)

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                left_s = self._deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._wakes_s = self._deadline_s
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            else:
                return
            late = {"kind": "timeout", "what": self._what, "limit_s": self._limit_s}
        with contextlib.suppress(RuntimeError):
            self._send(late)
        time.sleep(LAST_RESORT_S)
        # Nobody has ended us: rank 0 hangs, or the store is gone.
        print(f"rank {self._rank}: {late['what']} did not end\n{stacks()}", file=sys.stderr, flush=True)
        if self._rank == 0:
            self._on_loss(Failure("timeout", f"no end of {late['what']} within {late['limit_s']:g} s"))
        with contextlib.suppress(psutil.Error):
            first = self._peers[0]
            if _is_here(first) and psutil.Process(first.pid).status() == psutil.STATUS_STOPPED:
                _kill(first)
        os._exit(TIMEOUT_EXIT_CODE)

    def _store(self) -> TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=LAST_RESORT_S))

    def _key(self, name: str) -> str:
        return f"bench/{self._token}/{name}"

    def _send(self, alarm: dict[str, Any]) -> None:
        store = self._store()
        number = store.add(self._key("alarms"), 1)
        store.set(self._key(f"alarm{number}"), json.dumps({"rank": self._rank, **alarm}))

    def _listen(self) -> None:
        try:
            store = self._store()
            number = 1
            while True:
                key = self._key(f"alarm{number}")
                store.wait([key], FOREVER)
                alarm = json.loads(store.get(key))
                if alarm["kind"] == "close":
                    return
                number += 1
                self._handle(alarm, store, number)
        except RuntimeError:
            if self._closed:
                return
            if self._rank == 0:
                self._on_loss(Failure("", "the launcher is gone"))
            # A rank that computes on would notice nothing before its next collective.
            time.sleep(LAST_RESORT_S)
            os._exit(RESTART_EXIT_CODE)

    def _handle(self, alarm: dict[str, Any], store: TCPStore, following: int) -> None:
        """Answer an alarm, or act on it on rank 0; `following` is the number of the next one."""
        if alarm["kind"] == "timeout":
            answer = {"waits_for": waits_for(), "where": self._where(), "stacks": stacks()}
            store.set(self._key(f"stacks{self._rank}"), json.dumps(answer))
            if self._rank == 0:
                self._on_loss(self._timed_out(alarm, store))
        elif self._rank == 0:
            deadline_s = time.monotonic() + alarm["grace_s"]
            while self._piece <= alarm["piece"]:
                if time.monotonic() > deadline_s:
                    self._on_loss(self._raised(alarm, store, following))
                time.sleep(0.1)

    def _raised(self, alarm: dict[str, Any], store: TCPStore, following: int) -> Failure:
        """What an error of a rank ends, with those of other ranks in the same piece of work."""
        ranks = {peer.rank: AFTER_ANOTHER for peer in self._peers}
        alarms = [alarm]
        while store.check([self._key(f"alarm{following}")]):
            alarms.append(json.loads(store.get(self._key(f"alarm{following}"))))
            following += 1
        same = [one for one in alarms if one["kind"] == "error" and one["piece"] == alarm["piece"]]
        ranks |= {one["rank"]: f"raised\n{one['traceback']}" for one in same}
        reason = placed(alarm["reason"], alarm["place"], f"rank {alarm['rank']}")
        return Failure(alarm["status"], reason, ranks)

    def _timed_out(self, alarm: dict[str, Any], store: TCPStore) -> Failure:
        """Collect the stacks of the ranks that answer, kill those that do not, and say who is late."""
        answers: dict[int, dict[str, str]] = {}
        missing = set(range(len(self._peers)))
        deadline_s = time.monotonic() + ANSWER_S
        while missing and time.monotonic() < deadline_s:
            for rank in sorted(missing):
                if store.check([self._key(f"stacks{rank}")]):
                    answers[rank] = json.loads(store.get(self._key(f"stacks{rank}")))
                    self._log(rank, answers[rank]["stacks"])
                    missing.discard(rank)
            time.sleep(0.05)
        for rank in missing:
            _kill(self._peers[rank])
        where = "" if self._folder is None else "; stacks are in logs/"
        ranks = dict.fromkeys(sorted(missing), "gave no answer")
        for rank, answer in sorted(answers.items()):
            did = f"waited for {answer['waits_for']}" if answer["waits_for"] else "was at work"
            ranks[rank] = f"{did}\n{bounded(answer['stacks'])}"
        return Failure(
            "timeout",
            f"no end of {alarm['what']} within {alarm['limit_s']:g} s: {self._who_is_late(answers)}{where}",
            ranks,
        )

    def _who_is_late(self, answers: Mapping[int, Mapping[str, str]]) -> str:
        """Name the ranks that did not answer or were at work; if all waited, what the first waited for."""
        silent = [f"{peer} gave no answer" for peer in self._peers if peer.rank not in answers]
        working = [
            f"{self._peers[rank]} {answer['where']}"
            for rank, answer in sorted(answers.items())
            if not answer["waits_for"]
        ]
        late = silent + working
        return _listed(late) if late else f"{self._peers[0]} waits for {answers[0]['waits_for']}"

    def _log(self, rank: int, text: str) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / "logs").mkdir(exist_ok=True)
                (self._folder / "logs" / f"rank{rank}.txt").write_text(text, encoding="utf-8")

    def _where(self) -> str:
        frame = sys._current_frames().get(self._main)  # documented, though underscored
        if frame is None:
            return "has no main thread"
        return f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


@functools.cache
def meet_and_watch() -> Watchdog:
    """Join the other ranks, once, and watch over this process from then on."""
    return Watchdog(meet())


def say_and_end(failure: Failure) -> None:
    """Say on standard error what is lost; nothing is written down."""
    print(f"{speaker()}: error: {failure.reason}", file=sys.stderr, flush=True)
    os._exit(RESTART_EXIT_CODE)


def _is_here(peer: Peer) -> bool:
    """Whether a process of this machine is that rank, not another one with its number."""
    return bool(peer.process) and process_name(peer.pid) == peer.process


def _kill(peer: Peer) -> None:
    # A stopped process would hold the restart up: it does not hear the launcher's SIGTERM.
    if _is_here(peer):
        with contextlib.suppress(OSError):
            os.kill(peer.pid, signal.SIGKILL)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def stacks() -> str:
    """The Python stack of every thread of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def die_at_once() -> None:
    """Leave on a signal without a word: another process brings the files up to date."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def on_stop(act: Callable[[], None]) -> None:
    """Call `act` on a thread of its own once Ctrl-C or SIGTERM comes; it ends the process.

    Python's own handler would wait for the main thread, which may sit in a collective, to come back from C++.
    """
    heard, woken = socket.socketpair()
    woken.settimeout(0)

    def wait() -> None:
        while True:
            if heard.recv(1)[0] in STOP_SIGNALS:
                act()
                os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    signal.set_wakeup_fd(woken.detach(), warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
