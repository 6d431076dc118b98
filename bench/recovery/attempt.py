"""One rank's attempt at a piece of work: its result, or its error and what follows from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.cluster.messages import may_be_sent
from bench.errors import UsageError
from bench.measure.timed import BlockTimes, NonFiniteLossError
from bench.modes import Unsupported

NO_GROUP = -1
"""Stands for the number of collectives on a rank outside the case's process group; no count is negative."""

LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting"),
    "ncclRemoteError",
)
"""Words of gloo's and NCCL's errors on ranks whose peer has died; that peer has the reason."""

HOST_MEMORY = re.compile(r"DefaultCPUAllocator: |[Cc]an(no|')t allocate memory|std::bad_alloc")
"""Errors of PyTorch's CPU allocator, of the system and of C++ where they find no memory."""

GPU_MEMORY = re.compile(
    r"out of memory|_ALLOC(ATION)?_FAILED|Failed to CUDA (host )?[mc]?alloc", re.IGNORECASE
)
"""Errors of PyTorch's CUDA allocator, the driver, cuBLAS, cuDNN and NCCL, by the texts in their libraries."""

BROKEN_GROUP = re.compile(r"NCCL error|nccl[A-Z]\w*Error|/gloo/")
"""A communicator that has failed once fails from then on; gloo names the file that raised."""

BROKEN_CONTEXT = re.compile(r"(CUDA|HIP)( driver)? error")
"""After an illegal access or a device-side assert, every later call to the device fails in this process."""

TOO_LARGE = "use a smaller --batch-size or smaller inputs"


@dataclass(frozen=True)
class Report:
    """What one rank says after its work: its result, or what went wrong."""

    status: str = "ok"
    reason: str = ""
    value: Any = None
    restart: bool = False
    """Whether this process can measure no further: its device or its communicator is broken."""
    launched: int | None = NO_GROUP
    """Collectives that it has launched on the case's process group so far; None where it cannot be told."""


may_be_sent(Report, BlockTimes)


def attempt(work: Callable[[], Any] | None) -> Report:
    """Run `work`, turning what can go wrong with one case into a report about it."""
    try:
        return Report(value=work() if work else None)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a model raises fails its case alone
        return report_of(error)


def report_of(error: BaseException) -> Report:
    """What an error means for its case, and for the process that raised it."""
    text, broken = str(error), is_broken_by(error)
    if isinstance(error, Unsupported):
        return Report("skipped", text)
    if isinstance(error, NonFiniteLossError):
        return Report("failed", text)
    if isinstance(error, MemoryError) or HOST_MEMORY.search(text):
        return Report("oom", f"out of host memory; {TOO_LARGE}", restart=broken)
    if is_out_of_gpu_memory(error):
        return Report("oom", f"out of GPU memory; {TOO_LARGE}", restart=broken)
    return Report("failed", _first_line(error), restart=broken)


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Whether it says that a GPU, or the host memory that its driver locks, is full."""
    return isinstance(error, torch.OutOfMemoryError) or bool(GPU_MEMORY.search(str(error)))


def is_broken_by(error: BaseException) -> bool:
    """Whether the process that raised it can use its device, or its process group, no more."""
    text = str(error)
    if isinstance(error, dist.DistError) or BROKEN_GROUP.search(text):
        return True
    is_of_device = isinstance(error, torch.AcceleratorError) or bool(BROKEN_CONTEXT.search(text))
    return is_of_device and not is_out_of_gpu_memory(error)


def _first_line(error: BaseException) -> str:
    """`Type: message`, where the message has something to say."""
    name, text = type(error).__name__, str(error).strip()
    if text.startswith("Caught "):
        # Raised in a replica's thread or a loader's process: torch puts its traceback before it.
        text = text.rpartition(f"{name}: ")[2]
    first = (text.splitlines() or [""])[0]
    return f"{name}: {first}" if first else name
