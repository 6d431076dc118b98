"""Exclusive times of the nested parts of a step: what a part calls counts for the inner part alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .moments import HostMoments

MAX_MARKS = 4096
"""Ends of parts that are kept as moments: an evaluation of many batches is one step."""


class Taken:
    """A step that was taken, whose times can be read once the moment of its end is past."""

    def __init__(self, moments: HostMoments, start: Any) -> None:
        self.moments, self.start, self.end = moments, start, start
        self.marks: list[tuple[str, Any]] = []
        """Parts in their order, each with the moment of its end."""
        self.sums: dict[str, float] = defaultdict(float)
        """Seconds by part before the marks, which begin at `since`."""
        self.since = start
        self.gaps: list[tuple[int, tuple[str, str]]] = []
        """Marks, by their place, of work between parts, each with the user's lines before and after."""

    def note_gap(self, after: str, before: str) -> None:
        """Note the lines of the part before the next mark and of the one that it begins."""
        if before and not self.marks:
            before += " of the next step"
        self.gaps.append((len(self.marks), (after, before)))

    def add(self, part: str, end: Any) -> None:
        """Add a part that ends now; parts that are past become sums where there are many."""
        self.marks.append((part, end))
        self.end = end
        if len(self.marks) > MAX_MARKS and self.moments.is_past(end):
            self.sums = self.add_up(self.get_marks_s())
            self.marks, self.gaps, self.since = [], [], end

    def get_marks_s(self) -> list[tuple[str, float]]:
        """Return the parts since the sums in their order, each with its seconds."""
        begins = [self.since, *(end for _, end in self.marks)]
        return [
            (part, self.moments.compute_seconds(begin, end))
            for begin, (part, end) in zip(begins, self.marks, strict=False)
        ]

    def add_up(self, marks_s: list[tuple[str, float]]) -> dict[str, float]:
        """Return the seconds by part, which add up to the step, of its marks and what they were cut from."""
        parts = self.sums.copy()
        for part, seconds in marks_s:
            parts[part] += seconds
        return parts


class PartClock:
    """Parts of one thread since the last cut."""

    def __init__(self, moments: HostMoments) -> None:
        self.moments = moments
        self.taken = Taken(moments, moments.now())
        self.open = ["other"]

    def enter(self, part: str) -> int:
        """Begin a part and return the depth with which to leave it."""
        self.taken.add(self.open[-1], self.moments.now())
        self.open.append(part)
        return len(self.open) - 1

    def leave(self, depth: int) -> None:
        """End the part that was begun at this depth, with all that an exception left open in it."""
        self.taken.add(self.open[-1], self.moments.now())
        del self.open[max(depth, 1) :]

    def cut(self) -> Taken:
        """End a step and return it."""
        taken, end = self.taken, self.moments.now()
        taken.add(self.open[-1], end)
        self.taken = Taken(self.moments, end)
        return taken
