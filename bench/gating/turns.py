"""Two runs taking turns on one machine, block by block: only one of them computes at any moment.

Each run's rank 0 asks a referee for the turn before a visit to a case and holds it until the next visit. The
referee waits until both have asked, then lets them go one after the other, in random order, so that whatever
the machine does in that minute meets both.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from pathlib import Path

TURNS_ENV = "BENCH_TURNS"
"""Path of the referee's socket, in the environment of both runs."""

ASK, GRANT, DONE = b"?", b"!", b"."


class Player:
    """A run's side: without a referee (`path` None) every turn is granted at once."""

    def __init__(self, path: str | None) -> None:
        self._socket: socket.socket | None = None
        self._holds = False
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(path)

    def next_turn(self) -> None:
        """Give the turn back and wait for the next one; a referee that is gone holds nobody up.

        A turn lasts until the next is asked for: what a side writes down after its block would else take
        the cores from the other side's block.
        """
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.sendall(DONE + ASK if self._holds else ASK)
            self._socket.recv(1)
        self._holds = True

    def close(self) -> None:
        """Leave the game once the other side is between two of its turns; it goes on alone."""
        if self._socket is not None:
            self.next_turn()
            self._socket.close()
            self._socket = None


class Referee:
    """Grants turns to two players over a Unix socket until one of them leaves; then the other is free."""

    def __init__(self, path: Path, seed: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(2)
        self._random = random.Random(seed)  # noqa: S311 - a schedule
        self.turns = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            players = [opened.enter_context(self._listener.accept()[0]) for _ in range(2)]
            while all(player.recv(1) == ASK for player in players):
                for player in self._random.sample(players, 2):
                    player.sendall(GRANT)
                    if player.recv(1) != DONE:  # it has left: closing the sockets frees the other
                        return
                self.turns += 1

    def close(self) -> None:
        """Stop listening; players that still wait go on alone."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
