"""The count of tensors on CPU cores against sizes known beforehand."""

from __future__ import annotations

import ctypes.util
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.autograd import _profiler_enabled
from torch.nn import functional

from bench.measure import cpu_memory
from bench.measure.cpu_memory import CpuMemory

MIB = 2**20


def taken(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_the_peak_is_the_most_at_one_time() -> None:
    """4 beside 2 MiB, then 3 alone; what was there before is not counted, and may go."""
    before = taken(16)
    with CpuMemory() as memory:
        four, two = taken(4), taken(2)
        del four, two, before
        three = taken(3)
    assert memory.peak_bytes == 6 * MIB
    del three


@pytest.mark.parametrize(("momentum", "copies"), [(0.0, 2), (0.9, 3)])
def test_training_takes_parameters_gradients_and_momentum(momentum: float, copies: int) -> None:
    """16 MiB each; activations of 4 rows are less than 1% of that."""
    with CpuMemory() as memory:
        module = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=momentum)
        inputs = torch.zeros(4, 1024)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            functional.mse_loss(module(inputs), inputs).backward()
            optimizer.step()
    assert memory.peak_bytes is not None
    assert copies <= memory.peak_bytes / (16 * MIB) < 1.01 * copies


def test_what_another_thread_frees_is_free() -> None:
    """As gloo's threads free DDP's buffers: torch's profiler alone would count 16 MiB."""
    with CpuMemory() as memory:
        held = [taken(8)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        again = taken(8)
    assert memory.peak_bytes == 8 * MIB
    del again


def test_what_another_thread_takes_is_taken() -> None:
    held: list[torch.Tensor] = []
    with CpuMemory() as memory:
        first = taken(1)
        thread = threading.Thread(target=lambda: held.append(taken(8)))
        thread.start()
        thread.join()
        second = taken(2)
    assert memory.peak_bytes == 11 * MIB
    del first, second


def test_what_an_earlier_case_frees_takes_nothing_off() -> None:
    with CpuMemory():
        earlier = taken(32)
    with CpuMemory() as memory:
        first = taken(1)
        del earlier
        second = taken(4)
    assert memory.peak_bytes == 5 * MIB
    del first, second


def test_another_tensor_at_an_earlier_ones_address_takes_nothing_off() -> None:
    """Freed by another thread, as gloo's free what the proof before a case has left."""
    with CpuMemory():
        earlier = taken(32)
    address = earlier.data_ptr()
    del earlier
    held = [taken(32)]
    assert held[0].data_ptr() == address, "or this test could not fail"
    with CpuMemory() as memory:
        first = taken(1)
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        second = taken(4)
    assert memory.peak_bytes == 5 * MIB
    del first, second


def test_shared_memory_which_has_no_total_is_left_out(tmp_path: Path) -> None:
    with CpuMemory() as memory:
        shared = torch.from_file(str(tmp_path / "shared"), shared=True, size=4 * MIB, dtype=torch.uint8)
        own = taken(6)
    assert memory.peak_bytes == 6 * MIB
    del shared, own


def test_a_case_that_raises_leaves_nothing_recording() -> None:
    with pytest.raises(ValueError, match="no such luck"), CpuMemory():
        raise ValueError("no such luck")
    assert not _profiler_enabled()
    with CpuMemory() as memory:
        again = taken(1)
    assert memory.peak_bytes == MIB
    del again


def test_a_torch_that_does_not_tell_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory._C, "__file__", ctypes.util.find_library("c"))
    with CpuMemory() as memory:
        taken(1)
    assert memory.peak_bytes is None
    assert not _profiler_enabled()


def test_a_profiler_that_runs_already_is_left_alone() -> None:
    with torch.profiler.profile(acc_events=True) as theirs:
        with CpuMemory() as memory:
            taken(1)
        torch.zeros(3).add(1)
    assert memory.peak_bytes is None
    assert "aten::add" in {event.name for event in theirs.events() or ()}


class Fields:
    """As torch's: they point into their event, and are not to be read once it has gone."""

    def __init__(self, event: Event, num_bytes: int) -> None:
        self._event, self._num_bytes = weakref.ref(event), num_bytes

    def __getattr__(self, name: str) -> int:
        assert self._event() is not None, "read after its event had gone"
        return {"ptr": 4096, "alloc_size": self._num_bytes, "total_allocated": 100 + self._num_bytes}[name]


class Event:
    def __init__(self, start_time_ns: int, num_bytes: int) -> None:
        self.start_time_ns, self.children = start_time_ns, list[Event]()
        self.typed = (_EventType.Allocation, Fields(self, num_bytes))


def test_what_was_allocated_outlives_torchs_events() -> None:
    blocks = cpu_memory._allocations(Event(time, 8 - time) for time in (2, 1))
    gc.collect()
    assert [tuple(block) for block in blocks] == [(4096, 7, 107), (4096, 6, 106)]
    assert cpu_memory._peak(blocks) == 7
