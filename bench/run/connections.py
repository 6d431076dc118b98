"""The conductor's connections to its workers, and the place where a launcher's workers come.

It is the one place that others can reach, open until all have come: who knows no token is refused; who says
nothing is few, and short.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field

from ..worker import messages as m
from .failures import name_worker

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

    def send(self, line: bytes) -> None:
        """Send it what to do; one that takes nothing is found where its answer is awaited."""
        try:
            self.connection.sendall(line)
        except ConnectionError:
            self.was_idle = True
        except OSError:
            pass

    def receive(self) -> tuple[list[m.AnyAnswer], bool]:
        """Receive the answers that are whole with what has come, and whether it has gone."""
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
        """Receive the hello of a worker, once it is whole; whoever says anything else is refused."""
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
