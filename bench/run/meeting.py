"""Accepts the workers that a launcher has started: the one place of a run to which others may connect.

It is open until all have come. Who knows no token is refused; who says nothing is few, and short.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time

from ..worker import messages as m

HELLO_S = 10.0
"""A worker says who it is as soon as it has connected."""

MOST_SILENT = 64
"""So many connections may not have said so yet; of more the oldest is closed. A worker connects again."""

MOST_HELLO = 2**16
"""Bytes of the first line of a worker."""

SEND_S = 10.0
"""A worker reads at once what it is sent. Of one that does not, the missing answer tells."""


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
