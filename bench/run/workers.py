"""The conductor's end of its workers: starts them, tells them what to do, and sees who hangs or dies.

After a death `conductor.py` starts them again.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ..common.cli import print_message
from ..common.errors import ExitCode, UsageError
from ..common.text import format_list
from ..machine.host import count_oom_kills, raise_open_file_limit
from ..machine.launch import Launch
from ..worker import messages as m
from .connections import Meeting, Worker
from .failures import (
    IDLE_PLACE,
    INSPECTOR_RANK,
    MAX_NAMED,
    RestartError,
    describe_exit,
    describe_timeout,
    find_failure,
)
from .processes import Processes, make_worker_variables

T = TypeVar("T")

MEETING_TIMEOUT_S = 600.0
"""Workers may take so long to come: allocations and slow file systems can take minutes."""

ERROR_GRACE_S = 5.0
"""Seconds that the other ranks may take to end after a rank's error before they count as stuck."""

STATUS_TIMEOUT_S = 3.0
"""Seconds that ranks have to send their stacks."""

LINGER_S = 1.0
"""Seconds after a worker has gone, within which others go that the same fault has hit."""


class Workers:
    """All workers of a run, by rank. Under torchrun or srun they are `launched`: a lost one stays lost."""

    def __init__(self, processes: Processes, launched: Launch | None = None) -> None:
        self.launched = launched
        self._processes = processes
        self.stuck = processes.stuck
        self._selector = selectors.DefaultSelector()
        self._last_commands: m.Commands = {}
        self.store_port = 0
        self._begin()

    def _begin(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._lost: dict[int, int | None] = {}
        """Exit codes of those that have gone, by rank; None where another process has started it."""
        self._was_idle = False
        """True where one of them had not begun with what it was told last."""
        self.name = uuid.uuid4().hex
        """Name of those that are there now; no others have it."""
        self._oom_kills = count_oom_kills()

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def hosts(self) -> dict[int, str]:
        """Their hosts by rank, of those that have come."""
        return {rank: worker.host for rank, worker in self._workers.items() if rank != INSPECTOR_RANK}

    def open(self) -> None:
        """Unless it is done, start the first worker, which opens the store; meet a launcher's others, too.

        Raises UsageError where they do not come, or where the port is taken.
        """
        if self._workers:
            return
        self._start([0])
        if (there := self.launched) is None:
            self.store_port = self.ask_worker(0, m.Open(), "start-up", MEETING_TIMEOUT_S)
            return
        with contextlib.closing(Meeting(one_host=there.world_size == there.local_world_size)) as meeting:
            self.ask_worker(0, m.Open(address=meeting.address), "start-up", MEETING_TIMEOUT_S)
            self._await(range(there.world_size), meeting)

    def restart_for_device(self, device_type: str) -> bool:
        """Tell whether workers were started as this kind of device requires; else end all of them."""
        variables = make_worker_variables(device_type)
        if self.launched is not None or self._processes.variables == variables:
            return True
        self.end_at_once()
        self._processes.close()
        self._processes.variables = variables
        return False

    def grow(self, num_ranks: int) -> None:
        """Start workers until there are so many; a launcher has started its own."""
        if self.launched is None:
            raise_open_file_limit(num_ranks)
            self._start(range(len(self), num_ranks))

    def _start(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            named = dict.fromkeys(("RANK", "LOCAL_RANK"), str(max(rank, 0)))
            ours, theirs = socket.socketpair()
            with theirs:
                self._register_worker(Worker(rank, ours))
                self._processes.start(rank, theirs, named if self.launched is None else {})
        self._await(ranks)

    def _register_worker(self, worker: Worker) -> Worker:
        self._workers[worker.rank] = worker
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        return worker

    def _await(self, ranks: Sequence[int], meeting: Meeting | None = None) -> None:
        """Wait for the hello of each; a rank that is there already is nobody else's to take."""
        deadline_s = time.monotonic() + MEETING_TIMEOUT_S
        while late := [k for k in ranks if k not in self._workers or not self._workers[k].host]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                where = f"{os.environ.get('MASTER_ADDR', m.LOOPBACK)}:{os.environ.get('MASTER_PORT', '')}"
                who = ", ".join(f"rank {rank}" for rank in late)
                raise UsageError(
                    f"{who} did not connect to {where} within {MEETING_TIMEOUT_S:g} s: check that it "
                    "started and that the port is reachable"
                )
            for hello, connection in meeting.accept_workers(0.2) if meeting else ():
                if hello.rank in late and hello.rank not in self._workers:
                    self._greet(self._register_worker(Worker(hello.rank, connection)), hello)
                else:
                    connection.close()
            self._poll(0.0 if meeting else left_s)
            if self._lost:
                raise self.make_death_error("start-up")

    def ask_worker(self, rank: int, command: m.Command[T], what: str, limit_s: float) -> T:
        """Return the answer of one worker, outside all cases. Raises UsageError, RestartError."""
        if rank == INSPECTOR_RANK:
            self._start([rank])
        try:
            return self.ask_workers({rank: command}, what, limit_s)[rank]
        finally:
            if (looker := self._workers.pop(INSPECTOR_RANK, None)) is not None:
                looker.send(m.encode(m.Quit()))
                self._forget(looker.connection)
                self._processes.collect_exit_codes([INSPECTOR_RANK])

    def ask_workers(self, commands: Mapping[int, m.Command[T]], what: str, limit_s: float) -> dict[int, T]:
        """Return the answers of workers, outside all cases, by rank. Raises UsageError, RestartError."""
        reports = self.ask(commands, what, limit_s)
        if (failure := find_failure(reports)) is not None:
            raise RestartError(failure)
        return {rank: commands[rank].read_reply(report) for rank, report in reports.items()}

    def ask(self, commands: m.Commands, what: str, limit_s: float) -> dict[int, m.Report]:
        """Have workers do `what`; the report of each, by rank. This process sleeps meanwhile.

        Raises UsageError for a mistake of the user that a worker has found, and RestartError where one dies,
        takes longer than `limit_s`, or leaves the others waiting.
        """
        self._send_commands(commands)
        reports: dict[int, m.Report] = {}
        deadline_s = time.monotonic() + limit_s
        while missing := commands.keys() - reports.keys():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                failed = {k: r for k, r in reports.items() if r.is_failure}
                if (failure := find_failure(failed, waiting=range(len(self)))) is not None:
                    raise RestartError(failure)
                names = {rank: str(self._workers[rank]) for rank in commands}
                raise RestartError(describe_timeout(self._ask_status(names), names, what, limit_s))
            for rank, answer in self._poll(left_s):
                if answer is None:
                    raise self.make_death_error(what)
                if not isinstance(answer, m.Report) or rank not in missing:
                    continue
                if (fault := answer.fault) is not None and fault.status == "usage":
                    error = UsageError(fault.reason)
                    error.exit_code, error.label = ExitCode(answer.exit_code), answer.label
                    error.add_note(answer.traceback)
                    raise error
                reports[rank] = answer
                if fault is not None and [r for r in reports.values() if r.is_failure] == [answer]:
                    # The others may wait for it, or have the same error a little later; or the one that it
                    # misses has died, and its connection is about to end.
                    grace_s = 0.0 if fault.restart and fault.is_cause else ERROR_GRACE_S
                    deadline_s = min(deadline_s, time.monotonic() + grace_s)
        return {rank: reports[rank] for rank in sorted(reports)}

    def _send_commands(self, commands: m.Commands) -> None:
        """Send commands, unless a worker has gone since the last answer. Raises RestartError."""
        self._poll(0.0)
        if self._lost:
            raise self.make_death_error(IDLE_PLACE)
        self._last_commands = commands
        for rank, command in commands.items():
            self._workers[rank].send(m.encode(command))

    def _poll(self, timeout_s: float) -> list[tuple[int, m.AnyAnswer | None]]:
        """Sleep until something comes: answers by rank; None from a worker that has gone."""
        found: list[tuple[int, m.AnyAnswer | None]] = []
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            worker: Worker = key.data
            answers, has_gone = worker.receive()
            for answer in answers:
                if isinstance(answer, m.Hello):
                    self._greet(worker, answer)
                found.append((worker.rank, answer))
            if has_gone:
                self._forget(worker.connection)
                self._lost[worker.rank] = None
                self._was_idle |= worker.was_idle
                found.append((worker.rank, None))
        return found

    def _greet(self, worker: Worker, hello: m.Hello) -> None:
        worker.host = hello.host
        worker.send(m.encode(m.AskStatus()))

    def _forget(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def make_death_error(self, what: str) -> RestartError:
        """Make the error for workers that have gone in `what`, with those that go of the same."""
        self._await_losses(len(self._workers))
        self._lost |= self._processes.collect_exit_codes(self._lost)
        out_of_memory = self._oom_kills is not None and (count_oom_kills() or 0) > self._oom_kills
        killed = [rank for rank, code in self._lost.items() if code is not None and code < 0]
        first = killed or [*self._lost][:1]
        took_no_part = not out_of_memory and all(
            isinstance(self._last_commands.get(k, m.Wait()), m.Wait) for k in first
        )
        what = IDLE_PLACE if self._was_idle or took_no_part else what
        return RestartError(describe_exit(self._lost, what=what, out_of_memory=out_of_memory))

    def is_anyone_lost(self) -> bool:
        """After a launcher's signal, tell whether a worker's end came before it, or comes now."""
        self._await_losses(1)
        return bool(self._lost)

    def _await_losses(self, number: int) -> None:
        """Wait a little until so many workers have gone."""
        deadline_s = time.monotonic() + LINGER_S
        while len(self._lost) < number and (left_s := deadline_s - time.monotonic()) > 0:
            self._poll(left_s)

    def _ask_status(self, ranks: Collection[int]) -> dict[int, m.RankStatus]:
        for rank in ranks:
            self._workers[rank].send(m.encode(m.AskStatus()))
        told: dict[int, m.RankStatus] = {}
        deadline_s = time.monotonic() + STATUS_TIMEOUT_S
        while len(told) < len(ranks) and (left_s := deadline_s - time.monotonic()) > 0:
            told |= {rank: one for rank, one in self._poll(left_s) if isinstance(one, m.RankStatus)}
        return told

    def end(self) -> None:
        """Have all leave, and forget them."""
        for worker in self._workers.values():
            worker.send(m.encode(m.Quit()))
        self._processes.collect_exit_codes(self._workers)
        self.end_at_once()

    def end_at_once(self) -> None:
        """End all, whatever they do."""
        for worker in self._workers.values():
            self._forget(worker.connection)
        self._processes.end_all()
        self._begin()

    def close(self) -> None:
        """End all, and say who does not end."""
        self.end_at_once()
        self._selector.close()
        self._processes.close()
        if self.stuck:
            who = format_list([*map(str, self.stuck)], MAX_NAMED)
            print_message(
                f"process {who} does not end though killed: the kernel holds it, as for a file server or "
                "driver that does not answer; free it, or restart the machine"
            )
