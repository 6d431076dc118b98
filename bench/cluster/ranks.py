"""The ranks of a job: who I am, and the small collectives that conduct the run.

The default process group is gloo and carries control only: a rank waiting in it sleeps, so its device
stays idle. Gradients go through subgroups of the case's own backend.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_bench.bench.cluster.devices import SeenGpus, gpu_of, gpu_uuid, seen_gpus
from ddp_bench.bench.cluster.meeting import COLLECTIVE_TIMEOUT, host_name, meet
from ddp_bench.bench.cluster.messages import decode, encode, may_be_sent
from ddp_bench.bench.cluster.numa import bind, near_cores
from ddp_bench.bench.conditions import Question, needed
from ddp_bench.bench.errors import AgreedError, ExitCode, UsageError
from ddp_bench.bench.machine import versions
from ddp_bench.bench.manifest import FirstHost, Manifest, RankPlace
from ddp_bench.bench.modes import Place
from ddp_bench.bench.modes.base import pin
from ddp_bench.bench.provenance import own_git_state
from ddp_bench.bench.settings import Settings

T = TypeVar("T")

FIRST_BYTES = 2048
"""A report of a block is shorter and so takes one collective; what is longer takes a second one."""

_LENGTH_BYTES = 8


class PeerLostError(RuntimeError):
    """Another rank has gone; its own end tells why."""


_waits_for: list[str] = []
"""What the main thread waits for, for the watchdog's threads to read."""


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Within, this rank has done its part and waits: who is late is somebody else."""
    _waits_for.append(what)
    try:
        yield
    finally:
        _waits_for.pop()


def waits_for() -> str:
    """What this rank waits for; empty while it works."""
    return _waits_for[-1] if _waits_for else ""


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    try:
        with waiting_for("the other ranks"):
            yield
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error


def gather(value: T) -> list[T]:
    """Every rank's `value`, in rank order, on every rank. Values are as `messages.encode` takes them."""
    own = encode(value)
    found = _all_gather(own, FIRST_BYTES)
    longest = max(length for length, _ in found)
    if longest > FIRST_BYTES:
        found = _all_gather(own, longest)
    return [decode(message[:length]) for length, message in found]


def _all_gather(own: bytes, num_bytes: int) -> list[tuple[int, bytes]]:
    """Every rank's length, and its message cut off or padded to `num_bytes`."""
    padded = len(own).to_bytes(_LENGTH_BYTES) + own[:num_bytes].ljust(num_bytes, b"\0")
    sent = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    with _peers():
        dist.all_gather(received, sent)
    found = [tensor.numpy().tobytes() for tensor in received]
    return [(int.from_bytes(one[:_LENGTH_BYTES]), one[_LENGTH_BYTES:]) for one in found]


def from_first(value: T | None) -> T:
    """Rank 0's `value`, on every rank. Values are as `messages.encode` takes them."""
    is_source = dist.get_rank() == 0
    content = bytearray(encode(value)) if is_source else bytearray(1)
    message = torch.frombuffer(content, dtype=torch.uint8)
    length = torch.tensor([len(message)], device="cpu")  # a workload may set another default device
    with _peers():
        dist.broadcast(length, src=0)
        if not is_source:
            message = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        dist.broadcast(message, src=0)
    found: T = decode(message.numpy().tobytes())
    return found


def agreed(work: Callable[[], T]) -> T:
    """Do `work` on the first rank; its result, or its UsageError as an AgreedError, on every rank."""
    result: T | None = None
    refusal: tuple[str, int, str] | None = None
    if dist.get_rank() == 0:
        try:
            result = work()
        except UsageError as error:
            refusal = str(error), error.exit_code, error.label
    result, refusal = from_first((result, refusal))
    if refusal is not None:
        agreed_error = AgreedError(refusal[0])
        agreed_error.exit_code, agreed_error.label = ExitCode(refusal[1]), refusal[2]
        raise agreed_error
    return result  # type: ignore[return-value]  # None only where `work` returns it


@functools.cache
def gpus_by_rank(device_type: str) -> tuple[SeenGpus, ...]:
    """The GPUs that each rank sees, by rank; none on CPU cores. All ranks call it, once: there they meet."""
    if device_type != "cuda":
        return ()
    own = seen_gpus(int(os.environ["LOCAL_RANK"]))
    meet()
    return tuple(gather(own))


may_be_sent(RankPlace)


class Cluster:
    """This rank and its peers. Made once per process, after the launcher has set the environment."""

    def __init__(self, device_type: str, *, bind_cores: bool = False) -> None:
        """Take a device; `bind_cores` keeps a rank with a GPU on the CPU cores next to it."""
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self._bound_cores = ""
        device = gpu_of(self.local_rank) if device_type == "cuda" else torch.device("cpu")
        if device_type == "cuda" and bind_cores:
            self._bound_cores = bind(near_cores(device), allowed_cores())
        cores = allowed_cores()
        if device_type == "cuda":
            torch.cuda.set_device(device)
        else:
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
            try:
                made = dist.new_group(list(range(num_ranks)), backend=backend, timeout=COLLECTIVE_TIMEOUT)
            except RuntimeError as error:
                # Other ranks may have it and wait in it: no rank can use this process group, or another.
                raise dist.DistBackendError(str(error)) from error
            self._groups[key] = made if isinstance(made, dist.ProcessGroup) else None
        return self._groups[key]

    def barrier(self) -> None:
        """Wait for every rank, asleep."""
        with _peers():
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        return gather(value)

    def gather_to_first(self, told: T, more: Any) -> list[tuple[T, Any]]:
        """Every rank's `told`, on every rank, and its `more` on rank 0; None elsewhere. In rank order."""
        own = encode(more)
        found = gather((told, len(own)))
        longest = max(length for _, length in found)
        sent = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in found] if self.is_first else None
        with _peers():
            dist.gather(sent, received)
        if received is None:
            return [(one, None) for one, _ in found]
        pairs = zip(found, received, strict=True)
        return [(one, decode(tensor.numpy().tobytes()[:length])) for (one, length), tensor in pairs]

    def from_first(self, value: T | None) -> T:
        """Rank 0's `value`, on every rank."""
        return from_first(value)

    def info(self) -> RankPlace:
        """This rank, for the manifest."""
        device = self.place.device
        return RankPlace(
            rank=self.rank,
            host=host_name(),
            local_rank=self.local_rank,
            device=str(device) if device.type == "cuda" else f"core {min(allowed_cores())}",
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU core",
            link=os.environ.get("BENCH_LINK"),
            pid=os.getpid(),
            gpu=gpu_uuid(device.index) if device.type == "cuda" else None,
            bound_cores=self._bound_cores,
        )

    def close(self) -> None:
        """Leave the process groups."""
        dist.destroy_process_group()


def allowed_cores() -> tuple[int, ...]:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class HostHello:
    """What the first rank of a host says of it."""

    machine: FirstHost
    conditions: Mapping[str, str]
    """What has to be the same of hosts that train together, by name."""


may_be_sent(HostHello, FirstHost)


def described_host(machine: FirstHost, settings: Settings, *, device: str, num_local_ranks: int) -> HostHello:
    """This host, with what its ranks train on."""
    whole = Manifest(environment=machine, versions=versions(), git=own_git_state(), settings=settings)
    of_ranks = {"device": device, "ranks per host": str(num_local_ranks)}
    return HostHello(machine, needed(whole, Question.HOSTS) | of_ranks)


def check_alike(found: Sequence[HostHello | None]) -> None:
    """Raise AgreedError with every difference between hosts; None are ranks that speak for no host."""
    hosts = {str(one.machine.host): one.conditions for one in found if one is not None}
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
