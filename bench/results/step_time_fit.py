"""Typical step times of a run, their ratios and exposed communication, with intervals: all of one fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..stats.interval import Estimate, Interval
from ..stats.one_run import Array, Function, fit
from .round_times import ByRound, RoundTimes

Column = tuple[str, str]
"""A case id and a phase."""

FITTED = ("timed", "no_sync", "comm")
"""Phases whose step times are compared with each other."""

NOT_KNOWN = Estimate(math.nan, math.nan, 1.0)


class Typical:
    """Fitted step times, in ms, of cases and phases that were visited in common rounds."""

    def __init__(self, step_ms: Mapping[Column, ByRound]) -> None:
        """Fit what was measured: ms per step by case, phase and round."""
        rounds = sorted({r for by_round in step_ms.values() for r in by_round})
        table = [[by_round.get(r, math.nan) for by_round in step_ms.values()] for r in rounds]
        self._fit = fit(np.array(table)) if rounds else None
        self._rounds = {
            case_id: len(found) for (case_id, phase), found in step_ms.items() if phase == "timed"
        }
        self._places = {column: place for place, column in enumerate(step_ms)}

    @classmethod
    def of(cls, times: RoundTimes) -> Typical:
        """Of all blocks of a run."""
        return cls({(c, p): rounds for p in FITTED for c, rounds in times.step_ms(p).items()})

    def has(self, *columns: Column) -> bool:
        """Whether all of these were measured, in rounds that connect them."""
        visits = () if self._fit is None else self._fit.visits
        return all(column in self._places and visits[self._places[column]] for column in columns)

    def num_rounds(self, case_id: str) -> int:
        """Timed rounds of a case."""
        return self._rounds.get(case_id, 0)

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

        def hidden(log_ms: Array) -> float:
            step_ms, local_ms, comm_ms = map(math.exp, log_ms)
            return 100 * (1 - (step_ms - local_ms) / comm_ms)

        return self._estimate(hidden, *((case_id, phase) for phase in FITTED)).interval()

    def _estimate(self, function: Function, *columns: Column) -> Estimate:
        """A function of the log ms of some columns; unknown where one of them was not measured."""
        if self._fit is None or not self.has(*columns):
            return NOT_KNOWN
        return self._fit.estimate(function, *(self._places[column] for column in columns))
