"""How the ranks of a job meet: at the launcher's store, each with its host and process."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch's stub forgets them
from torch.distributed.rendezvous import rendezvous

from ddp_bench.bench.cli import speaker
from ddp_bench.bench.cluster.process import process_name
from ddp_bench.bench.errors import ExitCode, UsageError

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""The watchdog ends what hangs, and knows what it was; a collective's own limit must not come before it."""

MEETING_LIMIT_S = 600.0
"""A rank gives up waiting for the others then: allocations and slow file systems can take minutes."""

CONNECT_LIMIT = timedelta(seconds=10)
"""A store that torch's agent has opened before it started the ranks answers sooner, or the agent is gone."""

POLL_S = 0.02
"""Between two looks at the store, in seconds."""


@dataclass(frozen=True)
class Peer:
    """A rank as it presents itself when the ranks meet."""

    rank: int
    host: str
    pid: int
    process: str
    """`process_name` of `pid`: containers may share host names and process numbers."""

    def __str__(self) -> str:
        """How messages name it."""
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class Meeting:
    """All ranks of this attempt, by rank; `name` is known to them alone, `own` is this one."""

    name: str
    own: int
    peers: tuple[Peer, ...]


def host_name() -> str:
    """This host's name; BENCH_HOST overrides it where several hosts share one machine."""
    return os.environ.get("BENCH_HOST") or socket.gethostname()


@functools.cache
def meet() -> Meeting:
    """Join the other ranks, once. Raises UsageError for a port that is taken or ranks that do not come."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    with _limited(where) as late:
        try:
            is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            limit = CONNECT_LIMIT if is_open else COLLECTIVE_TIMEOUT
            store, rank, world_size = next(rendezvous("env://", timeout=limit))
            late[:] = ["rank 0"] if rank else ["another rank"]
            meeting = _present(store, rank, world_size, late)
            dist.init_process_group(
                "gloo",
                store=PrefixStore(meeting.name, store),
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
        except (RuntimeError, ValueError) as error:
            if "EADDRINUSE" in str(error) or "address already in use" in str(error):
                raise UsageError(f"{where} is already in use; choose another port with MASTER_PORT") from None
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UsageError(
                f"the ranks cannot meet at {where}: {first}; check MASTER_ADDR and the network"
            ) from None
    return meeting


@contextmanager
def _limited(where: str) -> Iterator[list[str]]:
    """End this process after `MEETING_LIMIT_S`, saying who is late: what the list holds then."""
    late = ["rank 0"]

    def end() -> None:
        print(
            f"{speaker()}: error: {', '.join(late)} did not come to {where} within {MEETING_LIMIT_S:g} s; "
            "see what holds it up, and start again",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ExitCode.USAGE)

    timer = threading.Timer(MEETING_LIMIT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _present(store: Store, rank: int, world_size: int, late: list[str]) -> Meeting:
    """Learn who the others are; `late` names meanwhile who has not come.

    torchrun keeps one store through its restarts, with what ranks that died there have written. So each rank
    takes a new name, and counts as here once it has answered the list that holds this name.
    """
    me = uuid.uuid4().hex
    own = Peer(rank, host_name(), os.getpid(), process_name(os.getpid()))
    store.set(f"bench/{me}", json.dumps(asdict(own)))
    store.set(f"bench/here{rank}", me)
    names = _gathered(store, me, world_size, late) if rank == 0 else _joined(store, me, rank, late)
    late[:] = ["another rank"]
    return Meeting(names[0], rank, tuple(_peer(store, name) for name in names))


def _gathered(store: Store, me: str, world_size: int, late: list[str]) -> list[str]:
    """On rank 0: the name of every rank, once all have answered."""
    names, waiting = [me], set(range(1, world_size))
    while waiting:
        names = [me, *(_read(store, f"bench/here{r}") for r in range(1, world_size))]
        store.set("bench/all", " ".join(names))
        time.sleep(POLL_S)
        waiting = {r for r in waiting if not store.check([f"{me}/{r}"])}
        late[:] = [f"rank {r}" for r in sorted(waiting)]
    store.set(f"{me}/all", " ".join(names))
    return names


def _joined(store: Store, me: str, rank: int, late: list[str]) -> list[str]:
    """On the other ranks: answer the list that holds this rank, and return the list that holds all."""
    while True:
        first, *names = _read(store, "bench/all").split()
        if names[rank - 1 : rank] == [me]:
            break
        time.sleep(POLL_S)
    store.set(f"{first}/{rank}", "seen")
    late[:] = ["another rank"]
    while not store.check([f"{first}/all"]):
        time.sleep(POLL_S)
    return _read(store, f"{first}/all").split()


def _read(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else "-"


def _peer(store: Store, name: str) -> Peer:
    return Peer(**json.loads(_read(store, f"bench/{name}")))
