"""Ranks as forks of one process that has imported everything: importing torch costs seconds of a core.

PyTorch's agent starts, watches and ends a proxy for every rank: this file, run as a script. The proxy asks
the server for the rank, with its own arguments and environment, and ends as the rank does: with its exit
code, or by its signal. A rank is killed when its proxy ends first. Where no server answers, the proxy becomes
the rank, with imports of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

REQUEST_S = 10.0
"""So long may a proxy take to write its request; a line on a local socket takes no time."""

END_S = 30.0
"""So long may killed ranks take to go: one that the kernel holds back is left to it."""

SO_PEERCRED = 17
"""Linux's option for process, user and group of the other end; Python lacks the name elsewhere."""


class ForkServer:
    """The launcher's end of the server; `variables` are what its environment has beside the launcher's."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start a process that imports `modules`; what fails there fails in the ranks, which say so."""
        from ddp_bench.bench.package import own_command  # see _become_rank

        self.variables = dict(variables)
        # An abstract name leaves nothing on a disk, whatever ends this process.
        self._address = f"bench-{uuid.uuid4().hex}"
        self._is_ready = False
        self._server, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self._address}")
            listener.listen()
            descriptors = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                own_command(
                    "-m", "ddp_bench.bench.run.fork_server", "serve", *map(str, descriptors), *modules
                ),
                env=os.environ | self.variables,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the launcher
            )

    def proxy(self, arguments: Sequence[str]) -> list[str]:
        """What to give Python in place of `arguments`, which begin with -m and a module, or are our own."""
        return ["-I", "-S", __file__, "proxy", self._address, *arguments]

    def end_ranks(self) -> None:
        """Return when no rank is left; the agent has ended their proxies."""
        with contextlib.suppress(OSError):
            self._server.settimeout(0)
            self._is_ready = self._is_ready or bool(self._server.recv(1))
            self._server.settimeout(END_S)
            self._server.send(b"?")
            self._server.recv(1)
        if not self._is_ready:
            self._process.kill()  # it still imports: there is no rank yet

    def close(self) -> None:
        """End the server and its ranks."""
        self.end_ranks()
        self._process.kill()
        self._process.wait()
        self._server.close()


@contextlib.contextmanager
def fork_server(modules: Sequence[str], variables: Mapping[str, str]) -> Iterator[ForkServer | None]:
    """A server while the context lasts; None where the system lacks what it needs."""
    if sys.platform != "linux":
        yield None
        return
    server = ForkServer(modules, variables)
    try:
        yield server
    finally:
        server.close()


@dataclass(frozen=True)
class _Rank:
    pid: int
    descriptor: int
    """Of the process; readable once it has ended."""
    proxy: socket.socket


class _Server:
    """Forks a rank per request until the launcher has gone, and all ranks have too."""

    def __init__(self, launcher: socket.socket, listener: socket.socket) -> None:
        self._launcher = launcher
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(launcher, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._ranks: list[_Rank] = []
        self._tell_launcher()

    def serve(self) -> dict[str, Any] | None:
        """In a rank, what it was asked to run; in the server None, at its end."""
        launcher_lives = True
        while launcher_lives or self._ranks:
            # One at a time: what one event ends, another of the same time may be about.
            key = self._selector.select()[0][0]
            if isinstance(key.data, _Rank):
                self._end(key.data)
            elif key.fileobj is self._listener:
                request = self._start()
                if request is not None:
                    return request
            elif self._launcher_asks():
                for rank in list(self._ranks):
                    self._end(rank)
                self._tell_launcher()
            else:
                # The ranks notice, and rank 0 brings the files up to date.
                launcher_lives = False
                self._selector.unregister(self._launcher)
        return None

    def _launcher_asks(self) -> bool:
        """Whether the launcher wants the ranks to end, not to go on without it."""
        try:
            return bool(self._launcher.recv(1))
        except OSError:
            return False  # it has gone without having read all it was told

    def _tell_launcher(self) -> None:
        with contextlib.suppress(OSError):
            self._launcher.send(b"!")

    def _start(self) -> dict[str, Any] | None:
        """Fork a rank for a proxy; in the rank, its request."""
        proxy, _ = self._listener.accept()
        request = _request(proxy)
        if request is None:
            proxy.close()
            return None
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            _become_rank(server)
            for other in self._ranks:
                os.close(other.descriptor)
                other.proxy.close()
            self._selector.close()
            for end in (self._launcher, self._listener, proxy):
                end.close()
            return request
        rank = _Rank(pid, os.pidfd_open(pid), proxy)
        self._ranks.append(rank)
        self._selector.register(rank.descriptor, selectors.EVENT_READ, rank)
        self._selector.register(proxy, selectors.EVENT_READ, rank)
        with contextlib.suppress(OSError):
            proxy.send(b"+")
        return None

    def _end(self, rank: _Rank) -> None:
        """Kill a rank, unless it has ended, and tell its proxy how it did."""
        os.kill(rank.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # what it started, as PyTorch's agent does
        _, status = os.waitpid(rank.pid, 0)
        with contextlib.suppress(OSError):
            rank.proxy.send(str(os.waitstatus_to_exitcode(status)).encode())
        self._ranks.remove(rank)
        self._selector.unregister(rank.descriptor)
        self._selector.unregister(rank.proxy)
        os.close(rank.descriptor)
        rank.proxy.close()


def _request(proxy: socket.socket) -> dict[str, Any] | None:
    """What a proxy asks for; None where it has ended, or another user sent it."""
    proxy.settimeout(REQUEST_S)
    with contextlib.suppress(OSError), proxy.makefile("rb") as lines:
        line = lines.readline() if _is_ours(proxy) else b""
        if line.endswith(b"\n"):
            request: dict[str, Any] = json.loads(line)
            return request
    return None


def _is_ours(peer: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


def _become_rank(server: int) -> None:
    # Imported here for the same reason as above.
    from ddp_bench.bench.parent_death import end_with

    os.setsid()
    end_with(server)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so itself


def _can_fork() -> bool:
    """Whether a fork has all of this process: not other threads, nor what a GPU's driver keeps."""
    threads = list(Path("/proc/self/task").iterdir())
    files = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    return len(threads) == 1 and not any(file.startswith("/dev/nvidia") for file in files)


def _serve(launcher: socket.socket, listener: socket.socket, modules: Sequence[str]) -> dict[str, Any] | None:
    try:
        os.close(os.pidfd_open(os.getpid()))
        for module in modules:
            importlib.import_module(module)
            if not _can_fork():
                return None
    except Exception:  # noqa: BLE001 - whatever it is, a rank that imports by itself says it
        return None
    return _Server(launcher, listener).serve()


def _run(request: Mapping[str, Any]) -> None:
    """Do what Python does with these arguments."""
    os.environ.clear()
    os.environ.update(request["environment"])
    first, *arguments = request["arguments"]
    if first == "-m":
        sys.argv[1:] = arguments[1:]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        importlib.import_module("ddp_bench.bench.commands").start(arguments)


def _stand_for_rank(address: str, arguments: Sequence[str]) -> NoReturn:
    """End as the rank does that a server runs; where none answers, become the rank."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.connect(f"\0{address}")
        if _is_ours(server):
            request = {"arguments": arguments, "environment": dict(os.environ)}
            server.sendall(json.dumps(request).encode() + b"\n")
            if server.recv(1):
                # The server takes its ranks along when it is killed.
                _end_with(int(server.recv(16) or -signal.SIGKILL))
    os.execv(sys.executable, [sys.executable, *arguments])


def _end_with(code: int) -> NoReturn:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has written its own
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "proxy":
        _stand_for_rank(given[0], given[1:])
    with socket.socket(fileno=int(given[0])) as own, socket.socket(fileno=int(given[1])) as asked:
        rank = _serve(own, asked, given[2:])
    if rank is not None:
        _run(rank)
