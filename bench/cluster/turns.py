"""Runs taking turns on one machine, block by block: only one of them computes at any moment.

Each run's rank 0 asks a referee for the turn before a visit to a case and holds it until the next visit. The
referee waits until all have asked, then lets them go one after the other, in random order, so that whatever
the machine does in that minute meets them all.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

TURNS_ENV = "BENCH_TURNS"
"""Path of the referee's socket, in the environment of all runs."""

ASK, GRANT, DONE = b"?", b"!", b"."


class Player:
    """A run's side: without a referee (`path` None) every turn is granted at once."""

    def __init__(self, path: str | None) -> None:
        self._socket: socket.socket | None = None
        self._holds = False
        if path is not None:
            found = socket.socket(socket.AF_UNIX)
            try:
                found.connect(path)
            except OSError:  # the game is over: nobody is left to disturb
                found.close()
            else:
                self._socket = found

    def next_turn(self) -> None:
        """Give the turn back and wait for the next one; a referee that is gone holds nobody up.

        A turn lasts until the next is asked for: what a side writes down after its block would else take
        the cores from another side's block.
        """
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.sendall(DONE + ASK if self._holds else ASK)
            self._socket.recv(1)
        self._holds = True

    def close(self) -> None:
        """Leave the game once nobody else is within a turn; the others go on without."""
        if self._socket is not None:
            self.next_turn()
            self._socket.close()
            self._socket = None


class Referee:
    """Grants turns to a number of players over a Unix socket; who leaves is waited for no more."""

    def __init__(self, path: Path, seed: int, num_players: int = 2) -> None:
        self._path = str(path)
        self._num_players = num_players
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(2 * num_players)
        self._random = random.Random(seed)  # noqa: S311 - a schedule
        self.turns = 0
        """Rounds of turns that all players had a part in."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a player's process has to know."""
        return {TURNS_ENV: self._path}

    def _serve(self) -> None:
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            players = [opened.enter_context(self._listener.accept()[0]) for _ in range(self._num_players)]
            while players:
                players += [opened.enter_context(late) for late in self._late()]
                players = [player for player in players if _said(player) == ASK]
                self._random.shuffle(players)
                players = [player for player in players if self._had_its_turn(player)]
                self.turns += len(players) == self._num_players
        self._listener.close()

    def _late(self) -> list[socket.socket]:
        """Who came after as many others, one of whom was excused although it had come."""
        waiting, _, _ = select.select([self._listener], [], [], 0)
        return [self._listener.accept()[0]] if waiting else []

    def _had_its_turn(self, player: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            player.sendall(GRANT)
            return _said(player) == DONE
        return False

    def excuse(self) -> None:
        """Do not wait for a player who ended before it came; no matter where it came."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as nobody:
            nobody.connect(self._path)

    def close(self) -> None:
        """Stop listening; players that still wait go on alone."""
        # The thread closes its listener itself: closed under its hands, it could not be asked who waits.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()


@contextlib.contextmanager
def refereed(num_players: int, seed: int = 0) -> Iterator[Referee]:
    """A referee for as long as the context lasts."""
    with (
        tempfile.TemporaryDirectory() as short,  # a Unix socket's path has room for 108 bytes only
        contextlib.closing(Referee(Path(short, "turns"), seed, num_players)) as referee,
    ):
        yield referee


def _said(player: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return player.recv(1)
    return b""
