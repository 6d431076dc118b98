"""Typical step times of a run, their ratios and exposed communication, with intervals: all of one fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..stats.interval import Interval
from ..stats.launches import Launches
from ..stats.one_run import Array, Function, TwoWayFit, fit
from .round_times import ByRound, Row

Column = tuple[str, str]
"""A case id and a phase."""

FITTED = ("timed", "no_sync", "comm")
"""Phases whose step times are compared with each other."""

UNKNOWN = Interval(math.nan, math.nan, math.nan)

LAUNCH_SD, LAUNCH_FREEDOM = 0.012, 10.0
"""What a launch does to a mode on so many CPU cores, of logarithms: docs/measuring.md, "Another launch".

On GPUs it was not measured: there the launches of a run tell it, if it has several.
"""

TIMES_USUAL = {"dp": 3.2}
"""What it does to a mode on CPU cores, over that: DP's stand-in allocates from several threads."""


class Typical:
    """Fitted step times, in ms, of cases and phases that were visited in common rounds."""

    def __init__(
        self, step_ms: Mapping[Column, ByRound], rows: Iterable[Row] = (), launches: Mapping[int, int] = {}
    ) -> None:
        """Fit what was measured.

        Args:
            step_ms: ms per step by case, phase and round.
            rows: of cases.csv or of a plan; without them what another launch adds is left out.
            launches: the launch of the workers by round, the first where it is not told.
        """
        self._columns = {column: place for place, column in enumerate(_connected(step_ms))}
        columns = [step_ms[column] for column in self._columns]
        rounds = sorted({r for by_round in columns for r in by_round})
        groups = _groups(self._columns, rows)
        shifts = None
        if groups:
            distinct = [*dict.fromkeys(groups)]
            shifts = Launches(
                [launches.get(r, 1) for r in rounds], [distinct.index(group) for group in groups]
            )
            if all(device_type == "cpu" for device_type, *_ in groups):
                times = [TIMES_USUAL.get(mode, 1.0) for _, mode, *_ in distinct]
                shifts = replace(shifts, times_usual=times, known=LAUNCH_SD, known_freedom=LAUNCH_FREEDOM)
        self._fit = _fitted(rounds, columns, shifts)

    @classmethod
    def of(
        cls,
        phases: Mapping[str, Mapping[str, ByRound]],
        rows: Iterable[Row] = (),
        launches: Mapping[int, int] = {},
    ) -> Typical:
        """From step times by phase, case and round; the others as of the class."""
        found = {(c, p): rounds for p in FITTED for c, rounds in phases.get(p, {}).items() if rounds}
        return cls(found, rows, launches)

    def has(self, *columns: Column) -> bool:
        """Whether all of these were measured, in rounds that connect them."""
        return all(column in self._columns for column in columns)

    def step_ms(self, case_id: str, phase: str = "timed") -> Interval:
        column = (case_id, phase)
        if not self.has(column):
            return UNKNOWN
        place = self._columns[column]
        return self._intervals([lambda log_ms: float(log_ms[place])], [place])[0].exp()

    def ratio(self, case_id: str, reference_id: str) -> Interval:
        """Step time of a case over that of another, with an interval of its own."""
        return self.ratios([(case_id, reference_id)])[0]

    def ratios(self, pairs: Sequence[tuple[str, str]]) -> list[Interval]:
        """Step time of the first case of each pair over the second's; all intervals hold at once with 95%."""
        known = [pair for pair in pairs if self.has(*((case_id, "timed") for case_id in pair))]
        places = [[self._columns[case_id, "timed"] for case_id in pair] for pair in known]
        used = sorted({place for pair in places for place in pair})
        intervals = self._intervals([_difference(*pair) for pair in places], used, together=True)
        found = dict(zip(known, intervals, strict=True))
        return [found[pair].exp() if pair in found else UNKNOWN for pair in pairs]

    def exposed_ms(self, case_id: str) -> Interval:
        """The step less the step under `no_sync`."""
        return self.difference_ms((case_id, "timed"), (case_id, "no_sync"))

    def difference_ms(self, column: Column, reference: Column) -> Interval:
        """The step of one column less that of another."""
        if not self.has(column, reference):
            return UNKNOWN
        step, other = (self._columns[one] for one in (column, reference))
        found = self._intervals(
            [lambda log_ms: math.exp(log_ms[step]) - math.exp(log_ms[other])], [step, other]
        )
        return found[0]

    def hidden_pct(self, case_id: str) -> Interval:
        """100 x (1 - exposed / communication alone)."""
        columns = [(case_id, phase) for phase in FITTED]
        if not self.has(*columns):
            return UNKNOWN
        step, local, comm = (self._columns[column] for column in columns)

        def hidden(log_ms: Array) -> float:
            exposed = math.exp(log_ms[step]) - math.exp(log_ms[local])
            return 100 * (1 - exposed / math.exp(log_ms[comm]))

        return self._intervals([hidden], [step, local, comm])[0]

    def _intervals(
        self, functions: Sequence[Function], columns: Sequence[int], *, together: bool = False
    ) -> list[Interval]:
        if self._fit is None or not functions:
            return []
        return self._fit.intervals(functions, columns=columns, together=together)


def _difference(first: int, second: int) -> Function:
    return lambda log_ms: float(log_ms[first] - log_ms[second])


def _groups(columns: Collection[Column], rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """By column what one launch shifts alike: a mode on so many devices, whatever DDP's settings.

    None where a case is not among `rows`.
    """
    names = ("device_type", "mode", "num_devices", "compile")
    group = {str(row["case_id"]): tuple(str(row.get(name)) for name in names) for row in rows}
    if not group.keys() >= {case_id for case_id, _ in columns}:
        return []
    # An all-reduce by itself does not compute.
    return [(*group[case_id], "comm" * (phase == "comm")) for case_id, phase in columns]


def _fitted(rounds: Sequence[int], columns: Sequence[ByRound], launches: Launches | None) -> TwoWayFit | None:
    if not rounds:
        return None
    place = {r: row for row, r in enumerate(rounds)}
    step_ms = np.full((len(rounds), len(columns)), math.nan)
    for column, by_round in enumerate(columns):
        for r, ms in by_round.items():
            step_ms[place[r], column] = ms
    return fit(step_ms, launches)


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
