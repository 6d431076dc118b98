"""A verdict for one metric of one case, of its figures in two runs."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import scipy
from msgspec.structs import replace

from ..manifest import Count, Record
from ..results.column_types import Metric
from ..results.round_times import ByRound
from ..results.schema import GATED
from ..settings import IMAGES
from ..stats.interval import Interval, median_interval
from ..stats.two_runs import difference_of_runs, ratio_of_runs, variance_between
from .runs import LAUNCH, GateCase

MIN_ROUNDS = 3
"""Fewer rounds say nothing of their own spread."""

Verdict: TypeAlias = Literal[
    "regressed", "missing", "not comparable", "inconclusive", "unchanged", "improved"
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""Worst first."""

DECIDED = ("improved", "unchanged")
"""Verdicts with which a gate can pass."""


class Comparison(Record, frozen=True, omit_defaults=False):
    """One metric of one case; without a metric, the whole case."""

    case_id: str
    stand_in: bool
    """Whether CPU cores stood in for GPUs in DP."""
    metric: str | None
    """A column of cases.csv; null where the whole case is missing."""
    verdict: Verdict
    reason: str = ""
    baseline: float | None = None
    """What is typical of its rounds, in the metric's unit."""
    candidate: float | None = None
    units: tuple[str, str] = (
        IMAGES,
        IMAGES,
    )
    """What throughput counts, in the baseline and the candidate."""
    ratio: Interval | None = None
    """Candidate / baseline; of exposed communication 1 + candidate less baseline over the baseline's step.

    Without ends where nothing was repeated (peak memory).
    """
    threshold: float | None = None
    """The change that matters, a fraction."""
    num_rounds: tuple[Count, Count] | None = None
    suspected: bool = False
    """A regression that may be the machine's; reason says why."""

    @property
    def column(self) -> Metric | None:
        return None if self.metric is None else GATED[self.metric]

    @property
    def is_repeated(self) -> bool:
        """Whether it is of a metric that every round gives."""
        return self.column is not None and self.column.repeated


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

    `blocked` says why figures must not be compared. Figures of `interleaved` runs are compared round by
    round, those of others as each run fitted them, with how much each run changed within itself.
    """
    before, after = ours.rounds[metric.name], theirs.rounds[metric.name]
    measured = Comparison(
        case_id=ours.case_id,
        stand_in="cpu_standin" in (ours.row.get("impl"), theirs.row.get("impl")),
        metric=metric.name,
        verdict="not comparable",
        baseline=statistics.median(before.values()),
        candidate=statistics.median(after.values()),
        units=(ours.unit, theirs.unit),
        threshold=threshold,
        num_rounds=(len(before), len(after)),
    )
    if blocked:
        return replace(measured, reason=blocked)
    judged = functools.partial(_judged, metric=metric, threshold=threshold)
    if not metric.repeated:
        return judged(measured, Interval(after[0] / before[0], math.nan, math.nan))
    if (fewest := min(len(before), len(after))) < MIN_ROUNDS:
        return replace(measured, reason=f"{fewest} rounds, needs {MIN_ROUNDS}")
    steps = ours.rounds[metric.in_parts_of] if metric.in_parts_of else None
    if interleaved:
        ratio, (baseline, candidate) = _in_turns(before, after, steps, confidence)
        return judged(replace(measured, baseline=baseline, candidate=candidate), ratio)
    left, right = ([value for _, value in sorted(rounds.items())] for rounds in (after, before))
    fits = theirs.fitted.get(metric.name), ours.fitted.get(metric.name)
    if all(fits):
        candidate, baseline = (fit.estimate for fit in fits if fit)
        measured = replace(measured, baseline=baseline, candidate=candidate)
    if steps is None:
        ways = ratio_of_runs(fits, (left, right), confidence=confidence)
    else:
        fitted = ours.fitted.get(metric.in_parts_of)
        step = fitted.estimate if fitted else statistics.median(steps.values())
        differences = difference_of_runs(fits, (left, right), confidence=confidence)
        ways = _one_and(differences[0], step), _one_and(differences[1], step)
    # By their rounds, and with how much each run changed within itself.
    alone, whole = (judged(measured, way) for way in ways)
    if whole.verdict != "inconclusive" or alone.verdict not in ("regressed", "improved"):
        return whole
    suspected = alone.verdict == "regressed"
    return replace(whole, reason="the runs themselves changed as much", suspected=suspected)


def _one_and(difference: Interval, of: float) -> Interval:
    """One and a difference in parts of something, so that it is judged as ratios are."""
    return Interval(*(1 + end / of for end in (difference.estimate, difference.low, difference.high)))


def _judged(measured: Comparison, ratio: Interval, *, metric: Metric, threshold: float) -> Comparison:
    verdict = judge(ratio, higher_is_better=metric.higher_is_better, threshold=threshold)
    before, after = measured.baseline, measured.candidate
    if before is not None and after is not None and abs(after - before) < metric.least_change:
        verdict = "unchanged"
    if verdict != "inconclusive":
        reason = "" if metric.repeated else "one reading, no interval"
    elif ratio.excludes(1.0):
        reason = f"a change, but not clearly beyond {100 * threshold:g}%"
    else:
        reason = "the interval is too wide"
    return replace(measured, verdict=verdict, reason=reason, ratio=ratio)


def _in_turns(
    before: ByRound, after: ByRound, steps: ByRound | None, confidence: float
) -> tuple[Interval, tuple[float, float]]:
    """Compare runs that took turns in pairs of rounds; with what of both sides the ratio is of.

    `steps`, of the baseline, are what differences are in parts of.
    """
    if steps is None:
        ratio = launch_ratio(after, before, confidence=confidence)
        candidate, baseline = typical_sides(after, before, ratio.estimate)
        return ratio, (baseline, candidate)
    common = before.keys() & after.keys() & steps.keys()
    ratio = launch_median({r: 1 + (after[r] - before[r]) / steps[r] for r in common}, confidence=confidence)
    baseline = statistics.median(before.values())
    return ratio, (baseline, baseline + (ratio.estimate - 1) * statistics.median(steps.values()))


def launch_ratio(
    numerator: Mapping[int, float], denominator: Mapping[int, float], *, confidence: float
) -> Interval:
    """Median of the within-round ratios of all launches."""
    rounds = numerator.keys() & denominator.keys()
    return launch_median({r: numerator[r] / denominator[r] for r in rounds}, confidence=confidence)


def launch_median(by_round: Mapping[int, float], *, confidence: float) -> Interval:
    """Median over the rounds of all launches; its interval holds the spread between launches too.

    The normal interval of that spread (`variance_between`) is added in quadrature to that of the rounds. Few
    launches know it roughly: where they differ by more than their rounds do, a 95% interval of three covers
    87%, of five 89% (simulated); `tests/benchmarks/gate_power.py` tests the gate as a whole.
    """
    pooled = median_interval([*by_round.values()], confidence=confidence)
    launches: dict[int, list[float]] = {}
    for r in sorted(by_round):
        launches.setdefault(r // LAUNCH, []).append(by_round[r])
    if len(launches) < 2 or math.isnan(pooled.low):
        return pooled
    between = variance_between([*launches.values()])
    beyond = float(scipy.stats.norm.ppf((1 + confidence) / 2)) ** 2 * between / len(launches)
    low = pooled.estimate - math.hypot(pooled.estimate - pooled.low, math.sqrt(beyond))
    high = pooled.estimate + math.hypot(pooled.high - pooled.estimate, math.sqrt(beyond))
    return Interval(pooled.estimate, low, high)


def typical_sides(numerator: ByRound, denominator: ByRound, ratio: float) -> tuple[float, float]:
    """Numerator and denominator of a typical round, whose quotient is `ratio`.

    Medians of the sides by themselves can contradict the median of the ratios within rounds. So the level
    that both share is estimated, the median of their geometric means, and divided by the ratio. Positive
    figures.
    """
    common = numerator.keys() & denominator.keys()
    level = statistics.median(math.sqrt(numerator[r]) * math.sqrt(denominator[r]) for r in common)
    return level * math.sqrt(ratio), level / math.sqrt(ratio)


def judge(ratio: Interval, *, higher_is_better: bool, threshold: float) -> Verdict:
    """`regressed`, `improved`, `unchanged` or `inconclusive`, for candidate / baseline with its interval.

    Without ends (nothing was repeated) the ratio is taken as exact.
    """
    exact = math.isnan(ratio.low)
    change = ratio.estimate - 1
    if abs(change) > threshold and (exact or ratio.excludes(1.0)):
        return "improved" if (change > 0) == higher_is_better else "regressed"
    low, high = (ratio.estimate, ratio.estimate) if exact else (ratio.low, ratio.high)
    return "unchanged" if low >= 1 - threshold and high <= 1 + threshold else "inconclusive"
