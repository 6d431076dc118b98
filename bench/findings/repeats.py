"""Runs that repeat one another: how far apart they lie, and how many of their intervals hold that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

import pandas as pd

from ..results.comparisons import Comparison, over_eager
from ..results.schema import records
from ..stats.interval import Interval
from ..stats.two_runs import common_value
from .numbers import plural, short_percent
from .wording import case_label, estimate, is_stand_in, text, truth

LEAST_RUNS = 3
"""Two agree or not; they have no scatter to hold their intervals against."""


@dataclass(frozen=True)
class Agreement:
    """A ratio, or a rate, in several runs."""

    name: str
    common: float
    """What the runs have in common."""
    scatter: float
    """Standard deviation of the runs, a share."""
    half_width: float
    """Of a typical run's interval, a share."""
    holding: int
    """Runs whose interval holds the common value."""
    num_runs: int


def agreements(runs: Iterable[Mapping[str, Interval]]) -> list[Agreement]:
    """By name, of what at least `LEAST_RUNS` runs know with an interval."""
    found: dict[str, list[Interval]] = {}
    for run in runs:
        for name, value in run.items():
            if not math.isnan(value.low):
                found.setdefault(name, []).append(value)
    return [_agreement(name, values) for name, values in found.items() if len(values) >= LEAST_RUNS]


def _agreement(name: str, values: Sequence[Interval]) -> Agreement:
    common = common_value(values)
    return Agreement(
        name=name,
        common=common,
        scatter=stdev(math.log(one.estimate) for one in values),
        half_width=median(one.half_width for one in values),
        holding=sum(not one.excludes(common) for one in values),
        num_runs=len(values),
    )


def _own_rows(cases: pd.DataFrame) -> list[dict[Any, Any]]:
    """Of the measured cases that have their devices for themselves."""
    return [row for row in records(cases) if row["status"] == "ok" and not truth(row["oversubscribed"])]


def ratios_of(cases: pd.DataFrame, comparisons: Sequence[Comparison]) -> dict[str, Interval]:
    """The answers of a run and the speed-ups of its cases that have their devices for themselves."""
    return dict(_ratios(cases, comparisons))


def _ratios(cases: pd.DataFrame, comparisons: Sequence[Comparison]) -> Iterator[tuple[str, Interval]]:
    rows = _own_rows(cases)
    names = {text(row["case_id"]): case_label(row) for row in rows}
    across = over_eager(comparisons, rows)
    for one in comparisons:
        if one not in across and {one.case_id, one.reference_id} <= names.keys():
            yield f"{names[one.case_id]} / {names[one.reference_id]}", one.ratio
    for row in rows:
        speedup = estimate(row, "speedup")
        if text(row["mode"]) != "single" and speedup is not None and not is_stand_in(row):
            yield f"{names[text(row['case_id'])]} / single", speedup


def rates_of(cases: pd.DataFrame) -> dict[str, Interval]:
    """The throughputs of the same cases."""
    found = {case_label(row): estimate(row, "images_per_s") for row in _own_rows(cases)}
    return {name: rate for name, rate in found.items() if rate is not None}


AGAIN = "run the same command again, three runs in all, and this line says how far apart they lie"


def evidence(
    cases: pd.DataFrame,
    comparisons: Sequence[Comparison],
    earlier: Sequence[tuple[pd.DataFrame, Sequence[Comparison]]],
) -> str:
    """What runs of the same plan on this machine, this one and `earlier` ones, tell of another run."""
    runs = [*earlier, (cases, comparisons)]
    ratios = agreements(ratios_of(*run) for run in runs)
    rates = agreements(rates_of(table) for table, _ in runs)
    if not rates:
        return f"What another run gives is not known: {AGAIN}"
    said = [f"{plural(len(runs) - 1, 'earlier run')} of this plan here and this one: "]
    if ratios:
        held, total = sum(one.holding for one in ratios), sum(one.num_runs for one in ratios)
        said.append(f"{held} of {total} intervals of ratios hold what the runs have in common, ")
        said.append(f"ratios lie {_typical(ratios)} apart, ")
    return "".join([*said, f"rates {_typical(rates)} (standard deviation)"])


def _typical(found: Sequence[Agreement]) -> str:
    least, most = (short_percent(extreme(one.scatter for one in found)) for extreme in (min, max))
    return least if least == most else f"{least} to {most}"
