"""Connections to workers: what they are sent and say, and the place where those of a launcher connect.

That is the one place of a run to which others may. It is open until all have come. Who knows no token is
refused; who says nothing is few, and short.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from ..worker import messages as m

HELLO_S = 10.0
"""A worker says who it is as soon as it has connected."""

MOST_SILENT = 64
"""So many connections may not have said so yet; of more the oldest is closed. A worker connects again."""

MOST_HELLO = 2**16
"""Bytes of the first line of a worker."""

SEND_S = 10.0
"""A worker reads at once what it is sent. Of one that does not, the missing answer tells."""


@dataclass
class Worker:
    """A worker's connection, and what it has said."""

    rank: int
    connection: socket.socket
    host: str = ""
    """Once it has come."""
    was_idle: bool = False
    """Whether it had gone before it could be sent, or had read, what it was to do last."""
    received: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.connection.settimeout(SEND_S)

    def __str__(self) -> str:
        """How messages name it."""
        return f"rank {self.rank} on {self.host}"

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
        content = _received(self.connection)
        self.was_idle |= content is None
        self.received += content or b""
        lines: list[bytes] = []
        if b"\n" in (content or b""):
            *lines, rest = bytes(self.received).split(b"\n")
            self.received = bytearray(rest)
        try:
            if len(self.received) > m.MOST_BYTES:
                raise ValueError("a line without an end")
            return [m.decode(line, m.AnyAnswer) for line in lines], not content
        except ValueError:  # no worker sends that: as one that has gone
            return [], True


def _received(connection: socket.socket) -> bytes | None:
    """What has come: nothing from a worker that has gone, None where it had not read what it was sent.

    A worker reads a command at once. So one that has not had died before, however late its end is seen: the
    kernel takes back a process's memory first. TCP resets what is closed with something unread (RFC 2525).
    What was sent to one that had closed leaves an error, behind the end that it had sent.
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
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._silent: dict[socket.socket, tuple[bytearray, float]] = {}
        """What has come of each one's hello, and when it has to be whole; the oldest first."""
        host = m.LOOPBACK if one_host else "master"
        self.address = f"{host} {self._listener.getsockname()[1]} {self._token}"
        """For the launcher's store, where the workers find it."""

    def arrived(self, within_s: float) -> list[tuple[m.Hello, socket.socket]]:
        """Workers that have said who they are, with their connections."""
        found = []
        for key, _ in self._selector.select(within_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (come := key.data) in self._silent and (hello := self._said(come)) is not None:
                self._selector.unregister(come)
                del self._silent[come]
                found.append((hello, come))
        late = [one for one, (_, until_s) in self._silent.items() if time.monotonic() > until_s]
        for one in (*late, *[*self._silent][:-MOST_SILENT]):
            self._refuse(one)
        return found

    def _accept(self) -> None:
        try:
            connection = m.quick(self._listener.accept()[0])
        except OSError:  # it has gone again, or there are no descriptors left
            for oldest in [*self._silent][:1]:
                self._refuse(oldest)
            return
        connection.settimeout(SEND_S)
        self._silent[connection] = bytearray(), time.monotonic() + HELLO_S
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _said(self, connection: socket.socket) -> m.Hello | None:
        """The hello of a worker, once it is whole; whoever says anything else is refused."""
        said, _ = self._silent[connection]
        with contextlib.suppress(OSError, ValueError):
            content = connection.recv(MOST_HELLO)
            said += content
            if content and len(said) < MOST_HELLO and not said.endswith(b"\n"):
                return None
            hello: m.Hello = m.decode(bytes(said), m.Hello)
            if secrets.compare_digest(hello.token.encode(), self._token.encode()):
                return hello
        self._refuse(connection)
        return None

    def _refuse(self, connection: socket.socket) -> None:
        if self._silent.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def close(self) -> None:
        """Refuse all that follow."""
        for connection in [*self._silent]:
            self._refuse(connection)
        self._selector.close()
        self._listener.close()
