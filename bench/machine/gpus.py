"""Reads the GPUs that a process may use, how they are joined, and what holds them back, through NVML.

CUDA, NVML and the files in /dev number GPUs each in an order of its own: a UUID names the same one to all.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import pynvml

from .manifest import Gpu, GpuPair


class ClockReason(StrEnum):
    """Why a GPU's clocks are not at their maximum: the bits of "nvmlClocksEventReasons" in nvml.h, from 1 up.

    Their names in the binding have changed, the bits have not.
    """

    IDLE = "idle"
    APPLICATION = "application clocks"
    POWER_CAP = "power cap"
    HARDWARE = "hardware slow-down"
    SYNC_BOOST = "sync boost"
    SOFTWARE_HEAT = "software thermal slow-down"
    HARDWARE_HEAT = "hardware thermal slow-down"
    POWER_BRAKE = "power brake"
    DISPLAY = "display clocks"


FAULTS = frozenset(
    (ClockReason.HARDWARE, ClockReason.SOFTWARE_HEAT, ClockReason.HARDWARE_HEAT, ClockReason.POWER_BRAKE)
)
"""Reasons that NVML documents as heat or power delivery, not choice ("nvmlClocksEventReasons")."""

THROTTLING = FAULTS | {ClockReason.POWER_CAP}
"""Reasons that heat and power bring about under load: neither idle nor set by someone."""

MPS_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's default
"""Folder of the MPS server, whose clients share a GPU that takes a single process."""

SHARES_GPUS = (2, 30)
"""The version of NCCL from which several of its ranks may have one GPU, by NCCL_MULTI_RANK_GPU_ENABLE."""


def read_clock_reasons(handle: Any) -> frozenset[ClockReason] | None:
    """Return the reasons that hold down the clocks of a GPU now; None where it does not say."""
    bits = ask_nvml(
        "nvmlDeviceGetCurrentClocksEventReasons|nvmlDeviceGetCurrentClocksThrottleReasons", handle
    )
    if bits is None:
        return None
    return frozenset(why for place, why in enumerate(ClockReason) if bits >> place & 1)


def describe_gpus(uuids: Sequence[str] | None = None) -> list[Gpu]:
    """Describe GPUs for a manifest, as `open_gpus` finds them."""
    with open_gpus(uuids) as found:
        return [Gpu() if handle is None else _describe_gpu(handle) for handle in found]


def describe_pairs(uuids: Sequence[str]) -> list[GpuPair]:
    """Describe the paths between each two of these GPUs, by their places; empty without a driver."""
    with open_gpus(uuids) as found:
        known = [(place, handle) for place, handle in enumerate(found) if handle is not None]
        return [describe_pair(i, j, a, b) for (i, a), (j, b) in itertools.combinations(known, 2)]


def describe_pair(first: int, second: int, a: Any, b: Any) -> GpuPair:
    """Describe the path between the GPUs with these handles; of GPUs that MIG splits nothing is known."""
    if is_mig(a) or is_mig(b):
        return GpuPair(first=first, second=second)
    # pynvml's ..._INDEX_READ is a tuple by a stray comma; NCCL asks for writing as well.
    peer = ask_nvml("nvmlDeviceGetP2PStatus", a, b, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
    nvlink = ask_nvml("nvmlDeviceGetP2PStatus", a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return GpuPair(
        first=first,
        second=second,
        nvlink=None if nvlink is None else nvlink == pynvml.NVML_P2P_STATUS_OK,
        peer_access=None if peer is None else peer == pynvml.NVML_P2P_STATUS_OK,
    )


def find_visible_gpus(setting: str | None, names: Sequence[Sequence[str]]) -> list[int]:
    """Find the GPUs that CUDA_VISIBLE_DEVICES leaves, by their places in `names`.

    `names` are the UUIDs of every GPU, its own and those of its MIG slices, in NVML's order: CUDA shares it
    for equal GPUs. The setting lists indices or beginnings of UUIDs, ended by the first that is not there
    (CUDA programming guide). Where it names slices that NVML does not, all GPUs are taken.
    """
    if setting is None:
        return list(range(len(names)))
    chosen: list[int] = []
    for word in (part.strip() for part in setting.split(",")):
        is_name = word.startswith(("GPU-", "MIG-"))
        match = [
            i
            for i, own in enumerate(names)
            if str(i) == word or (is_name and any(name.startswith(word) for name in own))
        ]
        if len(match) != 1:
            break
        chosen += match
    if not chosen and setting.strip().startswith("MIG-"):
        return list(range(len(names)))
    return sorted(set(chosen))


def is_mig(handle: Any) -> bool | None:
    """Tell whether a GPU is split by MIG; None where it cannot be."""
    mode = ask_nvml("nvmlDeviceGetMigMode", handle)
    return None if mode is None else bool(mode[0])


def has_mps() -> bool:
    """Return whether an MPS server runs, which has the GPUs for all its clients."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPES).exists()


def is_exclusive(uuids: Sequence[str]) -> bool:
    """Tell whether one of the GPUs with these UUIDs takes a single process, and no MPS server shares it."""
    with open_gpus(uuids) as found:
        modes = [ask_nvml("nvmlDeviceGetComputeMode", one) for one in found if one is not None]
    return pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS in modes and not has_mps()


def list_uuids(handle: Any) -> list[str]:
    """List the UUIDs of a GPU: its own, then those of its MIG slices."""
    slots = range(ask_nvml("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    slices = [ask_nvml("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in slots]
    found = [ask_nvml("nvmlDeviceGetUUID", one) for one in (handle, *slices) if one is not None]
    return [name for name in found if name]


def find_by_uuid(uuids: Sequence[str], handles: Sequence[Any]) -> list[Any]:
    """Find the GPUs with these UUIDs, or whose MIG slices have them: torch does not say which it is."""
    by_digits = {name[4:]: handle for handle in handles for name in list_uuids(handle)}
    return [by_digits.get(uuid[4:]) for uuid in uuids]


def _describe_gpu(handle: Any) -> Gpu:
    mig = is_mig(handle)
    name, memory = ask_nvml("nvmlDeviceGetName", handle), ask_nvml("nvmlDeviceGetMemoryInfo", handle)
    limit_mw = ask_nvml("nvmlDeviceGetEnforcedPowerLimit", handle)
    return Gpu(
        uuid=ask_nvml("nvmlDeviceGetUUID", handle),
        name=f"{name} MIG" if mig and name else name,
        driver=ask_nvml("nvmlSystemGetDriverVersion"),
        memory_mib=None if memory is None or mig else int(memory.total) // 2**20,
        power_limit_w=None if limit_mw is None else int(limit_mw) / 1000,
    )


@contextlib.contextmanager
def open_gpus(uuids: Sequence[str] | None) -> Iterator[list[Any]]:
    """Open NVML and yield the GPUs with these UUIDs, in their order: a handle, or None, for each.

    Without UUIDs they are those that CUDA_VISIBLE_DEVICES leaves: none without a driver.
    """
    with contextlib.ExitStack() as opened:
        handles: list[Any] = []
        with contextlib.suppress(pynvml.NVMLError):
            handles = opened.enter_context(open_nvml())
        if uuids is None:
            names = [list_uuids(handle) for handle in handles]
            yield [handles[i] for i in find_visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), names)]
        else:
            yield find_by_uuid(uuids, handles)


@contextlib.contextmanager
def open_nvml() -> Iterator[list[Any]]:
    """Open NVML and yield a handle of every GPU; raises NVMLError, also where there is no driver.

    NVML counts GPUs that a cgroup keeps from this process, as Slurm does, and those that fell off the bus,
    too; CUDA does not, nor do we.
    """
    pynvml.nvmlInit()
    try:
        yield list(_yield_handles())
    finally:
        ask_nvml("nvmlShutdown")


def _yield_handles() -> Iterator[Any]:
    """Every GPU that NVML opens. Raises NVMLError where it opens none, unless it is not permitted to."""
    found, broken = 0, None
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            yield pynvml.nvmlDeviceGetHandleByIndex(index)
            found += 1
        except pynvml.NVMLError as error:
            broken = broken if error.value == pynvml.NVML_ERROR_NO_PERMISSION else error
    if broken is not None and not found:
        raise broken


def ask_nvml(names: str, *arguments: Any) -> Any:
    """Return the first answer of these functions (`new|old`); None where this GPU has none."""
    for name in names.split("|"):
        try:
            return getattr(pynvml, name)(*arguments)
        except (pynvml.NVMLError, AttributeError, ctypes.ArgumentError, OSError, ValueError):
            continue
    return None
