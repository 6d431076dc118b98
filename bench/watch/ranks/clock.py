"""Exclusive times of the nested parts of a step: what a part calls counts for the inner part alone.

A GPU is behind its host: there a moment is an event of its stream as well, which is read once it is past.
Nothing waits for events, so that the GPU stays as far behind as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch

from . import private
from .setup import find_caller

MAX_MARKS = 4096
"""Ends of parts that are kept as moments: an evaluation of many batches is one step."""

LINES_EVERY = 8
"""Steps between two whose gaps between parts get the user's lines around them."""

CALLS = {"data": "next batch", "buffers": "broadcast of buffers", "optimizer": "optimizer step"}
"""Names of parts, beside the user's lines that begin them, where they are not the part's own."""


class Moment(NamedTuple):
    """A place in the work of the host, and in what it has queued for a GPU."""

    event: Any
    """Event on the GPU's stream; None without a GPU, and in a CUDA graph, whose replays would record it."""
    host_s: float

    def is_past(self) -> bool:
        """Tell whether the GPU has come here; it is never asked while a CUDA graph is captured."""
        return self.event is None or (not private.is_captured() and bool(self.event.query()))

    def compute_seconds_since(self, begin: Moment) -> float:
        """Return the seconds by the GPU between two moments that are past, else by the host."""
        if begin.event is None or self.event is None:
            return self.host_s - begin.host_s
        return float(begin.event.elapsed_time(self.event)) / 1000


class Taken:
    """A step that was taken, whose times can be read once the moment of its end is past."""

    def __init__(self, start: Moment) -> None:
        self.start = self.end = start
        self.marks: list[tuple[str, Moment, tuple[str, ...]]] = []
        """Parts in their order, each with the moment of its end; of a gap also the lines around it."""
        self.sums: dict[str, float] = defaultdict(float)
        """Seconds by part before the marks, which begin at `since`."""
        self.since = start

    def add(self, part: str, end: Moment, lines: tuple[str, ...] = ()) -> None:
        """Add a part that ends now; parts that are past become sums where there are many."""
        self.marks.append((part, end, lines))
        self.end = end
        if len(self.marks) > MAX_MARKS and end.is_past():
            self.sums = self.add_up(self.compute_marks_s())
            self.marks, self.since = [], end

    def compute_marks_s(self) -> list[float]:
        """Return the seconds of each part since the sums."""
        ends = [self.since, *(end for _, end, _ in self.marks)]
        return [end.compute_seconds_since(begin) for begin, end in pairwise(ends)]

    def add_up(self, marks_s: list[float]) -> dict[str, float]:
        """Return the seconds by part, which add up to the step, of its marks and what they were cut from."""
        parts = self.sums.copy()
        for (part, *_), seconds in zip(self.marks, marks_s, strict=True):
            parts[part] += seconds
        return parts


class PartClock:
    """Parts of one thread since the last cut, on the CPU or on one GPU."""

    def __init__(
        self,
        make_event: Callable[[], Any] = lambda: None,
        host_now: Callable[[], float] = perf_counter,
        device: str = "cpu",
    ) -> None:
        """Begin a step; `make_event` makes an event that is recorded on the current stream."""
        self.make_event, self.host_now, self.device = make_event, host_now, device
        self.open = ["other"]
        self.num_steps = 0
        self.taken = Taken(self.take_moment())
        self.line = ""
        """The user's line that began the latest part, in steps that look for it."""
        self.lag_s = 0.0
        """The time by which the next step to be described began later on the GPU than on the host."""

    def take_moment(self) -> Moment:
        """Return the moment at which the GPU has done all that is queued now."""
        return Moment(self.make_event(), self.host_now())

    def enter(self, part: str) -> int:
        """Begin a part and return the depth with which to leave it."""
        lines = self.find_lines(part) if len(self.open) == 1 else ()
        self.taken.add(self.open[-1], self.take_moment(), lines)
        self.open.append(part)
        return len(self.open) - 1

    def find_lines(self, part: str) -> tuple[str, ...]:
        """Find the user's lines before and after the gap that a part ends; in most steps nobody looks."""
        place = self.num_steps % LINES_EVERY
        if place > 1:
            return ()
        before, line = self.line, find_caller()["line"]
        self.line = line and f"{line} ({CALLS.get(part, part)})"
        if not place:  # only the next step knows a line before its first gap
            return ()
        return before, f"{self.line} of the next step" if line and not self.taken.marks else self.line

    def leave(self, depth: int) -> None:
        """End the part that was begun at this depth, with all that an exception left open in it."""
        self.taken.add(self.open[-1], self.take_moment())
        del self.open[max(depth, 1) :]

    def cut(self) -> Taken:
        """End a step and return it."""
        taken = self.taken
        taken.add(self.open[-1], self.take_moment())
        self.taken = Taken(taken.end)
        self.num_steps += 1
        return taken

    def describe_step(self, taken: Taken) -> dict[str, Any]:
        """Return what the row of a step says of its times. Steps come in their order.

        A mark's lag is the same, and least, wherever the GPU had done all that was queued.
        """
        marks_s, begin = taken.compute_marks_s(), taken.start
        parts, told = taken.add_up(marks_s), [*zip(marks_s, taken.marks, strict=True)]

        def compute_lag_s(moment: Moment) -> float:
            return self.lag_s + moment.compute_seconds_since(begin) - (moment.host_s - begin.host_s)

        lags = [(part, round(s, 7), round(compute_lag_s(end), 7)) for s, (part, end, _) in told]
        self.lag_s = compute_lag_s(taken.end)
        return {
            "step_s": round(sum(parts.values()), 7),
            "parts": {part: round(seconds, 7) for part, seconds in parts.items()},
            "gaps": [(round(seconds, 7), *lines) for seconds, (_, _, lines) in told if lines],
            "marks": lags if taken.end.event is not None else [],
        }


def make_clock() -> PartClock:
    """Make the clock of this thread, by events of the current GPU if this process uses one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return PartClock()
    device = f"cuda:{torch.cuda.current_device()}"

    def record_event() -> Any:
        if private.is_captured():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return PartClock(record_event, device=device)
