"""What was asked for, resolved on this machine: validated settings, the workload, the plan."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ...models.registry import load_workload, resnet_workload
from ...models.step import has_fused_optimizer, takes_images
from ...models.workload import Workload
from .. import plan
from ..cli import command, speaker
from ..cluster.process import allowed_cores
from ..errors import UsageError
from ..findings.numbers import plural
from ..gpus import gpus
from ..plan import Machine
from ..resolve import GpuKind, default_image_size, with_device_defaults
from ..settings import ResolvedSettings, Settings
from .devices import SHARES_GPUS, num_gpus
from .messages import Launched, ResolvedJob, SeenGpus


def resolve_job(asked: Settings, launched: Launched | None = None) -> tuple[ResolvedJob, Workload]:
    """Resolve the device, the workload and the plan. Raises UsageError for what cannot run here.

    `launched` is what torchrun or srun has started. The workload is as its author made it.
    """
    device_type = _device_type(asked.device)
    num_devices = num_gpus() if device_type == "cuda" else len(allowed_cores())
    gpu = _gpu_kind() if device_type == "cuda" else None
    settings = with_device_defaults(asked, device_type=device_type, num_local_devices=num_devices, gpu=gpu)
    _check_precision(settings)
    workload = workload_of(settings)
    if settings.data not in ("device", "host"):
        from ...models.folder import check_folder  # torchvision takes seconds to import

        check_folder(Path(settings.data))
    machine = _machine(device_type, num_devices, launched)
    if settings.share_gpus:
        _check_sharing(settings, machine)
    num_devices = machine.devices_per_node
    if machine.num_nodes > 1:
        num_devices = max(num_devices, (machine.ranks_per_node or 0) * machine.num_nodes)
    settings = with_device_defaults(asked, device_type=device_type, num_local_devices=num_devices, gpu=gpu)
    settings = _as_the_workload_allows(asked, settings, workload)
    planned = plan.expand(
        settings,
        machine,
        arch=workload.name,
        image_size=workload.image_size,
        unit=workload.unit,
        units_per_sample=workload.units_per_sample,
    )
    if settings.race and not any(p.case.mode == "ddp" and p.case.num_devices > 1 for p in planned):
        raise UsageError("a race is one of DDP's settings on 2 devices or more; give --modes ddp --gpus 2")
    seen = () if launched is None else launched.seen
    return ResolvedJob(settings=settings, machine=machine, plan=tuple(planned), seen=seen), workload


def workload_of(settings: Settings) -> Workload:
    """Load the workload, a module of the user's or a built-in one. Raises UsageError."""
    arch = settings.arch or ""
    size = settings.image_size or default_image_size(arch, settings.device)
    if settings.workload is not None:
        return load_workload(settings.workload, size)
    return resnet_workload(arch, size)


def _device_type(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if wanted == "auto" and not available and (present := gpus()):
        print(
            f"{speaker()}: the driver shows {plural(len(present), 'GPU')}, torch finds no CUDA device: CPU "
            f"cores are measured; see {command('doctor')}, or say --device cpu",
            file=sys.stderr,
        )
    return "cuda" if available and wanted != "cpu" else "cpu"


def _machine(device_type: str, num_devices: int, launched: Launched | None) -> Machine:
    # Torch warns of NCCL's other backends there: their one communicator has peers wait for each other.
    lazy = "nccl-lazy" if hasattr(dist, "ProcessGroupNCCLLazy") else ""
    machine = Machine(device_type=device_type, devices_per_node=num_devices, staged_backend=lazy)
    if launched is None:
        return machine
    per_node = launched.ranks_per_node
    machine = dataclasses.replace(machine, ranks_per_node=per_node, num_nodes=launched.world_size // per_node)
    return as_seen(machine, launched.seen)


def as_seen(machine: Machine, seen: Sequence[SeenGpus]) -> Machine:
    """`machine` with the GPUs of the ranks that a launcher has started; each may see its own alone."""
    if not seen:
        return machine
    on_first_host = {uuid for one in seen if one.host == seen[0].host for uuid in one.uuids}
    return dataclasses.replace(
        machine,
        devices_per_node=len(on_first_host),
        devices_per_process=len(seen[0].uuids),
        rank_devices=tuple(one.own for one in seen),
    )


def _gpu_kind() -> GpuKind:
    """The least of the GPUs that are visible."""
    found = [torch.cuda.get_device_properties(index) for index in range(num_gpus())]
    return GpuKind(
        capability=min((one.major, one.minor) for one in found),
        memory_gib=min(one.total_memory for one in found) / 2**30,
    )


def _as_the_workload_allows(
    asked: Settings, settings: ResolvedSettings, workload: Workload
) -> ResolvedSettings:
    """Leave out defaults that this workload has no use for. Raises UsageError where it was asked for."""
    fused = settings.first("fused_optimizer") and has_fused_optimizer(workload)
    if asked.axes.get("fused_optimizer") == (True,) and not fused:
        raise UsageError("--fused-optimizer on: the workload's optimizer has no fused kernels; leave it off")
    channels_last = settings.first("channels_last") and (
        "channels_last" in asked.axes or takes_images(workload)
    )
    settings = dataclasses.replace(settings, image_size=workload.image_size)
    return settings.sweeping(fused_optimizer=(fused,), channels_last=(channels_last,))


def _check_sharing(settings: ResolvedSettings, machine: Machine) -> None:
    if machine.num_nodes > 1:
        raise UsageError("--share-gpus on is for one machine; leave it out on several")
    if settings.device != "cuda" or settings.backend != "nccl" or machine.devices_per_node == 1:
        return
    if (version := torch.cuda.nccl.version()) < SHARES_GPUS:
        # A host id of its own for each rank would make a real pair of GPUs talk through sockets too.
        raise UsageError(
            f"--share-gpus on: NCCL {'.'.join(map(str, version))} lets ranks share a GPU only where there is "
            "one; set CUDA_VISIBLE_DEVICES=0, or use a torch with NCCL 2.30"
        )


def _check_precision(settings: ResolvedSettings) -> None:
    if settings.device == "cpu" and settings.precision in ("tf32", "fp16"):
        raise UsageError(f"--precision {settings.precision} needs a CUDA device; use fp32 or bf16 on a CPU")
    if settings.precision == "fp16" and settings.first("fused_optimizer"):
        # _fused_sgd makes its momentum unset, and the kernel returns early where loss scaling overflows.
        raise UsageError(
            "--fused-optimizer on: under fp16 torch's fused SGD goes on from unset momentum after an "
            "overflow; leave it off, or use --precision bf16"
        )
    if settings.device == "cpu" and settings.backend == "nccl":
        raise UsageError("--backend nccl needs CUDA devices; use gloo on a CPU")
