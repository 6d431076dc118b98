"""A machine that a run shares: the load of other programs, and turns with other runs.

Runs take turns block by block: only one of them computes at any moment. The first rank of each run asks a
server for the turn before it goes on with a case and holds it until it asks again. The server waits until all
have asked, then grants one after the other, in random order, so that whatever the machine does in that minute
meets them all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .manifest import Load
from .process import allowed_cores, scratch_folder

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MOST_BUSY = 0.05
"""Share of the cores that other programs may use while every core stands in for a device. 5% is the gate's
default threshold: a load of that size can pass for a regression."""

MOST_STEAL = 0.02
"""Share of time that the hypervisor may give to other guests (proc(5), "steal")."""


@dataclass(frozen=True)
class LoadReading:
    """What one rank reads at one moment; CPU seconds since its machine or its process started."""

    machine: str
    """Alike of ranks that share a kernel, whatever their hosts are called."""
    cores: tuple[int, ...]
    """Where the rank may run."""
    at_s: float
    own_s: float
    """Of this process and its descendants."""
    busy_s: tuple[float, ...]
    """Of every core of the machine, by its number: time in programs, interrupts left out."""
    steal_s: tuple[float, ...]
    """Likewise: time that the hypervisor gave to other guests; 0 where the system does not tell."""


def load_average() -> float | None:
    """Programs that ran or wanted to in the last minute, as a share of this machine's cores, if known."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 3)
    except OSError:
        return None


def mean_load(now: Load, earlier: Load) -> Load:
    """The mean over two parts of a run."""
    total_s = now.seconds + earlier.seconds
    share = now.seconds / total_s if total_s else 1.0
    return Load(
        cores=now.cores,
        others=round(share * now.others + (1 - share) * earlier.others, 3),
        steal=round(share * now.steal + (1 - share) * earlier.steal, 3),
        seconds=round(total_s, 1),
    )


def read_load() -> LoadReading | None:
    """Read the load of this rank's machine; None where the system does not tell it."""
    try:
        times = psutil.cpu_times(percpu=True)
        process = psutil.Process()
        # User and system time, of itself and of children that have ended.
        own_s = sum(sum(one.cpu_times()[:4]) for one in [process, *process.children(recursive=True)])
        return LoadReading(
            machine=_BOOT_ID.read_text(encoding="ascii").strip(),
            cores=tuple(core for core in allowed_cores() if core < len(times)),
            at_s=time.monotonic(),
            own_s=own_s,
            # User time includes guests' (proc(5)); interrupts are mostly of the ranks' own traffic.
            busy_s=tuple(core.user + core.nice + core.system for core in times),
            steal_s=tuple(core.steal for core in times),
        )
    except (OSError, AttributeError, psutil.Error):
        return None


def other_loads(before: Sequence[LoadReading | None], after: Sequence[LoadReading | None]) -> list[Load]:
    """Compute the load between two readings of every rank, in rank order: one per machine, if known."""
    if None in before or None in after:
        return []
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    machines = dict.fromkeys(first.machine for first, _ in pairs)
    return [_of_machine([pair for pair in pairs if pair[0].machine == machine]) for machine in machines]


def _of_machine(pairs: Sequence[tuple[LoadReading, LoadReading]]) -> Load:
    first, last = pairs[0]
    cores = sorted({core for reading, _ in pairs for core in reading.cores})
    elapsed_s = max(last.at_s - first.at_s, 1e-9)

    def mean(then: Sequence[float], now: Sequence[float]) -> float:
        return sum(now[core] - then[core] for core in cores) / elapsed_s

    own = sum(now.own_s - then.own_s for then, now in pairs) / elapsed_s
    others = mean(first.busy_s, last.busy_s) - own
    steal = mean(first.steal_s, last.steal_s)
    return Load(
        cores=len(cores),
        others=round(max(others, 0.0), 3),
        steal=round(max(steal, 0.0), 3),
        seconds=round(elapsed_s, 1),
    )


TURNS_ENV = "BENCH_TURNS"
"""Path of the server's socket, in the environment of all runs; checkouts of other versions read it too."""

ASK, GRANT, DONE = b"?", b"!", b"."
"""All that is ever sent. A checkout of another version must understand it: it does not change."""


def interleaved_id() -> str | None:
    """Name the turn server that this process was told of; None without one.

    Alike in the runs that it serves, and in no others: its folder has a random name.
    """
    path = os.environ.get(TURNS_ENV)
    return None if path is None else hashlib.sha256(path.encode()).hexdigest()[:12]


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

    def next_turn(self, limit_s: float | None = None) -> None:
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
        self.next_turn()
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
        """What a client's process needs to connect."""
        return {TURNS_ENV: self._path}

    def _serve(self) -> None:
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            clients = [self._accepted(opened) for _ in range(self._num_clients)]
            while clients:
                clients += [self._accepted(opened) for _ in range(self._is_late())]
                clients = [client for client in clients if _received(client) == ASK]
                self._random.shuffle(clients)
                clients = [client for client in clients if self._had_its_turn(client)]
                self.turns += len(clients) == self._num_clients
        self._listener.close()

    def _accepted(self, opened: contextlib.ExitStack) -> socket.socket:
        self._clients.append(opened.enter_context(self._listener.accept()[0]))
        return self._clients[-1]

    def _is_late(self) -> bool:
        """Whether a client beyond the expected number waits: `client_left` of one that had connected."""
        waiting, _, _ = select.select([self._listener], [], [], 0)
        return bool(waiting)

    def _had_its_turn(self, client: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            client.sendall(GRANT)
            return _received(client) == DONE
        return False

    def client_left(self) -> None:
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
def turn_server(num_clients: int, seed: int = 0) -> Iterator[TurnServer]:
    """A server for as long as the context lasts."""
    with (
        scratch_folder() as short,  # a Unix socket's path has room for 108 bytes only
        contextlib.closing(TurnServer(short / "turns", seed, num_clients)) as server,
    ):
        yield server


def _received(client: socket.socket) -> bytes:
    """The next byte; empty where the client has disconnected."""
    with contextlib.suppress(OSError):
        return client.recv(1)
    return b""
