"""Runs that repeat one another: how far apart they lie, and how many of their intervals hold that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import stdev
from typing import Any, NamedTuple

from ..common.numbers import plural, short_percent
from ..results.case_result import CaseResult
from ..results.comparisons import Comparison
from ..stats.interval import Interval, common_value

LEAST_RUNS = 3
"""Two agree or not; they have no scatter to hold their intervals against."""

UNKNOWN = "unknown; run the same command twice more to find out"


class Agreement(NamedTuple):
    """A ratio, or a rate, in several runs."""

    scatter: float
    """Standard deviation of the runs, a share."""
    holding: int
    """Runs whose interval holds the value that they have in common."""
    num_runs: int


def agreements(runs: Iterable[Mapping[Any, Interval]]) -> list[Agreement]:
    """By name, of what at least `LEAST_RUNS` runs know with an interval."""
    found: dict[Any, list[Interval]] = {}
    for run in runs:
        for name, value in run.items():
            if not math.isnan(value.low):
                found.setdefault(name, []).append(value)
    return [
        Agreement(
            scatter=stdev(math.log(one.estimate) for one in values),
            holding=sum(not one.excludes(common) for one in values),
            num_runs=len(values),
        )
        for values in found.values()
        if len(values) >= LEAST_RUNS and (common := common_value(values))
    ]


def _values(
    cases: Iterable[CaseResult], comparisons: Iterable[Comparison]
) -> tuple[dict[Any, Interval], dict[Any, Interval]]:
    """Return the ratios and rates of a run's cases that have their devices for themselves."""
    own = {case.case_id: case for case in cases if case.is_ok and not case.oversubscribed}
    pairs = {(one.case_id, one.reference_id): one.ratio for one in comparisons}
    ranked = (case for case in own.values() if case.mode != "single" and case.is_ranked)
    ratios = {pair: ratio for pair, ratio in pairs.items() if own.keys() >= {*pair}}
    speedups = {case.case_id: case.speedup for case in ranked if case.speedup}
    return ratios | speedups, {i: case.images_per_s for i, case in own.items() if case.images_per_s}


def describe_repeatability(
    cases: Sequence[CaseResult],
    comparisons: Sequence[Comparison],
    earlier: Sequence[tuple[Sequence[CaseResult], Sequence[Comparison]]],
) -> str:
    """Say what runs of the same plan on this machine, this one and `earlier` ones, tell of another run."""
    runs = [*earlier, (cases, comparisons)]
    ratios, rates = map(agreements, zip(*(_values(*run) for run in runs), strict=True))
    if not rates:
        return UNKNOWN
    apart = hold = ""
    if ratios:
        held, total = sum(one.holding for one in ratios), sum(one.num_runs for one in ratios)
        apart = f", ratios {_typical(ratios)}"
        share = f"{short_percent(held / total)} where 95% are meant to"
        hold = f"; {held} of {total} intervals of ratios hold the common value, {share}"
    others = plural(len(runs) - 1, "earlier run")
    return f"with {others} of this plan: rates {_typical(rates)}{apart} apart (standard deviation){hold}"


def _typical(found: Sequence[Agreement]) -> str:
    least, most = (short_percent(extreme(one.scatter for one in found)) for extreme in (min, max))
    return least if least == most else f"{least} to {most}"
