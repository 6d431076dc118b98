"""Clocks for a row of steps, on the host and on a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Moments of the host's time: right where work is done when the call returns, as on a CPU."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    record_moment: Callable[[], Any] = staticmethod(time.perf_counter_ns)
    """This moment, without waiting for the device."""

    def measure_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from `start` to `end`, once the device has been waited for."""
        return float(end - start) / 1e6

    def wait(self) -> None:
        """Until the device has done all it was given."""

    def begin(self) -> None:
        """Note the first moment of a row; what a block that raised has left is forgotten."""
        self._marks = []
        self.mark()

    def mark(self) -> None:
        self._marks.append(self.record_moment())

    def read_ms(self) -> list[float]:
        """Milliseconds between the moments of the row, waiting for the device first; forgets them."""
        marks, self._marks = self._marks, []
        self.wait()
        return [self.measure_ms(a, b) for a, b in itertools.pairwise(marks)]


class CudaClock(Clock):
    """CUDA events on the current stream: device time, no synchronisation between moments."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def record_moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def measure_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def make_clock(device: torch.device) -> Clock:
    """Make the clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else Clock()
