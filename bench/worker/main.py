"""A worker's process: it connects to the conductor, does what it is told, and ends with the connection.

Importing torch costs seconds of a core: on one machine the workers are forks of a process that has done so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..common.cli import get_message_prefix, run_command
from ..common.errors import ExitCode
from ..common.process import end_with, get_host_name, get_waiting, note_waiting, set_default_signals
from ..common.tracebacks import cut_traceback
from ..machine.launch import Launch
from . import messages as m

if TYPE_CHECKING:
    from .rank import Rank

CONNECT_TIMEOUT_S = 600.0
"""Seconds that a worker looks for its conductor: allocations and slow file systems can take minutes."""

POLL_INTERVAL_S = 0.1

ANSWER_TIMEOUT_S = 10.0
"""Seconds that the conductor may take to answer a hello."""

SPURIOUS = r"(?s)Grad strides do not match bucket view strides.*?sizes\(\) = \[\d+, \d+, 1, 1\]"
"""Warning of DDP's reducer on 1x1 convolutions in channels_last: the strides of dimensions of one element,
which say nothing of where a value lies (pytorch/pytorch#157862)."""


class Connection:
    """A worker's end. A thread sleeps on it: it answers at once what is asked meanwhile, and ends with it."""

    def __init__(self, connected: socket.socket, hello: m.Hello) -> None:
        """Say hello. Raises OSError where the other end is not the conductor, which answers at once."""
        self._socket = connected
        self._lines = self._socket.makefile("rb")
        self._sending = threading.Lock()
        self._main = threading.get_ident()
        self.commands: queue.SimpleQueue[m.Command[Any]] = queue.SimpleQueue()
        # The connection ends with this process, not with its forks, which loaders and users' pools are.
        os.register_at_fork(after_in_child=self._leave)
        self.send(hello)
        first = self._lines.readline(m.MAX_BYTES)
        if not first:
            self._socket.close()
            raise ConnectionRefusedError
        self._socket.settimeout(None)
        threading.Thread(target=self._listen, daemon=True).start()

    def _leave(self) -> None:
        """Close a fork's descriptor, which `close` leaves open as long as a file is made of the socket."""
        if (descriptor := self._socket.detach()) >= 0:
            os.close(descriptor)

    def send(self, answer: m.Answer) -> None:
        """Send a line; who sends to nobody ends."""
        with self._sending:
            try:
                self._socket.sendall(m.encode(answer))
            except OSError:
                os._exit(ExitCode.START_AGAIN)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := self._lines.readline(m.MAX_BYTES):
                command = m.decode(line, m.AnyCommand)
                if isinstance(command, m.AskStatus):
                    self.send(
                        m.RankStatus(
                            waits_for=get_waiting(),
                            where=self._describe_frame(),
                            stacks=cut_traceback(format_stacks()),
                        )
                    )
                    continue
                self.commands.put(command)
                if isinstance(command, m.Quit):
                    return  # the end of the connection follows, and is no reason to start again
        # A worker that computes on would notice nothing before its next answer.
        os._exit(ExitCode.START_AGAIN)

    def _describe_frame(self) -> str:
        frame = sys._current_frames().get(self._main)  # documented, though underscored
        if frame is None:
            return "has no main thread"
        return f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def format_stacks() -> str:
    """Return the Python stack of every thread of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def serve(connection: Connection, rank: Rank) -> NoReturn:
    """Do what the conductor says, until it says to leave."""
    warnings.filterwarnings("ignore", message=SPURIOUS)
    del sys.argv[1:]  # a script that parses it would take our arguments for its own
    gc.freeze()  # what is imported is no garbage: to look through it takes part of a second after each case
    while True:
        with note_waiting("the conductor"):
            command = connection.commands.get()
        if isinstance(command, m.Quit):
            sys.stdout.flush()
            # Not through the interpreter's end, for what `leave` in bench/common/process.py says.
            os._exit(ExitCode.OK)
        connection.send(rank.do(command))


def _print_to_stderr() -> None:
    """Send what a user's code prints to stderr: standard output is the command's, for JSON or a table."""
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    sys.stdout = sys.stderr


def start(descriptor: int) -> NoReturn:
    """Be a worker that the conductor has started with an end of a connection; its environment says which."""
    set_default_signals()
    _print_to_stderr()

    from .rank import Rank  # with torch, which the process that it is a fork of has imported

    def run_worker() -> int:
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # Python's own generator does so itself
        connected = socket.socket(fileno=descriptor)
        connected.set_inheritable(False)
        hello = m.Hello(token="", rank=int(os.environ["RANK"]), host=get_host_name())
        serve(Connection(connected, hello), Rank(hello.rank, int(os.environ["LOCAL_RANK"])))

    with contextlib.suppress(OSError):
        run_command("run", run_worker)
    os._exit(ExitCode.START_AGAIN)


def join(launch: Launch) -> NoReturn:
    """Be a worker that torchrun or srun has started: find the conductor in the launcher's store."""
    from .rank import Rank
    from .stores import ADDRESS_KEY, join_store

    set_default_signals()
    _print_to_stderr()
    rank = Rank(launch.rank, launch.local_rank)
    timer = threading.Timer(CONNECT_TIMEOUT_S, _give_up)
    timer.daemon = True
    timer.start()
    store = rank.store = join_store()
    while True:
        # What an attempt before this one has left there leads nowhere: torchrun keeps its store.
        with contextlib.suppress(OSError):
            store.wait([ADDRESS_KEY], timedelta(seconds=CONNECT_TIMEOUT_S))
            host, port, token = bytes(store.get(ADDRESS_KEY)).decode().split()
            where = os.environ["MASTER_ADDR"] if host == "master" else host
            connected = m.set_socket_options(
                socket.create_connection((where, int(port)), timeout=ANSWER_TIMEOUT_S)
            )
            hello = m.Hello(token=token, rank=launch.rank, host=get_host_name())
            connection = Connection(connected, hello)
            break
        time.sleep(POLL_INTERVAL_S)
    timer.cancel()
    serve(connection, rank)


def _give_up() -> None:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    print(
        f"{get_message_prefix()}: error: rank 0 did not open {where} within {CONNECT_TIMEOUT_S:g} s: check "
        "that it started and that the port is reachable",
        file=sys.stderr,
        flush=True,
    )
    os._exit(ExitCode.USAGE)


def can_fork() -> bool:
    """Tell whether a fork has all of this process: not other threads, nor what a GPU's driver keeps."""
    threads = list(Path("/proc/self/task").iterdir())
    files = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    return len(threads) == 1 and not any(file.startswith("/dev/nvidia") for file in files)


def start_forks(conductor: socket.socket, modules: Sequence[str]) -> tuple[dict[str, str], int] | None:
    """Import `modules`, then answer the conductor; in a fork its environment and connection, else None.

    Line by line: it forks a worker, says how one ended, and ends all that are left when the conductor has
    gone. It waits for none. Where it cannot fork it leaves, and the conductor starts each worker by itself.
    """
    try:
        for module in modules:
            importlib.import_module(module)
            if not can_fork():
                return None
    except Exception:  # noqa: BLE001 - whatever it is, a worker that imports by itself says it
        return None
    codes: dict[int, int | None] = {}
    while (asked := _receive_request(conductor)) is not None:
        request, descriptors = asked
        if "pid" in request:
            answer = codes[request["pid"]]
            if answer is None and (found := os.waitpid(request["pid"], os.WNOHANG))[0]:
                answer = codes[found[0]] = os.waitstatus_to_exitcode(found[1])
        else:
            server, answer = os.getpid(), os.fork()
            if answer == 0:
                os.setsid()
                end_with(server)
                return request["environment"], *descriptors
            codes[answer] = None
            os.close(*descriptors)
        with contextlib.suppress(OSError):  # it has gone
            conductor.sendall(json.dumps([request["ask"], answer]).encode() + b"\n")
    for pid in [pid for pid, code in codes.items() if code is None]:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _receive_request(conductor: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive the next request and its descriptor, if any; None where the conductor has gone."""
    line, descriptors = b"", list[int]()
    while not line.endswith(b"\n"):
        content, more, *_ = socket.recv_fds(conductor, 2**16, 1, socket.MSG_CMSG_CLOEXEC)
        if not content:
            return None
        line += content
        descriptors += more
    return json.loads(line), descriptors


def serve_forks(conductor: socket.socket, modules: Sequence[str]) -> None:
    """Fork workers as `start_forks` does, and in a fork be one; return once the conductor has gone."""
    with conductor:
        found = start_forks(conductor, modules)
    if found is not None:
        environment, connection = found
        os.environ.clear()
        os.environ.update(environment)
        start(connection)


def main(arguments: Sequence[str]) -> None:
    """Be a worker with this end of a connection; or, told of its parent and modules too, fork workers."""
    descriptor, *more = arguments
    if not more:
        start(int(descriptor))
    parent, *modules = more
    end_with(int(parent))  # imports take seconds, in which nobody reads the socket
    serve_forks(socket.socket(fileno=int(descriptor)), modules)


if __name__ == "__main__":
    main(sys.argv[1:])
