"""Measurements of a case as a rank tells them and as blocks.csv holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

GPUS = "gpus"
"""Key in the detail of a timed block: readings of each GPU, by the beginning of its UUID."""

DEVICE_ALLOCS = "device_allocs"
"""Key in the detail of a block on GPUs: times that its timed steps asked their driver for memory."""

TELEMETRY_FAILED = "telemetry_failed"
"""Key in the detail of the block after which a rank's telemetry ended: the reason."""

TRACE_FAILED = "trace_failed"
"""Key in the detail of a block whose trace cannot be read: the reason."""


@dataclass(frozen=True)
class BlockTimes:
    """Durations of a block on one rank: whole, of each step, and what else its phase measured."""

    block_ms: float
    steps_ms: tuple[float, ...]
    detail: Mapping[str, Any] = field(default_factory=dict)
    trace: bytes | None = None
    """A gzipped Chrome trace, of a trace block that is to be kept."""


@dataclass(frozen=True)
class DeviceMemory:
    """MiB that a case takes at most on one GPU."""

    peak_mib: float
    """MiB in tensors."""
    reserved_mib: float
    """Held by torch's allocator: tensors, gaps between them, and what it keeps for the next."""


def make_memory_columns(by_rank: Sequence[Sequence[DeviceMemory]], mode: str) -> dict[str, Any]:
    """Make the columns of a case's memory, by the devices of each rank; none where one knows nothing."""
    if not all(by_rank):
        return {}
    devices = [device for rank in by_rank for device in rank]
    peaks = [device.peak_mib for device in devices]
    columns: dict[str, Any] = {
        "peak_mem_mib": max(peaks),
        "reserved_mem_mib": max(device.reserved_mib for device in devices),
        "mem_by_device_mib": "/".join(f"{mib:.1f}" for mib in peaks),
    }
    if mode == "dp" and any(peaks[1:]):
        columns["dp_device0_mem_ratio"] = peaks[0] / fmean(peaks[1:])
    return columns


@dataclass(frozen=True)
class Compilation:
    """The cost of compiling a case on one rank, and the result."""

    compile_s: float
    """Within dynamo, backward included; with the compiler's caches as they were."""
    num_graphs: int
    """Graphs given to the compiler: a part each where DDPOptimizer splits one."""
    graph_breaks: int
    """Places where dynamo could not go on in one graph; DDPOptimizer's splits are none."""


@dataclass(frozen=True)
class NotProved:
    """Why a case is neither proved nor wrong, and what would prove it; it is timed all the same."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class ProofResult:
    """Result of a proof of a case."""

    error: float | None = None
    """Relative, of gradients or of what the first steps add to parameters; None where nothing is told."""
    not_proved: NotProved | None = None
    inconclusive_reason: str = ""
    """Why the first steps tell nothing, though the case is not in doubt."""
    split_effect: float | None = None
    """Effect of the split on the loss, as the first proof finds it: see `SplitEffect`."""


@dataclass(frozen=True)
class Fault:
    """Outcome of an error for its case, and for the process that raised it."""

    status: str
    """One of cases.csv."""
    reason: str
    reason_code: str | None = None
    """Code of the reason, as in cases.csv."""
    restart: bool = False
    """True where this process can measure no further: its device or its communicator is broken."""
    is_cause: bool = True
    """True where something went wrong here, not because another rank failed."""
