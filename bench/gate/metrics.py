"""What the gate looks at in a case, in which direction it is better, and how a change is judged. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.gate.runs import GateCase
from bench.results.round_times import ByRound
from bench.stats import Interval


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of cases.csv in which one direction is better."""

    name: str
    label: str
    higher_is_better: bool
    absolute: bool = False
    """Whether it depends on the machine; a ratio inside one run does so less."""
    repeated: bool = True
    """Whether every round gives one; otherwise it is compared exactly, without an interval."""


METRICS = (
    Metric(name="images_per_s", label="images/s", higher_is_better=True, absolute=True),
    Metric(name="speedup", label="speed-up", higher_is_better=True),
    Metric(name="efficiency", label="efficiency", higher_is_better=True),
    Metric(name="exposed_comm_ms", label="exposed communication", higher_is_better=False, absolute=True),
    Metric(name="peak_mem_mib", label="peak memory", higher_is_better=False, absolute=True, repeated=False),
)


def values(case: GateCase, metric: Metric) -> ByRound:
    """One figure per round, in the metric's unit; empty where the case does not have it."""
    if metric.name == "peak_mem_mib":
        return {} if case.peak_mem_mib is None else {0: case.peak_mem_mib}
    if metric.name == "efficiency":
        return {r: ratio / int(case.row["num_devices"]) for r, ratio in case.speedup.items()}
    by_round: ByRound = getattr(case, metric.name)
    return by_round


def judge(ratio: Interval, *, higher_is_better: bool, threshold: float) -> str:
    """`regressed`, `improved`, `unchanged` or `inconclusive`, for candidate / baseline with its interval.

    Without ends (nothing was repeated) the ratio is taken as exact.
    """
    exact = math.isnan(ratio.low)
    change = ratio.estimate - 1
    if abs(change) > threshold and (exact or ratio.excludes(1.0)):
        return "improved" if (change > 0) == higher_is_better else "regressed"
    low, high = (ratio.estimate, ratio.estimate) if exact else (ratio.low, ratio.high)
    return "unchanged" if low >= 1 - threshold and high <= 1 + threshold else "inconclusive"


def why(verdict: str, ratio: Interval, threshold: float, metric: Metric) -> str:
    """Why a verdict of `judge` is what it is; empty where that is plain."""
    if verdict != "inconclusive":
        return "" if metric.repeated else "one reading, no interval"
    if math.isinf(ratio.high):
        return "the baseline cannot be told from 0"
    if ratio.excludes(1.0):
        return f"a change, but not clearly beyond {100 * threshold:g}%"
    return "the interval is too wide"
