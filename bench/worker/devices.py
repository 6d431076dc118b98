"""The GPUs that ranks see, by the UUIDs that torch tells, the cores next to them, and their machine.

PyTorch's own binding to cores (torch.numa) reaches a rank through numactl, which need not be there, at the
command that its agent starts: a proxy here, of whose affinity a forked rank has nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # the stub lacks them

from ..common.process import end_with, get_allowed_cores, get_host_name, make_package_command
from ..machine.conditions import NCCL_VARIABLES, Question, select_required
from ..machine.gpus import SHARES_GPUS, describe_gpus, describe_pairs, is_exclusive
from ..machine.host import describe_machine, find_backend, format_ranges, get_versions, parse_cores, read_text
from ..machine.load import BOOT_ID
from ..machine.manifest import FirstHost, Manifest, RankPlace
from ..machine.provenance import describe_package_commit
from ..measure.telemetry import Telemetry
from ..modes import Place
from ..modes.base import list_gpus, pin_thread
from ..plan.case import Case
from ..plan.resolve import GpuKind
from ..plan.settings import NCCL_BACKENDS, ResolvedSettings
from .facts import Devices, Gpus
from .messages import AskNccl, Begin


def count_gpus() -> int:
    """Count the GPUs that this process can use; makes no CUDA context."""
    torch.cuda.init()  # before that, torch asks NVML, and counts GPUs of which CUDA takes one MIG slice
    return torch.cuda.device_count()


def read_nccl_version() -> tuple[int | str, ...]:
    """Return NCCL's version as torch tells it, empty where torch was built without NCCL."""
    try:
        found: tuple[int | str, ...] = torch.cuda.nccl.version()
    except AttributeError:
        return ()
    return found


def choose_gpu(local_rank: int) -> torch.device:
    """Choose the GPU of a rank by its place on its host; where GPUs are too few, ranks share them."""
    return torch.device("cuda", local_rank % count_gpus())


def make_sharing_variables(rank: int, num_ranks: int) -> dict[str, str]:
    """Return the variables that NCCL needs so that ranks share a GPU, by the installed version.

    From 2.30 it has a setting for that, made for two ranks; more of them need few blocks each. An older
    one refuses a GPU that it knows twice, but not of different hosts: these talk through sockets.
    """
    if read_nccl_version() < SHARES_GPUS:
        return {"NCCL_HOSTID": f"ddp-bench-rank-{rank}"}
    more = {"NCCL_MAX_CTAS": "4"} if num_ranks > 2 * count_gpus() else {}
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"} | more


def read_gpu_uuid(index: int) -> str:
    """Read the UUID of a GPU by CUDA's index, as NVML writes it; makes no CUDA context."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def list_seen_gpus() -> Gpus:
    """List the GPUs that this process sees."""
    uuids = [read_gpu_uuid(index) for index in range(count_gpus())]
    return dict(zip(uuids, describe_gpus(uuids), strict=True))


def find_devices(device: str, local_rank: int) -> Devices:
    """Find the devices that this process can train on; no GPUs where `device` is `cpu`."""
    by_core = list_device_cores(get_allowed_cores())
    here = Devices(
        cores=tuple(by_core),
        physical=tuple(by_core.values()),
        local_rank=local_rank,
        host=get_host_name(),
        boot_id=read_text(BOOT_ID) or "",
    )
    if device == "cpu" or not torch.cuda.is_available():
        return here
    gpus = list_seen_gpus()
    found = [torch.cuda.get_device_properties(index) for index in range(len(gpus))]
    return msgspec.structs.replace(
        here,
        gpus=gpus,
        kind=GpuKind(
            capability=min((one.major, one.minor) for one in found),
            memory_gib=min(one.total_memory for one in found) / 2**30,
        ),
        is_exclusive=is_exclusive([*gpus]),
        nccl=read_nccl_version(),
        nccl_backends=tuple(name for name in NCCL_BACKENDS if find_backend(name) is not None),
    )


def describe_this_machine(seen: Gpus) -> FirstHost:
    """Describe this machine as a manifest does, with the GPUs that its ranks have `seen`."""
    gpus, pairs = tuple(seen.values()), tuple(describe_pairs([*seen]))
    return msgspec.structs.replace(describe_machine(get_host_name()), gpus=gpus, gpu_pairs=pairs)


def read_near_cores(device: torch.device, root: Path = Path("/")) -> frozenset[int]:
    """Read the cores of a GPU's NUMA node, as the kernel lists them: all where the firmware does not say.

    Empty where it lists none.
    """
    gpu: Any = torch.cuda.get_device_properties(device)
    slot = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    listed = read_text(root / "sys/bus/pci/devices" / slot / "local_cpulist")
    return parse_cores(listed or "") or frozenset()


def list_device_cores(allowed: Iterable[int], root: Path = Path("/")) -> dict[int, int]:
    """Order cores as devices, one hardware thread of each physical core first; each with its physical core.

    A physical core counts as its first hardware thread.
    """
    threads: dict[int, list[int]] = {}
    for core in sorted(allowed):
        listed = read_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        threads.setdefault(min(parse_cores(listed or "") or {core}), []).append(core)
    rows = itertools.zip_longest(*threads.values())
    return {c: first for row in rows for first, c in zip(threads, row, strict=True) if c is not None}


def is_narrowed(allowed: Iterable[int], root: Path = Path("/")) -> bool:
    """Tell whether somebody has kept this process from some of the machine's cores."""
    online = parse_cores(read_text(root / "sys/devices/system/cpu/online") or "") or frozenset()
    return not online.issubset(allowed)


def bind_cores(cores: frozenset[int], allowed: Iterable[int]) -> str:
    """Keep this process on those of `cores` that are `allowed`; them as text, empty where nothing changes."""
    chosen = cores.intersection(allowed)
    if not chosen or chosen == set(allowed) or not hasattr(os, "sched_setaffinity"):
        return ""
    try:
        os.sched_setaffinity(0, chosen)
    except OSError:
        return ""  # a sandbox may forbid it
    for thread in psutil.Process().threads():  # those of CUDA's driver and of gloo are there already
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread.id, chosen)
    return format_ranges(chosen)


def take_place(asked: Begin, number: int, local_rank: int) -> tuple[Place, str]:
    """Choose the device and the cores of a rank, bound next to its GPU if asked; and those it is bound to."""
    settings, is_launched, bound = asked.settings, not asked.port, ""
    is_gpu = settings.device == "cuda"
    if is_gpu and settings.share_gpus:
        for name, value in make_sharing_variables(number, asked.local_world_size).items():
            os.environ.setdefault(name, value)
    device = choose_gpu(local_rank) if is_gpu else torch.device("cpu")
    # Where a launcher has chosen cores, they stay.
    if is_gpu and settings.numa_bind and not (is_launched and is_narrowed(get_allowed_cores())):
        bound = bind_cores(read_near_cores(device), get_allowed_cores())
    cores = tuple(list_device_cores(get_allowed_cores()))
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        pin_thread(cores[local_rank % len(cores)])
    return Place(rank=number, device=device, cores=cores), bound


def start_sampling(settings: ResolvedSettings, cases: Iterable[Case], place: Place) -> Telemetry | None:
    """Start to sample the GPUs that this rank uses in `cases`; None without one, or where it is off."""
    if place.device.type != "cuda" or not settings.telemetry:
        return None
    mine = [case for case in cases if place.rank < case.num_ranks]
    devices = sorted({index for case in mine for index in list_gpus(case, place)})
    return Telemetry({index: read_gpu_uuid(index) for index in devices})


def describe_rank(place: Place, local_rank: int, bound_cores: str) -> RankPlace:
    """Describe a rank for the manifest."""
    device = place.device
    is_gpu = device.type == "cuda"
    return RankPlace(
        rank=place.rank,
        host=get_host_name(),
        local_rank=local_rank,
        device=str(device) if is_gpu else f"core {min(get_allowed_cores())}",
        device_name=torch.cuda.get_device_name(device) if is_gpu else "CPU core",
        link=os.environ.get("BENCH_LINK"),
        gpu=read_gpu_uuid(device.index) if is_gpu else None,
        bound_cores=bound_cores,
    )


def describe_rank_host(asked: Begin, place: RankPlace) -> tuple[FirstHost, dict[str, str]]:
    """Describe the host of a rank, and what has to be the same of hosts that train together."""
    settings = asked.settings
    own = list_seen_gpus() if settings.device == "cuda" else {}
    machine = describe_this_machine(asked.gpus or own)
    whole = Manifest(
        environment=machine, versions=get_versions(), git=describe_package_commit(), settings=settings
    )
    return machine, select_required(whole, Question.HOSTS) | {"device": place.device_name}


NCCL_TIMEOUT_S = 60.0
"""Torch is imported and communicators are set up in less, or there is no answer."""


def read_nccl_log(asked: AskNccl, device: torch.device) -> str:
    """Return NCCL's log of a rank in a short job, on `device`; empty where the job failed.

    The job has a process of its own: the log slows what is timed. Those of all ranks meet in the run's store.
    """
    own = {**os.environ, **NCCL_VARIABLES}
    own.pop("NCCL_DEBUG_FILE", None)  # its log goes to standard output otherwise
    how = (asked.name, str(asked.num_ranks), str(device), asked.backend, *map(str, asked.sizes))
    job = make_package_command("-m", __name__, *how)
    try:
        done = subprocess.run(
            job,
            env=own,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=NCCL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def send_messages(name: str, num_ranks: str, device: str, backend: str, *sizes: str) -> None:
    """Be a rank of that job: send a message of each size once."""
    end_with(os.getppid())
    where = torch.device(device)
    limit = timedelta(seconds=NCCL_TIMEOUT_S)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(name, TCPStore(address, port, is_master=False, timeout=limit))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend, store=store, rank=int(os.environ["RANK"]), world_size=int(num_ranks), timeout=limit
    )
    for size in sizes:
        dist.all_reduce(torch.zeros(int(size) // 4, device=where))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # past the destructors, which may wait for ranks that have gone


if __name__ == "__main__":
    send_messages(*sys.argv[1:])
