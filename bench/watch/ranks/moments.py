"""Moments of a step: times of the host, and on a GPU events of its stream, read once they are past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from . import private


class Moment(NamedTuple):
    """A place in the work that the host has queued for a GPU."""

    event: Any
    """Event on the GPU's stream; None within a CUDA graph, which would record it at each replay."""
    host_s: float


class HostMoments:
    """Times of `perf_counter`, in seconds: what a step takes where no GPU trains."""

    device = "cpu"
    now: Callable[[], Any] = staticmethod(perf_counter)

    def compute_seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments."""
        return float(end - begin)

    def is_past(self, _moment: Any) -> bool:
        """Tell whether a moment has come."""
        return True

    def compute_lags_s(self, _start: Any, _moments: Sequence[Any], _step_s: float) -> list[float]:
        """Return how late a GPU is at each of these moments of a step; nothing without a GPU."""
        return []


class GpuMoments(HostMoments):
    """Events of one GPU. Nothing waits for them, so that the GPU stays as far behind its host as it was."""

    def __init__(
        self,
        number: int,
        make_event: Callable[[], Any] | None = None,
        host_now: Callable[[], float] = perf_counter,
    ) -> None:
        """Begin at no moment; `make_event` makes an event that is recorded on the current stream."""
        self.device, self.make_event, self.host_now = (
            f"cuda:{number}",
            make_event or self.record_event,
            host_now,
        )
        self.host_begin_s: float | None = None
        self.gpu_s = 0.0
        """Seconds by the GPU from the first step's start to the present step's."""
        self.now = self.take

    def record_event(self) -> Any:
        """Record an event on the stream that this thread uses, or None while a CUDA graph is captured."""
        if private.is_captured():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def take(self) -> Moment:
        """Return the moment at which the GPU has done all that is queued now."""
        return Moment(self.make_event(), self.host_now())

    def compute_seconds(self, begin: Moment, end: Moment) -> float:
        """Return the seconds by the GPU between two moments that are past, else by the host."""
        if begin.event is None or end.event is None:
            return end.host_s - begin.host_s
        return float(begin.event.elapsed_time(end.event)) / 1000

    def is_past(self, moment: Moment) -> bool:
        """Tell whether the GPU has come to a moment; never asked of it while a CUDA graph is captured."""
        return moment.event is None or (not private.is_captured() and bool(moment.event.query()))

    def compute_lags_s(self, start: Moment, moments: Sequence[Moment], step_s: float) -> list[float]:
        """Return by how much each moment came later by the GPU than by the host, from the first step on.

        It is the same, and least, wherever the GPU had done all that was queued. Steps come in their order.
        """
        if self.host_begin_s is None:
            self.host_begin_s = start.host_s
        begin_s, self.gpu_s = self.gpu_s, self.gpu_s + step_s
        host_s = self.host_begin_s
        return [begin_s + self.compute_seconds(start, one) - (one.host_s - host_s) for one in moments]


def find_moments() -> HostMoments:
    """Return the moments of this process: those of its current GPU, if it uses one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return GpuMoments(torch.cuda.current_device())
    return HostMoments()
