"""Reads GPUs through NVML; what a GPU does not report (NVML_ERROR_NOT_SUPPORTED) stays None. Sets nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from ddp_bench.bench import sysfs
from ddp_bench.bench.clock_reasons import clock_reasons
from ddp_bench.bench.doctor.readings import Gpu, GpuProcess
from ddp_bench.bench.gpus import ask_nvml, is_mig, names_of, nvml_devices, pair, visible
from ddp_bench.bench.manifest import GpuPair


@dataclass(frozen=True, kw_only=True)
class Driver:
    """What the NVIDIA driver says; `gpus` is empty without a driver, None where it only answers an error."""

    gpus: tuple[Gpu, ...] | None = None
    num_present: int | None = None
    pairs: tuple[GpuPair, ...] | None = None
    error: str | None = None
    version: str | None = None
    cuda: str | None = None


def read_gpus(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Driver:
    """Read every GPU that CUDA_VISIBLE_DEVICES leaves, and how they are joined."""
    try:
        with nvml_devices() as handles:
            return _driver(handles, root, env.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError as error:
        absent = error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Driver(gpus=(), num_present=0) if absent else Driver(error=str(error))


def _driver(handles: Sequence[Any], root: Path, setting: str | None) -> Driver:
    chosen = visible(setting, [names_of(handle) for handle in handles])
    cuda = ask_nvml("nvmlSystemGetCudaDriverVersion_v2")
    return Driver(
        gpus=tuple(_gpu(index, handles[index], root) for index in chosen),
        num_present=len(handles),
        pairs=tuple(pair(a, b, handles[a], handles[b]) for a, b in itertools.combinations(chosen, 2)),
        version=ask_nvml("nvmlSystemGetDriverVersion"),
        # 13020 stands for 13.2: NVML, nvmlSystemGetCudaDriverVersion.
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    )


def _gpu(index: int, handle: Any, root: Path) -> Gpu:
    nv = pynvml
    # Version 1 of this reading counts what the driver keeps for itself as used.
    memory = ask_nvml("nvmlDeviceGetMemoryInfo", handle, nv.nvmlMemory_v2)
    rates = ask_nvml("nvmlDeviceGetUtilizationRates", handle)
    mode = ask_nvml("nvmlDeviceGetVirtualizationMode", handle)
    ecc = ask_nvml("nvmlDeviceGetEccMode", handle)
    remapped = ask_nvml("nvmlDeviceGetRemappedRows", handle)
    temperature = ask_nvml(
        "nvmlDeviceGetTemperatureV|nvmlDeviceGetTemperature", handle, nv.NVML_TEMPERATURE_GPU
    )
    limit_mw = ask_nvml("nvmlDeviceGetEnforcedPowerLimit", handle)
    default_mw = ask_nvml("nvmlDeviceGetPowerManagementDefaultLimit", handle)
    persistence = ask_nvml("nvmlDeviceGetPersistenceMode", handle)
    return Gpu(
        index=index,
        name=ask_nvml("nvmlDeviceGetName", handle),
        uuid=ask_nvml("nvmlDeviceGetUUID", handle),
        virtual=None if mode is None else mode == nv.NVML_GPU_VIRTUALIZATION_MODE_VGPU,
        mig=is_mig(handle),
        numa_node=_numa_node(handle, root),
        processes=_processes(handle),
        busy_pct=None if rates is None else int(rates.gpu),
        used_mib=None if memory is None else int(memory.used) // 2**20,
        total_mib=None if memory is None else int(memory.total) // 2**20,
        sm_clock_mhz=ask_nvml("nvmlDeviceGetClockInfo", handle, nv.NVML_CLOCK_SM),
        max_sm_clock_mhz=ask_nvml("nvmlDeviceGetMaxClockInfo", handle, nv.NVML_CLOCK_SM),
        clock_reasons=clock_reasons(handle),
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        default_power_limit_w=None if default_mw is None else default_mw / 1000,
        ecc=None if ecc is None else bool(ecc[0]),
        # Since the driver was loaded.
        uncorrected_errors=ask_nvml(
            "nvmlDeviceGetTotalEccErrors",
            handle,
            nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nv.NVML_VOLATILE_ECC,
        ),
        remap_failed=None if remapped is None else bool(remapped[3]),
        temperature_c=temperature,
        margin_c=_margin_c(handle, temperature),
        persistence=None if persistence is None else bool(persistence),
    )


def _margin_c(handle: Any, temperature_c: int | None) -> int | None:
    """Read the degrees to the nearest slow-down threshold; older drivers know the threshold instead."""
    margin: int | None = ask_nvml("nvmlDeviceGetMarginTemperature", handle)
    if margin is not None or temperature_c is None:
        return margin
    kind = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    threshold = ask_nvml("nvmlDeviceGetTemperatureThreshold", handle, kind)
    return threshold - temperature_c if threshold else None


def _processes(handle: Any) -> tuple[GpuProcess, ...] | None:
    """List processes other than this one that compute or draw."""
    lists = [
        ask_nvml("nvmlDeviceGetComputeRunningProcesses", handle),
        ask_nvml("nvmlDeviceGetGraphicsRunningProcesses", handle),
    ]
    if all(found is None for found in lists):
        return None
    used = {entry.pid: entry.usedGpuMemory for found in lists for entry in found or ()}
    used.pop(os.getpid(), None)
    return tuple(
        GpuProcess(pid=pid, used_mib=None if size is None else size // 2**20) for pid, size in used.items()
    )


def _numa_node(handle: Any, root: Path) -> int | None:
    """Find the NUMA node of the GPU's PCI slot; the kernel writes -1 where the firmware does not say."""
    pci = ask_nvml("nvmlDeviceGetPciInfo", handle)
    if pci is None:
        return None
    # NVML writes the PCI domain with eight digits, the kernel with four.
    node = sysfs.number(root / "sys/bus/pci/devices" / str(pci.busId).lower()[-12:] / "numa_node")
    return node if node is not None and node >= 0 else None
