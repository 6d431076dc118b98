"""Typical step times of a run, their ratios and exposed communication, with intervals: all of one fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..stats.interval import Estimate, Interval
from ..stats.one_run import TwoWayFit, fit
from .round_times import ByRound

Column = tuple[str, str]
"""A case id and a phase."""

FITTED = ("timed", "no_sync", "comm")
"""Phases whose step times are compared with each other."""

NOT_KNOWN = Estimate(math.nan, math.nan, 1.0)


class Typical:
    """Fitted step times, in ms, of cases and phases that were visited in common rounds."""

    def __init__(self, step_ms: Mapping[Column, ByRound]) -> None:
        """Fit what was measured: ms per step by case, phase and round."""
        self._columns = {column: place for place, column in enumerate(_connected(step_ms))}
        columns = [step_ms[column] for column in self._columns]
        self._fit = _fitted(sorted({r for by_round in columns for r in by_round}), columns)

    @classmethod
    def of(cls, phases: Mapping[str, Mapping[str, ByRound]]) -> Typical:
        """From step times by phase, case and round."""
        return cls({(c, p): rounds for p in FITTED for c, rounds in phases.get(p, {}).items() if rounds})

    def has(self, *columns: Column) -> bool:
        """Whether all of these were measured, in rounds that connect them."""
        return all(column in self._columns for column in columns)

    def log_step(self, case_id: str, phase: str = "timed") -> Estimate:
        """The logarithm of a step's ms."""
        return self._estimate(lambda log_step: log_step[0], (case_id, phase))

    def log_ratio(self, case_id: str, reference_id: str) -> Estimate:
        """The logarithm of the step time of a case over that of another."""
        columns = (case_id, "timed"), (reference_id, "timed")
        return self._estimate(lambda log_step: log_step[0] - log_step[1], *columns)

    def ratios(self, pairs: Sequence[tuple[str, str]]) -> list[Interval]:
        """Step time of the first case of each pair over the second's; all intervals hold at once with 95%.

        Each is a Bonferroni interval.
        """
        return [self.log_ratio(*pair).interval(1 - 0.05 / len(pairs)).exp() for pair in pairs]

    def step_ms(self, case_id: str, phase: str = "timed") -> Interval:
        return self.log_step(case_id, phase).interval().exp()

    def exposed(self, case_id: str) -> Estimate:
        """The step less the step under `no_sync`, in ms."""
        columns = (case_id, "timed"), (case_id, "no_sync")
        return self._estimate(lambda log_ms: math.exp(log_ms[0]) - math.exp(log_ms[1]), *columns)

    def hidden_pct(self, case_id: str) -> Interval:
        """100 x (1 - exposed / communication alone)."""

        def hidden(log_ms: Sequence[float]) -> float:
            step_ms, local_ms, comm_ms = map(math.exp, log_ms)
            return 100 * (1 - (step_ms - local_ms) / comm_ms)

        return self._estimate(hidden, *((case_id, phase) for phase in FITTED)).interval()

    def _estimate(self, function: Callable[[Sequence[float]], float], *columns: Column) -> Estimate:
        """A function of the log ms of some columns; unknown where one of them was not measured."""
        if self._fit is None or not self.has(*columns):
            return NOT_KNOWN
        places = [self._columns[column] for column in columns]
        (found,) = self._fit.estimates(
            [lambda log_ms: float(function([float(log_ms[place]) for place in places]))], columns=places
        )
        return found


def _fitted(rounds: Sequence[int], columns: Sequence[ByRound]) -> TwoWayFit | None:
    if not rounds:
        return None
    place = {r: row for row, r in enumerate(rounds)}
    step_ms = np.full((len(rounds), len(columns)), math.nan)
    for column, by_round in enumerate(columns):
        for r, ms in by_round.items():
            step_ms[place[r], column] = ms
    return fit(step_ms)


def _connected(step_ms: Mapping[Column, ByRound]) -> list[Column]:
    """The largest set of columns that rounds connect: others share none with them, nothing compares them."""
    left, largest = list(step_ms), list[Column]()
    while left:
        found, rounds = [left.pop(0)], set[int]()
        while True:
            rounds |= {r for column in found for r in step_ms[column]}
            more = [column for column in left if rounds & step_ms[column].keys()]
            if not more:
                break
            found += more
            left = [column for column in left if column not in more]
        largest = max(largest, found, key=len)
    return [column for column in step_ms if column in set(largest)]
