"""The device around a measurement: clocks for a row of steps, arithmetic precision."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

BACKENDS: Any = torch.backends
"""PyTorch's settings of its libraries; its stubs know only some of them."""


class Clock(Protocol):
    """Marks moments cheaply; `read_ms` turns them into the durations between neighbours."""

    def begin(self) -> None:
        """Note the first moment; what a block that raised has left is forgotten."""

    def mark(self) -> None:
        """Note the moment, without waiting for the device."""

    def read_ms(self) -> list[float]:
        """Milliseconds between consecutive marks, waiting for the device first; forgets them."""


class HostClock:
    """`time.perf_counter_ns`: right where work is done when the call returns, as on a CPU."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def begin(self) -> None:
        self._marks = []
        self.mark()

    def mark(self) -> None:
        self._marks.append(time.perf_counter_ns())

    def read_ms(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [(b - a) / 1e6 for a, b in itertools.pairwise(marks)]


class CudaClock:
    """CUDA events on the current stream: device time, no synchronisation between marks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event] = []

    def begin(self) -> None:
        self._marks = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def read_ms(self) -> list[float]:
        marks, self._marks = self._marks, []
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def make_clock(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@contextlib.contextmanager
def float32_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Within, float32 products, convolutions and recurrent layers on a GPU use TF32 for `tf32` alone.

    PyTorch's own default allows TF32 in all of them but the products; a run states one or the other.
    """
    if device.type != "cuda":
        yield
        return
    products, layers = (kind.fp32_precision == "tf32" for kind in (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv))
    _let_use_tf32(products=precision == "tf32", layers=precision == "tf32")
    try:
        yield
    finally:
        _let_use_tf32(products=products, layers=layers)


def _let_use_tf32(*, products: bool, layers: bool) -> None:
    """Through both of PyTorch's interfaces: where one alone is used, reading the other raises."""
    torch.set_float32_matmul_precision("high" if products else "highest")
    BACKENDS.cudnn.allow_tf32 = layers
    # The older one leaves what it forbids to the setting of all backends.
    for kind in (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn):
        kind.fp32_precision = "tf32" if layers else "ieee"
