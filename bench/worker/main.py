"""A worker's process: it connects to the conductor, does what it is told, and ends with the connection."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from ..cli import guarded, speaker
from ..cluster.process import die_at_once, host_name, process_name
from ..errors import ExitCode, UsageError, UserCodeError
from . import messages as m
from .rank import ADDRESS_KEY, Rank, joined_store, waiting_for, waits_for
from .tracebacks import bounded

CONNECT_S = 600.0
"""So long a worker looks for its conductor: allocations and slow file systems can take minutes."""

POLL_S = 0.1

SPURIOUS = r"(?s)Grad strides do not match bucket view strides.*?sizes\(\) = \[\d+, \d+, 1, 1\]"
"""What DDP's reducer says of 1x1 convolutions in channels_last: the strides of dimensions of one element,
which say nothing of where a value lies (pytorch/pytorch#157862)."""


class Connection:
    """A worker's end. A thread sleeps on it: it answers at once what is asked meanwhile, and ends with it."""

    def __init__(self, address: tuple[str, int], hello: m.Hello) -> None:
        """Connect. Raises OSError where nobody is there, or it is not the conductor."""
        self._socket = m.quick(socket.create_connection(address, timeout=POLL_S * 100))
        self._lines = self._socket.makefile("rb")
        self._sending = threading.Lock()
        self._main = threading.get_ident()
        self.commands: queue.SimpleQueue[m.Command] = queue.SimpleQueue()
        # Loaders of batches are forks of this process: the connection ends with it, not with them.
        os.register_at_fork(after_in_child=self._socket.close)
        self.send(hello)
        first = self._lines.readline(m.MOST_BYTES)
        if not first:
            self._socket.close()
            raise ConnectionRefusedError
        self._socket.settimeout(None)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, answer: m.Answer) -> None:
        """Send a line; who sends to nobody ends."""
        with self._sending:
            try:
                self._socket.sendall(m.encode(answer))
            except OSError:
                os._exit(ExitCode.START_AGAIN)

    def _listen(self) -> NoReturn:
        with contextlib.suppress(OSError, ValueError):
            while line := self._lines.readline(m.MOST_BYTES):
                command = m.decode(line, m.AnyCommand)
                if isinstance(command, m.Tell):
                    self.send(m.Told(waits_for=waits_for(), where=self._where(), stacks=bounded(stacks())))
                else:
                    self.commands.put(command)
        # A worker that computes on would notice nothing before its next answer.
        os._exit(ExitCode.START_AGAIN)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._main)  # documented, though underscored
        if frame is None:
            return "has no main thread"
        return f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def stacks() -> str:
    """Return the Python stack of every thread of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def serve(connection: Connection, rank: Rank) -> NoReturn:
    """Do what the conductor says, until it says to leave."""
    warnings.filterwarnings("ignore", message=SPURIOUS)
    while True:
        with waiting_for("the conductor"):
            command = connection.commands.get()
        if isinstance(command, m.Quit):
            sys.stdout.flush()
            # Not through the interpreter's end, for what `leave` in bench/cluster/process.py says.
            os._exit(ExitCode.OK)
        try:
            answer = rank.do(command)
        except UsageError as error:
            shown = isinstance(error, UserCodeError) and error.__cause__ is not None
            text = "".join(traceback.format_exception(error.__cause__)) if shown else ""
            answer = m.Report(
                status="usage",
                reason=str(error),
                exit_code=error.exit_code,
                label=error.label,
                traceback=text,
            )
        connection.send(answer)


def start(address: tuple[str, int], token: str, *, forked: bool) -> NoReturn:
    """Be a worker that the conductor has started; its environment says which."""
    die_at_once()

    def work() -> int:
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # Python's own generator does so itself
        number, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        serve(Connection(address, _hello(token, number, local, forked=forked)), Rank(number, local))

    with contextlib.suppress(OSError):
        guarded("run", work)
    os._exit(ExitCode.START_AGAIN)


def join() -> NoReturn:
    """Be a worker that torchrun or srun has started: find the conductor in the launcher's store."""
    die_at_once()
    number, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    rank = Rank(number, local)
    timer = threading.Timer(CONNECT_S, _give_up)
    timer.daemon = True
    timer.start()
    store = rank.store = joined_store()
    while True:
        # What an attempt before this one has left there leads nowhere: torchrun keeps its store.
        with contextlib.suppress(OSError):
            store.wait([ADDRESS_KEY], timedelta(seconds=CONNECT_S))
            host, port, token = bytes(store.get(ADDRESS_KEY)).decode().split()
            where = os.environ["MASTER_ADDR"] if host == "master" else host
            connection = Connection((where, int(port)), _hello(token, number, local, forked=False))
            break
        time.sleep(POLL_S)
    timer.cancel()
    serve(connection, rank)


def _give_up() -> None:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    print(
        f"{speaker()}: error: rank 0 did not come to {where} within {CONNECT_S:g} s; see what holds it up, "
        "and start again",
        file=sys.stderr,
        flush=True,
    )
    os._exit(ExitCode.USAGE)


def _hello(token: str, number: int, local_rank: int, *, forked: bool) -> m.Hello:
    pid = os.getpid()
    return m.Hello(
        token=token,
        rank=number,
        local_rank=local_rank,
        host=host_name(),
        pid=pid,
        process=process_name(pid),
        forked=forked,
    )


if __name__ == "__main__":
    start((sys.argv[1], int(sys.argv[2])), sys.argv[3], forked=False)
