"""The ranks of a job: who I am, and the small collectives that conduct the run.

The default process group is gloo and carries control only: a rank waiting in it sleeps, so its device
stays idle. Gradients go through subgroups of the case's own backend.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bench.modes import Place

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""After this a collective whose peer is gone fails instead of waiting on."""


def is_rank() -> bool:
    """Whether this process was started by PyTorch's elastic launcher (bench.run itself, or torchrun)."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


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


class Cluster:
    """This rank and its peers. Made once per process, after the launcher has set the environment."""

    def __init__(self, device_type: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        cores = _allowed_cores()
        if device_type == "cuda":
            device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(1)
            _pin(cores[self.local_rank % len(cores)])
        self.place = Place(rank=self.rank, local_rank=self.local_rank, device=device, cores=cores)
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
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
        dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: T | None) -> T:
        """Rank 0's `value`, on every rank."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        result: T = box[0]
        return result

    def info(self) -> RankInfo:
        """This rank, for the manifest."""
        device = self.place.device
        return RankInfo(
            rank=self.rank,
            host=host_name(),
            local_rank=self.local_rank,
            device=str(device) if device.type == "cuda" else f"core {min(_allowed_cores())}",
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU core",
            link=os.environ.get("BENCH_LINK"),
        )

    def close(self) -> None:
        """Leave the process groups."""
        dist.destroy_process_group()


def _allowed_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
