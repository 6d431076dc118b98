"""The GPUs that ranks see, by the UUIDs that torch tells, and the machine they are in."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from ddp_bench.bench.cluster.process import host_name
from ddp_bench.bench.gpus import gpus, pairs
from ddp_bench.bench.machine import machine
from ddp_bench.bench.manifest import FirstHost
from ddp_bench.bench.worker.messages import SeenGpus


def num_gpus() -> int:
    """How many GPUs this process can use; makes no CUDA context."""
    torch.cuda.init()  # before that, torch asks NVML, and counts GPUs of which CUDA takes one MIG slice
    return torch.cuda.device_count()


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a rank by its place on its host; where GPUs are too few, ranks share them."""
    return torch.device("cuda", local_rank % num_gpus())


def gpu_uuid(index: int) -> str:
    """The UUID of a GPU by CUDA's index, as NVML writes it; makes no CUDA context."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def seen_gpus(local_rank: int) -> SeenGpus:
    """The GPUs that this process sees."""
    uuids = tuple(gpu_uuid(index) for index in range(num_gpus()))
    return SeenGpus(host=host_name(), local_rank=local_rank, uuids=uuids, facts=tuple(gpus(uuids)))


def this_machine(seen: Sequence[SeenGpus]) -> FirstHost:
    """This machine as a manifest describes it, with the GPUs that its ranks among `seen` see, each once."""
    here = [one for one in seen if one.host == host_name()]
    known = {uuid: facts for one in here for uuid, facts in zip(one.uuids, one.facts, strict=False)}
    joined = tuple(pairs(list(known)))
    return msgspec.structs.replace(machine(host_name()), gpus=tuple(known.values()), gpu_pairs=joined)
