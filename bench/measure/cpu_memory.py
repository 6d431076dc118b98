"""Memory of tensors on CPU cores: torch's allocator tells its profiler of every block that it gives.

What libraries take for themselves (oneDNN, MKL, gloo) is not the allocator's and is not counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import _C
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler, _profiler_enabled
from torch._C._profiler import RecordScope, _EventType
from torch.autograd import profiler

NO_OPERATORS = {RecordScope.STATIC_RUNTIME_OP}
"""A scope in which nothing runs here: with operators left out, recording costs a step nothing measurable."""

ERRORS = 2
"""Torch's level of logging at which its libraries tell of errors alone (c10/util/Logging.h)."""


class CpuMemory:
    """Counts, while it is entered, how far the memory of this process's tensors rises above the start."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """None until it has ended, and where this build of torch does not tell."""
        self._ledger: Ledger | None = None

    def __enter__(self) -> Self:
        """Begin to count, unless torch cannot, or another profiler runs, which this would end."""
        if _profiler_enabled():
            return self
        ledger = None
        try:
            ledger = Ledger()
            ledger.open()
            _record_allocations()
        except Exception:  # noqa: BLE001 - a number that is missing ends no run
            if ledger is not None:
                ledger.close(())
            return self
        self._ledger = ledger
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; whatever happened within, nothing is recorded from here."""
        if self._ledger is None:
            return
        blocks: list[Allocation] = []
        try:
            recorded = _disable_profiler()
            blocks = _allocations(recorded.experimental_event_tree())
            self.peak_bytes = _peak(blocks)
        except Exception:  # noqa: BLE001 - as above
            self.peak_bytes = None
        self._ledger.close(_in_use(blocks))


class Ledger:
    """The allocator's own list of blocks; it keeps none while it is closed and nothing is profiled.

    Torch's profiler fills it for threads that are profiled. Opened, it holds those of all threads: gloo's
    free some of DDP's buffers, which would count as in use for ever.
    """

    def __init__(self) -> None:
        """Find it in torch's library. Raises what ctypes raises for a build without it."""
        library = ctypes.CDLL(_C.__file__)
        self._all_threads = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
        self._log_level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        self._usual_level = self._log_level.value
        itself = library["_ZN3c1025profiledCPUMemoryReporterEv"]
        itself.restype = ctypes.c_void_p
        self._itself = itself()
        self._strike_out = library["_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv"]
        self._strike_out.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._strike_out.restype = None

    def open(self) -> None:
        """Begin to list every thread's blocks; torch would warn of those that are older and go meanwhile."""
        self._log_level.value = max(self._usual_level, ERRORS)
        self._all_threads.value = True

    def close(self, addresses: Iterable[int]) -> None:
        """End, and strike out the blocks at `addresses`, which may go from here and be others' unheard."""
        for address in addresses:
            self._strike_out(self._itself, address)
        self._all_threads.value = False
        self._log_level.value = self._usual_level


def _record_allocations() -> None:
    """Start torch's profiler for allocations alone: its public classes record every operator too."""
    wanted = profiler.profile(profile_memory=True)
    _prepare_profiler(wanted.config(), wanted.kineto_activities)
    enable: Any = _enable_profiler  # torch's stubs lack its third argument
    enable(wanted.config(), wanted.kineto_activities, NO_OPERATORS)


class Allocation(NamedTuple):
    """A block that the allocator gave, or took back."""

    address: int
    num_bytes: int
    """Above 0 where it was given, below where it was taken back."""
    total_bytes: int
    """In use from then on."""


def _allocations(events: Iterable[Any]) -> list[Allocation]:
    """What the allocator gave and took back, in order; shared memory, of no total, is left out.

    Copied while the events live: what torch gives as `typed` points into its event and does not keep it.
    """
    found = sorted(_flat(events), key=lambda event: event.start_time_ns)
    blocks = []
    for event in found:
        kind, fields = event.typed
        if kind == _EventType.Allocation and fields.total_allocated:
            blocks.append(Allocation(fields.ptr, fields.alloc_size, fields.total_allocated))
    return blocks


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


def _peak(blocks: Sequence[Allocation]) -> int | None:
    if not blocks:
        return None
    before = blocks[0].total_bytes - blocks[0].num_bytes
    return max(block.total_bytes for block in blocks) - before


def _in_use(blocks: Iterable[Allocation]) -> set[int]:
    """Where blocks were given and not taken back, as far as profiled threads tell."""
    found: set[int] = set()
    for block in blocks:
        (found.add if block.num_bytes > 0 else found.discard)(block.address)
    return found
