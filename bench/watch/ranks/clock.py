"""Exclusive times of the nested parts of a step: what a part calls counts for the inner part alone."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter as now


class Clock:
    """Times of the parts of one thread since the last cut; times are seconds of `perf_counter`."""

    def __init__(self) -> None:
        self.start = self.changed = now()
        self.open = ["other"]
        self.parts: dict[str, float] = defaultdict(float)

    def enter(self, part: str) -> int:
        """Begin a part and return the depth with which to leave it."""
        self._add(now())
        self.open.append(part)
        return len(self.open) - 1

    def leave(self, depth: int) -> None:
        """End the part that was begun at this depth, with all that an exception left open in it."""
        self._add(now())
        del self.open[max(depth, 1) :]

    def cut(self) -> tuple[float, float, dict[str, float]]:
        """End a step: return its start, its seconds and the seconds of its parts, which add up to them."""
        end = now()
        self._add(end)
        start, parts = self.start, self.parts
        self.start, self.parts = end, defaultdict(float)
        return start, end - start, parts

    def _add(self, time: float) -> None:
        self.parts[self.open[-1]] += time - self.changed
        self.changed = time
