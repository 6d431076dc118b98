"""The device around a measurement: clocks for a row of steps, arithmetic precision."""

from __future__ import annotations

import itertools
import time
from typing import Protocol

import torch


class Clock(Protocol):
    """Marks moments cheaply; `read_ms` turns them into the durations between neighbours."""

    def mark(self) -> None:
        """Note the moment, without waiting for the device."""

    def read_ms(self) -> list[float]:
        """Milliseconds between consecutive marks, waiting for the device first; forgets them."""


class HostClock:
    """`time.perf_counter_ns`: right where work is done when the call returns, as on a CPU."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def mark(self) -> None:
        """Note the moment."""
        self._marks.append(time.perf_counter_ns())

    def read_ms(self) -> list[float]:
        """Milliseconds between consecutive marks."""
        marks, self._marks = self._marks, []
        return [(b - a) / 1e6 for a, b in itertools.pairwise(marks)]


class CudaClock:
    """CUDA events on the current stream: device time, no synchronisation between marks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Queue an event behind the work issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def read_ms(self) -> list[float]:
        """Milliseconds between consecutive events."""
        marks, self._marks = self._marks, []
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def make_clock(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def set_precision(precision: str, device: torch.device) -> None:
    """Let matrix products and convolutions use TF32 only where the run asked for it.

    PyTorch's own default allows TF32 in convolutions and not in products; a run states one or the other.
    """
    if device.type == "cuda":
        chosen = "tf32" if precision == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = chosen
        torch.backends.cudnn.conv.fp32_precision = chosen  # type: ignore[attr-defined]
