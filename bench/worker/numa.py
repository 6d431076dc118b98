"""Binds a rank to the CPU cores next to its GPU: those of the GPU's NUMA node.

PyTorch's own binding (torch.numa) reaches a rank through numactl, which need not be there, at the command
that its agent starts: a proxy here, of whose affinity a forked rank has nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from ddp_bench.bench import sysfs


def near_cores(device: torch.device, root: Path = Path("/")) -> frozenset[int]:
    """The cores of a GPU's NUMA node, as the kernel lists them: all where the firmware does not say.

    Empty where it lists none.
    """
    gpu: Any = torch.cuda.get_device_properties(device)
    slot = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    listed = sysfs.text(root / "sys/bus/pci/devices" / slot / "local_cpulist")
    return sysfs.cores_in(listed or "") or frozenset()


def is_narrowed(allowed: Iterable[int], root: Path = Path("/")) -> bool:
    """Whether somebody has kept this process from some of the machine's cores."""
    online = sysfs.cores_in(sysfs.text(root / "sys/devices/system/cpu/online") or "") or frozenset()
    return not online.issubset(allowed)


def bind(cores: frozenset[int], allowed: Iterable[int]) -> str:
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
    return sysfs.ranges(chosen)
