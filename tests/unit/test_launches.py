"""How far launches of one command lie apart, recomputed from recorded rounds: docs/measuring.md."""

import math
from statistics import fmean, variance

import numpy as np
import pytest
from accuracy_tables import LAUNCHES, rounds
from commands import ROOT

from ddp_bench.bench.stats.interval import ONE_SIGMA
from ddp_bench.bench.stats.one_run import fit

PAGE = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
SERIES = ("A", "B", "C")
ROWS = {
    "DDP over DP": [("dp", "default")],
    "DDP over `single`, four caps": [("single", cap) for cap in ("default", "1", "5", "25", "100")],
    "DP over `single`": [("single", "dp")],
    "three caps over DDP's default": [("default", cap) for cap in ("1", "5", "25", "100")],
}
"""Ratios by the row of the page: step time of the first over that of the second."""


def launches(series):
    return [by_case for run, by_case in rounds(LAUNCHES).items() if run.startswith(f"{series}/s")]


def apart(runs, first, second):
    """Standard deviation between launches beyond that of their rounds, percent; NaN where not measured."""
    found = []
    for by_case in runs:
        if first not in by_case or second not in by_case:
            return math.nan
        cases = list(by_case)
        every = sorted({r for by_round in by_case.values() for r in by_round})
        table = np.array([[by_case[case].get(r, math.nan) for case in cases] for r in every])
        one, other = cases.index(first), cases.index(second)
        found += fit(table).intervals(
            [lambda log_ms, one=one, other=other: log_ms[one] - log_ms[other]], confidence=ONE_SIGMA
        )
    noise = fmean(((one.high - one.low) / 2) ** 2 for one in found)
    return 100 * math.sqrt(max(variance([one.estimate for one in found]) - noise, 0.0))


@pytest.mark.parametrize("row", ROWS)
def test_the_page_says_how_far_launches_lie_apart(row):
    cells = []
    for series in SERIES:
        known = [f"{sd:.1f}" for pair in ROWS[row] if not math.isnan(sd := apart(launches(series), *pair))]
        low, high = min(known, key=float), max(known, key=float)
        cells.append(low if low == high else f"{low} to {high}")
    assert f"| {row} | {' | '.join(cells)} |" in PAGE
