"""Turns between runs that share a machine, block by block: only one of them computes at any moment.

The first rank of each run asks a server for the turn before it goes on with a case and holds it until it asks
again. The server waits until all have asked, then grants one after the other, in random order, so that
whatever the machine does in that minute meets them all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from .scratch import make_scratch_folder

TURNS_ENV = "BENCH_TURNS"
"""Path of the server's socket, in the environment of all runs; checkouts of other versions read it too."""

PROOFS_ENV = "BENCH_PROVED"
"""Folder of a run of the same code, by whose proofs of its cases one that takes turns may go."""

VARIABLES_ENV = "BENCH_COMPARED"
"""Names of the variables that a gate sets for one side alone, which each run records."""

ASK, GRANT, DONE = b"?", b"!", b"."
"""All that is ever sent. A checkout of another version must understand it: it does not change."""


def get_interleaved_id() -> str | None:
    """Name the turn server that this process was told of; None without one.

    Alike in the runs that it serves, and in no others: its folder has a random name.
    """
    path = os.environ.get(TURNS_ENV)
    return None if path is None else hashlib.sha256(path.encode()).hexdigest()[:12]


def is_later_launch() -> bool:
    """Return whether this run is one of a gate that has launched the same code before."""
    return bool(os.environ.get(PROOFS_ENV)) and get_interleaved_id() is not None


class TurnClient:
    """A run's end of the connection; without a server (`path` None) every turn is granted at once."""

    def __init__(self, path: str | None) -> None:
        self._socket: socket.socket | None = None
        self._holds = False
        if path is not None:
            found = socket.socket(socket.AF_UNIX)
            try:
                found.connect(path)
            except OSError:  # the server has ended: no other run is left to disturb
                found.close()
            else:
                self._socket = found

    def await_turn(self, limit_s: float | None = None) -> None:
        """Give the turn back and wait for the next one; a server that has ended holds nobody up.

        Raises TimeoutError after `limit_s` seconds.

        A turn lasts until the next is asked for: what a run writes down after its block would else take
        the cores from another run's block.
        """
        if self._socket is None:
            return
        self._socket.settimeout(limit_s)
        try:
            self._socket.sendall(DONE + ASK if self._holds else ASK)
            self._socket.recv(1)
        except TimeoutError:
            raise
        except OSError:
            pass
        self._holds = True

    def close(self) -> None:
        """Disconnect once no other run is within a turn; the others go on without this one."""
        self.await_turn()
        self.leave()

    def leave(self) -> None:
        """Disconnect at once, whoever has the turn."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class TurnServer:
    """Grants turns to a number of clients over a Unix socket; one that disconnects is waited for no more."""

    def __init__(self, path: Path, seed: int, num_clients: int = 2) -> None:
        self._path = str(path)
        self._num_clients = num_clients
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(2 * num_clients)
        self._random = random.Random(seed)
        self._clients: list[socket.socket] = []
        self.turns = 0
        """Rounds of turns that all clients took part in."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a client's process needs to connect."""
        return {TURNS_ENV: self._path}

    def _serve(self) -> None:
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            clients = [self._accept_client(opened) for _ in range(self._num_clients)]
            while clients:
                clients += [self._accept_client(opened) for _ in range(self._is_late())]
                clients = [client for client in clients if _receive_byte(client) == ASK]
                self._random.shuffle(clients)
                clients = [client for client in clients if self._serve_turn(client)]
                self.turns += len(clients) == self._num_clients
        self._listener.close()

    def _accept_client(self, opened: contextlib.ExitStack) -> socket.socket:
        self._clients.append(opened.enter_context(self._listener.accept()[0]))
        return self._clients[-1]

    def _is_late(self) -> bool:
        """Return whether a client beyond the expected number waits: `drop_client` of one that connected."""
        waiting, _, _ = select.select([self._listener], [], [], 0)
        return bool(waiting)

    def _serve_turn(self, client: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            client.sendall(GRANT)
            return _receive_byte(client) == DONE
        return False

    def drop_client(self) -> None:
        """Tell the server that a client's process ended, perhaps before it connected: do not wait for it."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as nobody:
            nobody.connect(self._path)

    def close(self) -> None:
        """Stop listening; clients that still wait go on alone, and one that has stopped is not waited for."""
        # The thread closes its sockets itself: closed meanwhile, they could not be passed to select.
        for one in (self._listener, *self._clients):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join()


@contextlib.contextmanager
def serve_turns(num_clients: int, seed: int = 0) -> Iterator[TurnServer]:
    """Run a server for as long as the context lasts."""
    with (
        make_scratch_folder() as short,  # a Unix socket's path has room for 108 bytes only
        contextlib.closing(TurnServer(short / "turns", seed, num_clients)) as server,
    ):
        yield server


def _receive_byte(client: socket.socket) -> bytes:
    """Receive the next byte; empty where the client has disconnected."""
    with contextlib.suppress(OSError):
        return client.recv(1)
    return b""
