"""Runs that repeat one another: how far apart they lie, and how many of their intervals hold that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev

from ..results.case_result import CaseResult
from ..results.comparisons import Comparison, over_eager
from ..stats.interval import Interval
from ..stats.two_runs import common_value
from .numbers import plural, short_percent
from .wording import case_label

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


def ratios_of(cases: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> dict[str, Interval]:
    """The answers of a run and the speed-ups of its cases that have their devices for themselves."""
    own = _own(cases)
    names = {case.case_id: case_label(case) for case in own}
    across = over_eager(comparisons, own)
    found = {
        f"{names[one.case_id]} / {names[one.reference_id]}": one.ratio
        for one in comparisons
        if one not in across and {one.case_id, one.reference_id} <= names.keys()
    }
    for case in own:
        if case.mode != "single" and case.speedup is not None and not case.is_stand_in:
            found[f"{names[case.case_id]} / single"] = case.speedup
    return found


def rates_of(cases: Sequence[CaseResult]) -> dict[str, Interval]:
    """The throughputs of the same cases."""
    return {case_label(case): case.images_per_s for case in _own(cases) if case.images_per_s is not None}


def _own(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """The measured cases that have their devices for themselves."""
    return [case for case in cases if case.is_ok and not case.oversubscribed]


AGAIN = "not known: run the same command twice more, and this line says how far apart the runs lie"


def evidence(
    cases: Sequence[CaseResult],
    comparisons: Sequence[Comparison],
    earlier: Sequence[tuple[Sequence[CaseResult], Sequence[Comparison]]],
) -> str:
    """What runs of the same plan on this machine, this one and `earlier` ones, tell of another run."""
    runs = [*earlier, (cases, comparisons)]
    ratios = agreements(ratios_of(*run) for run in runs)
    rates = agreements(rates_of(table) for table, _ in runs)
    if not rates:
        return AGAIN
    held, total = sum(one.holding for one in ratios), sum(one.num_runs for one in ratios)
    others = plural(len(runs) - 1, "earlier run")
    apart = f", ratios {_typical(ratios)}" if ratios else ""
    hold = f"; {held} of {total} intervals of ratios hold the common value" if ratios else ""
    return f"with {others} of this plan: rates {_typical(rates)}{apart} apart (standard deviation){hold}"


def _typical(found: Sequence[Agreement]) -> str:
    least, most = (short_percent(extreme(one.scatter for one in found)) for extreme in (min, max))
    return least if least == most else f"{least} to {most}"
