"""A verdict for one metric of one case, of its figures in two runs."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from ddp_bench.bench.gate.launches import launch_median, launch_ratio, typical_sides
from ddp_bench.bench.gate.runs import GateCase
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.settings import IMAGES
from ddp_bench.bench.stats import Interval, ratio_of_runs

MIN_ROUNDS = 3
"""Fewer rounds say nothing of their own spread."""

VERDICTS = ("regressed", "missing", "not comparable", "inconclusive", "unchanged", "improved")
"""Worst first."""

DECIDED = ("improved", "unchanged")
"""Verdicts with which a gate can pass."""


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
    least_change: float = 0.0
    """Differences below this, in its own unit, are none."""


METRICS = (
    Metric(name="images_per_s", label="throughput", higher_is_better=True, absolute=True),
    Metric(name="speedup", label="speed-up", higher_is_better=True),
    Metric(name="efficiency", label="efficiency", higher_is_better=True),
    Metric(name="exposed_comm_ms", label="exposed communication", higher_is_better=False, absolute=True),
    Metric(
        name="peak_mem_mib",
        label="peak memory",
        higher_is_better=False,
        absolute=True,
        repeated=False,
        least_change=1.0,  # MiB: allocators and the C library round by about as much
    ),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One metric of one case; without a metric, the whole case. Estimates are in the metric's unit."""

    case_id: str
    stand_in: bool
    metric: Metric | None
    verdict: str
    reason: str = ""
    baseline: float | None = None
    candidate: float | None = None
    units: tuple[str, str] = (IMAGES, IMAGES)
    """What throughput counts in the baseline and in the candidate; the same where it is compared."""
    ratio: Interval | None = None
    """Candidate / baseline; without ends where nothing was repeated (peak memory)."""
    threshold: float | None = None
    num_rounds: tuple[int, int] | None = None
    suspected: bool = False
    """Whether its rounds alone would make it a regression, but the runs themselves changed as much."""


def compare_metric(
    ours: GateCase,
    theirs: GateCase,
    metric: Metric,
    *,
    confidence: float,
    threshold: float,
    blocked: str,
    interleaved: bool,
) -> Comparison:
    """Judge a metric of a case in the baseline (`ours`) and the candidate (`theirs`).

    `blocked` says why figures must not be compared. Figures of `interleaved` runs are divided round by round,
    those of others as each run fitted them, with how much each run changed within itself.
    """
    before, after = values(ours, metric), values(theirs, metric)
    measured = Comparison(
        case_id=ours.case_id,
        stand_in="cpu_standin" in (ours.row.get("impl"), theirs.row.get("impl")),
        metric=metric,
        verdict="",
        baseline=statistics.median(before.values()),
        candidate=statistics.median(after.values()),
        units=(ours.unit, theirs.unit),
        threshold=threshold,
        num_rounds=(len(before), len(after)),
    )
    if blocked:
        return replace(measured, verdict="not comparable", reason=blocked)
    if metric.repeated and (fewest := min(len(before), len(after))) < MIN_ROUNDS:
        return replace(measured, verdict="not comparable", reason=f"{fewest} rounds, needs {MIN_ROUNDS}")
    judged = functools.partial(_judged, metric=metric, threshold=threshold)
    if interleaved and metric.repeated:
        ratio, (candidate, baseline) = _in_turns(after, before, confidence)
        return judged(replace(measured, baseline=baseline, candidate=candidate), ratio)
    if not metric.repeated:
        return judged(measured, Interval(after[0] / before[0], math.nan, math.nan))
    fits = theirs.fitted.get(metric.name), ours.fitted.get(metric.name)
    return _separate(judged, measured, (after, before), fits, confidence)


def _separate(
    judged: Callable[[Comparison, Interval], Comparison],
    measured: Comparison,
    rounds: tuple[ByRound, ByRound],
    fits: tuple[Interval | None, Interval | None],
    confidence: float,
) -> Comparison:
    """Judge two runs by what each fitted over its rounds, and by how much each changed within itself.

    `rounds` and `fits` are of the candidate and the baseline.
    """
    left, right = ([value for _, value in sorted(by_round.items())] for by_round in rounds)
    if all(fit is not None and fit.estimate > 0 for fit in fits):
        candidate, baseline = (None if fit is None else fit.estimate for fit in fits)
        measured = replace(measured, baseline=baseline, candidate=candidate)
    by_rounds, whole = (
        judged(measured, r) for r in ratio_of_runs(fits, (left, right), confidence=confidence)
    )
    if whole.verdict != "inconclusive" or by_rounds.verdict not in ("regressed", "improved"):
        return whole
    suspected = by_rounds.verdict == "regressed"
    return replace(whole, reason="the runs themselves changed as much", suspected=suspected)


def _judged(measured: Comparison, ratio: Interval, *, metric: Metric, threshold: float) -> Comparison:
    verdict = judge(ratio, higher_is_better=metric.higher_is_better, threshold=threshold)
    before, after = measured.baseline, measured.candidate
    if before is not None and after is not None and abs(after - before) < metric.least_change:
        verdict = "unchanged"
    return replace(measured, verdict=verdict, reason=_why(verdict, ratio, threshold, metric), ratio=ratio)


def _in_turns(
    numerator: ByRound, denominator: ByRound, confidence: float
) -> tuple[Interval, tuple[float, float]]:
    """The ratio of runs that took turns, and what it is of, with that quotient.

    Rounds are compared in pairs, as quotients; where figures are not positive, such as exposed communication,
    as differences in parts of the denominator's median.
    """
    figures = [*numerator.values()], [*denominator.values()]
    if min(map(min, figures)) > 0:
        ratio = launch_ratio(numerator, denominator, confidence=confidence)
        return ratio, typical_sides(numerator, denominator, ratio.estimate)
    median = statistics.median(figures[1])
    differences = {r: numerator[r] - denominator[r] for r in numerator.keys() & denominator.keys()}
    found, unit = launch_median(differences, confidence=confidence), abs(median) or math.nan
    ratio = Interval(*(1 + end / unit for end in (found.estimate, found.low, found.high)))
    return ratio, (median + found.estimate, median)


def is_compared(ours: GateCase, theirs: GateCase, metric: Metric) -> bool:
    """Whether both runs measured it: a pass that one of them left out says nothing of its speed."""
    return bool(values(ours, metric)) and bool(values(theirs, metric))


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


def _why(verdict: str, ratio: Interval, threshold: float, metric: Metric) -> str:
    """Why a verdict of `judge` is what it is; empty where that is plain."""
    if verdict != "inconclusive":
        return "" if metric.repeated else "one reading, no interval"
    if math.isinf(ratio.high):
        return "the baseline cannot be told from 0"
    if ratio.excludes(1.0):
        return f"a change, but not clearly beyond {100 * threshold:g}%"
    return "the interval is too wide"
