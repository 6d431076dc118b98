"""How far launches of one command lie apart, and whether intervals hold it: docs/measuring.md, recomputed."""

import csv
import math
from collections import defaultdict
from functools import cache
from statistics import fmean, variance

import numpy as np
import pytest
import scipy
from accuracy_tables import LAUNCHES
from commands import ROOT

from ddp_bench.bench.stats.fit import FittedSteps, fit_two_way
from ddp_bench.bench.stats.interval import estimate_common_value

PAGE = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
SERIES = ("A", "B", "C")
CAPS = ("default", "1", "25", "100")
ROWS = {
    "DDP over DP": [("dp", "default")],
    "DDP over `single`, four caps": [("single", cap) for cap in CAPS],
    "DP over `single`": [("single", "dp")],
    "three caps over DDP's default": [("default", cap) for cap in CAPS[1:]],
}
"""Ratios by the row of the page: step time of the first over that of the second."""

LEAST = 10
"""Rounds of a launch: fewer say little of where it lies."""


@cache
def runs(series):
    """Of each run the launch of each round, and by case the step of each round, ms."""
    found = defaultdict(lambda: ({}, defaultdict(dict)))
    with LAUNCHES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name, r = row.pop("run"), int(row.pop("round"))
            launches, steps = found[name]
            launches[r] = int(row.pop("launch"))
            for case, ms in row.items():
                if ms:
                    steps[case][r] = float(ms)
    return [run for name, run in found.items() if name.startswith(f"{series}/")]


def each_launch(series):
    """The rounds of every launch as a table of columns by case."""
    for launches, steps in runs(series):
        for one in sorted(set(launches.values())):
            rounds = [r for r, launch in launches.items() if launch == one]
            if len(rounds) >= LEAST:
                yield {case: [ms.get(r, math.nan) for r in rounds] for case, ms in steps.items()}


@cache
def fits(series):
    """Of every launch the cases and their fit."""
    return [(list(columns), fit_two_way(np.array([*columns.values()]).T)) for columns in each_launch(series)]


def apart(series, first, second):
    """Standard deviation between launches beyond that of their rounds, percent; NaN where not measured."""
    found = []
    for cases, fitted in fits(series):
        if first not in cases or second not in cases:
            return math.nan
        places = cases.index(first), cases.index(second)
        found.append(fitted.estimate(lambda log_ms: log_ms[0] - log_ms[1], *places))
    noise = fmean(one.error**2 for one in found)
    return 100 * math.sqrt(max(variance([one.value for one in found]) - noise, 0.0))


@pytest.mark.parametrize("row", ROWS)
def test_the_page_says_how_far_launches_lie_apart(row):
    cells = []
    for series in SERIES:
        known = [f"{sd:.1f}" for pair in ROWS[row] if not math.isnan(sd := apart(series, *pair))]
        low, high = min(known, key=float), max(known, key=float)
        cells.append(low if low == high else f"{low} to {high}")
    assert f"| {row} | {' | '.join(cells)} |" in PAGE


def ratios(steps):
    """The intervals of a run, by its rounds."""
    fitted = FittedSteps({(case, "timed"): ms for case, ms in steps.items()})
    return {
        pair: fitted.estimate_ratios([pair])[0]
        for pairs in ROWS.values()
        for pair in pairs
        if all(case in steps for case in pair)
    }


def held(series):
    """Of each run the share of its intervals that hold what the runs of the series have in common."""
    found = [ratios(steps) for _, steps in runs(series)]
    common = {pair: estimate_common_value([one[pair] for one in found]) for pair in found[0]}
    return [fmean(not one.is_clear_of(common[pair]) for pair, one in each.items()) for each in found]


def test_the_page_says_how_many_intervals_hold_the_common_value():
    """Too few for what another run brings, which no interval promises; runs are what repeats."""
    assert {len(runs(series)) for series in SERIES} == {20}, "as the page says"
    each = [held(series) for series in SERIES]
    cells = [f"{100 * fmean(shares):.0f}%" for shares in each]
    assert f"| intervals that contain the mean of the runs | {' | '.join(cells)} |" in PAGE
    alone = [share for shares in each for share in shares]
    assert scipy.stats.ttest_1samp(alone, 0.95, alternative="less").pvalue < 0.05
