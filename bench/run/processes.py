"""Workers' processes and the connections to them: forks of one that has imported torch, or a launcher's.

A launcher's connect to the one place that others can reach, open until all have come: who knows no token is
refused; who says nothing is few, and short.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.process import Child, make_package_command, make_rank_variables, wait_or_kill
from ..machine.gpus import describe_gpus
from ..plan.settings import Settings
from ..worker import messages as m
from .failures import name_worker

ANSWER_TIMEOUT_S = 10.0
"""The process with torch only forks and looks: it answers sooner, or it is stopped or stuck."""

IMPORT_TIMEOUT_S = 600.0
"""Seconds that it may import torch before that: slow file systems take minutes."""

INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

OTHER_GPUS = ("kfd", "nvhost-gpu", "nvidiactl")
"""Entries of /dev where there is a GPU that NVML does not know of."""


class Processes:
    """Starts workers with `variables` beside this process's environment, and tells how they ended."""

    def __init__(self, variables: Mapping[str, str], modules: Sequence[str]) -> None:
        """Begin to import `modules` for them; takes no time of this process."""
        self.variables = dict(variables)
        self.stuck: list[int] = []
        """Processes that have been killed and do not end: the kernel holds them."""
        self._children: dict[int, Child] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self._requests, theirs = socket.socketpair()
        with theirs:
            if sys.platform == "linux":
                whose = map(str, (os.getpid(), theirs.fileno()))
                self.server = subprocess.Popen(
                    make_package_command("-m", "ddp_bench.bench.worker.forks", *whose, *modules),
                    env=os.environ | self.variables,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for this process
                )
        self._answers = self._requests.makefile("rb")
        self._asks = itertools.count()

    def start(self, rank: int, connection: socket.socket, environment: Mapping[str, str]) -> None:
        """Start a worker that has the other end of a connection: nobody else can connect in its place."""
        whole = {**os.environ, **self.variables, **environment}
        pid = self.ask_server({"environment": whole}, [connection.fileno()], within_s=IMPORT_TIMEOUT_S)
        if pid is not None:
            self._children[rank] = _Forked(self, pid)
            return
        self._children[rank] = subprocess.Popen(
            make_package_command("-m", "ddp_bench.bench.worker.main", str(connection.fileno())),
            env=whole,
            pass_fds=[connection.fileno()],
            start_new_session=True,
        )

    def collect_exit_codes(self, ranks: Iterable[int], *, within_s: float = 2.0) -> dict[int, int]:
        """The exit codes of workers started here, or minus their signals; those that live on are killed."""
        found = {rank: self._children.pop(rank) for rank in [*ranks] if rank in self._children}
        codes = wait_or_kill([*found.values()], within_s=within_s)
        self.stuck += [one.pid for one, code in zip(found.values(), codes, strict=True) if code is None]
        return {rank: code for rank, code in zip(found, codes, strict=True) if code is not None}

    def end_all(self) -> None:
        """End those that are left, whatever they do."""
        self.collect_exit_codes([*self._children], within_s=0.0)

    def close(self) -> None:
        """End all, and what they are forks of; those that are started later start each by itself."""
        self.end_all()
        self._answers.close()
        self._requests.close()
        self._end_server()

    def _end_server(self) -> None:
        if self.server is not None and wait_or_kill([self.server], within_s=0.0) == [None]:
            self.stuck.append(self.server.pid)
        self.server = None

    def ask_server(
        self,
        request: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        *,
        within_s: float = ANSWER_TIMEOUT_S,
    ) -> int | None:
        """Ask the process with torch for its answer; None where it has gone, or is ended for giving none."""
        if self.server is None:
            return None
        number = next(self._asks)
        line = json.dumps({"ask": number, **request}).encode() + b"\n"
        self._requests.settimeout(within_s)
        with contextlib.suppress(OSError):
            sent = socket.send_fds(self._requests, [line], descriptors)
            self._requests.sendall(line[sent:])
            while answer := self._answers.readline():
                asked, value = json.loads(answer)
                if asked == number:  # an answer before it was not waited for: Ctrl-C came
                    return None if value is None else int(value)
        self._end_server()
        return None


class _Forked:
    """A worker that the process with torch has forked, which alone can ask how it ended."""

    def __init__(self, processes: Processes, pid: int) -> None:
        self._processes, self.pid = processes, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; SIGKILL, with which the kernel ends it, where its parent has gone."""
        if self._code is None:
            self._code = self._processes.ask_server({"pid": self.pid})
        if self._code is None and self._processes.server is None:
            self._code = -signal.SIGKILL
        return self._code


def make_worker_variables(device_type: str) -> dict[str, str]:
    """Return the variables that a worker on this machine needs beside this process's."""
    # What the environment says of interfaces is for ranks on several machines: it would open ports to these.
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)
    return make_rank_variables(os.environ, device_type) | loopback


def guess_device(settings: Settings) -> str:
    """The kind of device that torch will find, as far as can be told without it."""
    seen = bool(describe_gpus()) or any((Path("/dev") / name).exists() for name in OTHER_GPUS)
    return "cuda" if settings.device != "cpu" and seen else "cpu"


def list_modules(settings: Settings) -> list[str]:
    """List the modules that workers are to have imported before they are forked.

    The first one starts threads where OMP_NUM_THREADS asks for some: then there is nothing to fork. DDP and
    the count of FLOPs import torch's compiler, which takes more than a second in each worker.
    """
    more = ["torchvision.models"] if settings.workload is None and settings.arch != "resnet20" else []
    return ["numpy", "ddp_bench.bench.worker.main", "torch._dynamo", *more]


HELLO_TIMEOUT_S = 10.0
"""A worker says who it is as soon as it has connected."""

MAX_SILENT = 64
"""Connections that may not have said so yet; of more the oldest is closed. A worker connects again."""

MAX_HELLO = 2**16
"""Bytes of the first line of a worker."""

SEND_TIMEOUT_S = 10.0
"""A worker reads at once what it is sent; of one that does not, the missing answer tells."""


@dataclass
class Worker:
    """A worker's connection, and what it has said."""

    rank: int
    connection: socket.socket
    host: str = ""  # until it has come
    was_idle: bool = False
    """True where it had gone before it could be sent, or had read, what it was to do last."""
    received: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.connection.settimeout(SEND_TIMEOUT_S)

    def __str__(self) -> str:
        return f"{name_worker(self.rank)} on {self.host}"

    def send(self, command: m.Command[Any]) -> None:
        """Send it what to do; one that takes nothing is found where its answer is awaited."""
        try:
            self.connection.sendall(m.encode(command))
        except ConnectionError:
            self.was_idle = True
        except OSError:
            pass

    def receive(self) -> tuple[list[m.AnyAnswer], bool]:
        """The answers that are whole with what has come, and whether it has gone."""
        content = _receive_bytes(self.connection)
        self.was_idle |= content is None
        self.received += content or b""
        lines: list[bytearray] = []
        if b"\n" in (content or b""):
            *lines, self.received = self.received.split(b"\n")
        try:
            if len(self.received) > m.MAX_BYTES:
                raise ValueError("a line without an end")
            return [m.decode(line, m.AnyAnswer) for line in lines], not content
        except ValueError:  # no worker sends that: as one that has gone
            return [], True


def _receive_bytes(connection: socket.socket) -> bytes | None:
    """Return what has come: nothing from a worker that has gone, None where it had not read what it was sent.

    A worker reads a command at once; one that has not had died before. TCP resets what is closed with
    something unread (RFC 2525); what was sent to one that had closed leaves an error behind its end.
    """
    try:
        content = connection.recv(2**20)
    except ConnectionResetError:
        return None
    except OSError:
        return b""
    if not content and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return None
    return content


class Meeting:
    """Listens until it is closed."""

    def __init__(self, *, one_host: bool) -> None:
        self._token = secrets.token_hex(16)
        both = not one_host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        interface = m.LOOPBACK if one_host else ""
        self._listener = socket.create_server((interface, 0), family=family, dualstack_ipv6=both)
        self._listener.listen(4096)  # all ranks may come at once; the kernel may let fewer wait
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._silent: dict[socket.socket, tuple[bytearray, float]] = {}
        """Received bytes of each one's hello, and when it has to be whole; the oldest first."""
        host = m.LOOPBACK if one_host else "master"
        self.address = f"{host} {self._listener.getsockname()[1]} {self._token}"
        """For the launcher's store, where the workers find it."""

    def accept_workers(self, within_s: float) -> list[tuple[m.Hello, socket.socket]]:
        """Workers that have said who they are, with their connections."""
        found = []
        for key, _ in self._selector.select(within_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (come := key.data) in self._silent and (hello := self._receive_hello(come)) is not None:
                self._selector.unregister(come)
                del self._silent[come]
                found.append((hello, come))
        late = [one for one, (_, until_s) in self._silent.items() if time.monotonic() > until_s]
        self._refuse(*late, *[*self._silent][:-MAX_SILENT])
        return found

    def _accept(self) -> None:
        try:
            connection = m.set_socket_options(self._listener.accept()[0])
        except OSError:  # it has gone again, or there are no descriptors left
            self._refuse(*[*self._silent][:1])
            return
        connection.settimeout(SEND_TIMEOUT_S)
        self._silent[connection] = bytearray(), time.monotonic() + HELLO_TIMEOUT_S
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _receive_hello(self, connection: socket.socket) -> m.Hello | None:
        """The hello of a worker, once it is whole; whoever says anything else is refused."""
        said, _ = self._silent[connection]
        with contextlib.suppress(OSError, ValueError):
            content = connection.recv(MAX_HELLO)
            said += content
            if content and len(said) < MAX_HELLO and not said.endswith(b"\n"):
                return None
            hello: m.Hello = m.decode(bytes(said), m.Hello)
            if secrets.compare_digest(hello.token.encode(), self._token.encode()):
                return hello
        self._refuse(connection)
        return None

    def _refuse(self, *connections: socket.socket) -> None:
        for connection in self._silent.keys() & connections:
            del self._silent[connection]
            self._selector.unregister(connection)
            connection.close()

    def close(self) -> None:
        """Refuse all that follow."""
        self._refuse(*self._silent)
        self._selector.close()
        self._listener.close()
