"""Memory of a case: what it takes on each device, and what is given back once it is gone.

torch's allocator keeps what tensors free for the process that freed it: reserved memory. So a process that
has trained one case holds memory that another process on the same GPU may need for the next.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from ..results.block_times import DeviceMemory


class MemoryWatch:
    """The rise of memory above what is in use now, which belongs to other cases.

    What is reserved and not in use is given back first: a case that finds it there would not reserve its own.
    """

    def __init__(self, devices: Sequence[torch.device], beside: Sequence[torch.Tensor] = ()) -> None:
        """Begin; `beside` is there already, on the first device, and counts to the case too."""
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        if self._gpus:
            torch.cuda.empty_cache()
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        found = [(torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu)) for gpu in self._gpus]
        there = sum(one.nbytes for one in beside if one.is_cuda)
        self._before = [(found[0][0] - there, found[0][1] - there), *found[1:]] if found else []

    def measure_rise(self) -> tuple[DeviceMemory, ...]:
        """Return the largest rise of each GPU's memory; none on CPU cores, where torch does not count."""
        found = []
        for gpu, (allocated, reserved) in zip(self._gpus, self._before, strict=True):
            peak = torch.cuda.max_memory_allocated(gpu) - allocated
            # Tensors in the gaps of other cases reserved nothing; alone the case would have to.
            held = max(torch.cuda.max_memory_reserved(gpu) - reserved, peak)
            found.append(DeviceMemory(peak / 2**20, held / 2**20))
        return tuple(found)


def count_device_allocs(gpus: Sequence[int]) -> int:
    """Count how often torch's allocator has asked the driver for memory of these GPUs.

    Each time it waited for them. Its counters are read on the host: reading waits for nothing.
    """
    return sum(torch.cuda.memory_stats(gpu).get("num_device_alloc", 0) for gpu in gpus)


def release_memory(device: torch.device) -> None:
    """Give back the memory of cases that are gone, on every GPU that this process has used.

    Cycles are collected first: a model whose parts know each other holds its tensors until then. Not within a
    block: the next step has to ask the driver for memory anew.
    """
    if device.type != "cuda":
        return
    gc.collect()
    release_cache(device)


def release_cache(device: torch.device) -> None:
    """Give back what no tensor uses, for another process on the same GPU; a few ms, not within a block."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
