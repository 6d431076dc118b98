"""Memory of tensors on CPU cores: torch's allocator tells its profiler of every block that it gives.

What libraries take for themselves (oneDNN, MKL, gloo) is not the allocator's and is not counted.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from torch import _C
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler, _profiler_enabled
from torch._C._profiler import RecordScope, _EventType, _ExtraFields_Allocation
from torch.autograd import profiler

ALL_THREADS = "FLAGS_caffe2_report_cpu_memory_usage"
"""Torch's switch that lets the allocator's total count every thread, as does its CUDA allocator.

Without it blocks that gloo's threads free, some of DDP's buckets, would count as in use for ever.
"""

NO_OPERATORS = {RecordScope.STATIC_RUNTIME_OP}
"""A scope in which nothing runs here: with operators left out, recording costs a step nothing measurable."""

_earlier: set[int] = set()
"""Addresses of blocks that were in use when earlier counts ended; the total may still hold them."""


class CpuMemory:
    """Counts, while it is entered, how far the memory of this process's tensors rises above the start."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """None until it has ended, and where this build of torch does not tell."""
        self._switch: ctypes.c_bool | None = None

    def __enter__(self) -> Self:
        """Begin to count, unless torch cannot, or another profiler runs, which this would end."""
        if _profiler_enabled():
            return self
        try:
            switch = ctypes.c_bool.in_dll(ctypes.CDLL(_C.__file__), ALL_THREADS)
            _record_allocations()
        except Exception:  # noqa: BLE001 - a number that is missing ends no run
            return self
        self._switch = switch
        switch.value = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; whatever happened within, nothing is recorded from here."""
        if self._switch is None:
            return
        self._switch.value = False
        try:
            found = _disable_profiler().experimental_event_tree()
            self.peak_bytes = _peak(_allocations(found), _earlier)
        except Exception:  # noqa: BLE001 - as above
            self.peak_bytes = None


def _record_allocations() -> None:
    """Start torch's profiler for allocations alone: its public classes record every operator too."""
    wanted = profiler.profile(profile_memory=True)
    _prepare_profiler(wanted.config(), wanted.kineto_activities)
    enable: Any = _enable_profiler  # torch's stubs lack its third argument
    enable(wanted.config(), wanted.kineto_activities, NO_OPERATORS)


def _allocations(events: Iterable[Any]) -> list[_ExtraFields_Allocation]:
    """What the allocator gave (size > 0) and took back, in order; shared memory, of no total, is left out."""
    found = sorted(_flat(events), key=operator.attrgetter("start_time_ns"))
    blocks = [event.typed[1] for event in found if event.typed[0] == _EventType.Allocation]
    return [block for block in blocks if block.total_allocated]


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


def _peak(blocks: Iterable[_ExtraFields_Allocation], earlier: set[int]) -> int | None:
    """Most bytes above the start; None without blocks. Those still in use are added to `earlier`.

    A block of `earlier` that goes meanwhile lowers the total, but what was counted here takes no less.
    """
    peak, before, ours = None, 0, set[int]()
    for block in blocks:
        if peak is None:
            peak, before = 0, block.total_allocated - block.alloc_size
        if block.alloc_size > 0:
            ours.add(block.ptr)
        elif block.ptr in ours:
            ours.remove(block.ptr)
        elif block.ptr in earlier:
            before += block.alloc_size
        peak = max(peak, block.total_allocated - before)
    earlier |= ours
    return peak
