"""The ranks of a job: who I am, and the small collectives that conduct the run.

The default process group is gloo and carries control only: a rank waiting in it sleeps, so its device
stays idle. Gradients go through subgroups of the case's own backend.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch's stub forgets them
from torch.distributed.rendezvous import rendezvous

from bench.conditions import Question, git_state, machine, needed, versions
from bench.errors import AgreedError, ExitCode, UsageError
from bench.modes import Place
from bench.modes.base import pin
from bench.settings import Settings

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""The watchdog ends what hangs, and knows what it was; a collective's own limit must not come before it."""

MEETING_LIMIT_S = 600.0
"""A rank gives up waiting for the others then: allocations and slow file systems can take minutes."""

POLL_S = 0.02
"""Between two looks at the store, in seconds."""


class PeerLostError(RuntimeError):
    """Another rank has gone; its own end tells why."""


def meet() -> None:
    """Join the other ranks, once. Raises UsageError for a port that is taken or ranks that do not come."""
    if dist.is_initialized():
        return
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    late = threading.Timer(MEETING_LIMIT_S, _nobody_came, (where,))
    late.daemon = True
    late.start()
    try:
        store, rank, world_size = next(rendezvous("env://"))
        own = PrefixStore(_agreed_prefix(store, rank, world_size), store)
        dist.init_process_group(
            "gloo", store=own, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise UsageError(f"{where} is already in use; choose another port with MASTER_PORT") from None
        first = str(error).strip().splitlines()[0]
        raise UsageError(
            f"the ranks cannot meet at {where}: {first}; check MASTER_ADDR and the network"
        ) from None
    finally:
        late.cancel()


def _agreed_prefix(store: Store, rank: int, world_size: int) -> str:
    """A name that only the ranks of this attempt know.

    torchrun keeps one store through its restarts, and gloo would find the addresses of ranks that died there.
    """
    me = uuid.uuid4().hex
    store.set(f"bench/here{rank}", me)
    if rank != 0:
        while True:
            prefix, *known = _read(store, "bench/all").split()
            if known[rank : rank + 1] == [me]:
                store.set(f"{prefix}/{rank}", "seen")
                return prefix
            time.sleep(POLL_S)
    waiting = set(range(1, world_size))
    while waiting:
        store.set("bench/all", " ".join([me, *(_read(store, f"bench/here{r}") for r in range(world_size))]))
        time.sleep(POLL_S)
        waiting = {r for r in waiting if not store.check([f"{me}/{r}"])}
    return me


def _read(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else "-"


def _nobody_came(where: str) -> None:
    print(f"bench.run: error: not all ranks came to {where} within {MEETING_LIMIT_S:g} s", file=sys.stderr)
    sys.stderr.flush()
    os._exit(ExitCode.USAGE)


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error


def from_first(value: T | None) -> T:
    """Rank 0's `value`, on every rank."""
    box: list[Any] = [value]
    with _peers():
        dist.broadcast_object_list(box, src=0)
    result: T = box[0]
    return result


def host_name() -> str:
    """This host's name; BENCH_HOST overrides it where several hosts share one machine."""
    return os.environ.get("BENCH_HOST") or socket.gethostname()


@dataclass(frozen=True)
class RankInfo:
    """What the manifest says of a rank."""

    rank: int
    host: str
    local_rank: int
    device: str
    device_name: str
    link: str | None
    pid: int = 0


class Cluster:
    """This rank and its peers. Made once per process, after the launcher has set the environment."""

    def __init__(self, device_type: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        cores = allowed_cores()
        if device_type == "cuda":
            device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            pin(cores[self.local_rank % len(cores)])
        self.place = Place(rank=self.rank, local_rank=self.local_rank, device=device, cores=cores)
        meet()
        self._groups: dict[tuple[int, str], dist.ProcessGroup | None] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank conducts the run and writes its results."""
        return self.rank == 0

    def group(self, num_ranks: int, backend: str) -> dist.ProcessGroup | None:
        """The subgroup of the first `num_ranks` ranks; every rank of the job calls this together."""
        key = (num_ranks, backend)
        if key not in self._groups:
            made = dist.new_group(list(range(num_ranks)), backend=backend, timeout=COLLECTIVE_TIMEOUT)
            self._groups[key] = made if isinstance(made, dist.ProcessGroup) else None
        return self._groups[key]

    def barrier(self) -> None:
        """Wait for every rank, asleep."""
        with _peers():
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        with _peers():
            dist.all_gather_object(values, value)
        return values

    def from_first(self, value: T | None) -> T:
        """Rank 0's `value`, on every rank."""
        return from_first(value)

    def info(self) -> RankInfo:
        """This rank, for the manifest."""
        device = self.place.device
        return RankInfo(
            rank=self.rank,
            host=host_name(),
            local_rank=self.local_rank,
            device=str(device) if device.type == "cuda" else f"core {min(allowed_cores())}",
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU core",
            link=os.environ.get("BENCH_LINK"),
            pid=os.getpid(),
        )

    def close(self) -> None:
        """Leave the process groups."""
        dist.destroy_process_group()


def allowed_cores() -> tuple[int, ...]:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def described_host(host: str, settings: Settings, *, device: str, num_local_ranks: int) -> dict[str, Any]:
    """This host as a manifest describes a run, with what its ranks train on."""
    return {
        "environment": machine(host),
        "versions": versions(),
        "git": git_state(),
        "settings": settings.stored(),
        "device": device,
        "num_ranks": num_local_ranks,
    }


def check_alike(found: Sequence[Mapping[str, Any] | None]) -> None:
    """Raise AgreedError with every difference between hosts; None are ranks that speak for no host."""
    hosts = {str(one["environment"]["host"]): needed(one, Question.HOSTS) for one in found if one is not None}
    differences = []
    for name in dict.fromkeys(name for told in hosts.values() for name in told):
        values: dict[str, list[str]] = {}
        for host, told in hosts.items():
            values.setdefault(told.get(name, "none"), []).append(host)
        if len(values) > 1:
            differences.append(", ".join(f"{_named(h)}: {name} {value}" for value, h in values.items()))
    if differences:
        raise AgreedError(f"the hosts differ: {'; '.join(differences)}; make them alike or leave some out")


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
