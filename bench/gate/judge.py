"""A verdict for one metric of one case; of a whole gate `decide.py` decides."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from msgspec.structs import replace

from ..findings.wording import label_case, name_case, name_case_parts
from ..machine.records import Count, Record
from ..plan.case import STAND_IN
from ..plan.settings import IMAGES
from ..results.case_columns import GATED_METRICS
from ..results.columns import Metric
from ..results.comparisons import FASTER, SLOWER, classify_ratio
from ..results.metrics import EXPOSED_COMM
from ..stats.fit import estimate_difference
from ..stats.interval import Estimate, Interval, add_between_run_variance, average_launches
from .runs import GateCase, Rounds

Verdict: TypeAlias = Literal[
    "regressed",
    "missing",
    "not comparable",
    "undecided",
    "informational",
    "no regression",
    "improved",
    "not gated",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""Worst first."""

RULES = {
    "regressed": "the whole interval is {worse} 0%, and the estimate is {worse} {limit}",
    "improved": "the whole interval is {better} 0%, and the estimate is {better} {gain}",
    "no regression": "the whole interval is {better} {limit}",
    "undecided": "the interval cannot rule out a change {worse} {limit}, nor confirm one",
}
"""Rule for each verdict on a metric that every round gives."""


@dataclass(frozen=True)
class EndErrors:
    """Probabilities that a change lies beyond the ends of its interval."""

    worse: float
    """Beyond the worse end, by which a case passes."""
    better: float
    """Beyond the better end, by which a case is a regression."""

    def compute_interval(self, found: Estimate, metric: Metric) -> Interval:
        """Return the interval of a change, higher or lower being better as the metric has it."""
        ends = (self.worse, self.better) if metric.higher_is_better else (self.better, self.worse)
        return found.compute_quantile_interval(*ends)

    def __str__(self) -> str:
        if self.worse == self.better:
            return f"hold with {100 * (1 - 2 * self.worse):.4g}% confidence"
        worse, better = (f"{100 * (1 - error):.4g}%" for error in (self.worse, self.better))
        return f"hold with {worse} confidence towards slower, and with {better} towards faster"


class Change(Record, frozen=True, omit_defaults=False):
    """The change of one metric of one case; without a metric, of the whole case."""

    case_id: str
    label: str
    """The case in a table: `DDP, 2 GPUs, cap default`."""
    name: str
    """The case in a sentence: `DDP on 2 GPUs`."""
    stand_in: bool
    """True where CPU cores stood in for GPUs in DP."""
    metric: str | None
    """A column of cases.csv; null where the whole case is missing."""
    verdict: Verdict
    reason: str = ""
    baseline: float | None = None
    """Typical value of its rounds, in the metric's unit."""
    candidate: float | None = None
    units: tuple[str, str] = (IMAGES, IMAGES)
    """Units that throughput counts, in the baseline and the candidate."""
    ratio: Interval | None = None
    """Candidate / baseline; of exposed communication 1 + candidate less baseline over the baseline's step.

    Without ends where nothing was repeated (peak memory).
    """
    threshold: float | None = None
    """The change that matters, a fraction."""
    num_rounds: tuple[Count, Count] | None = None
    error: float | None = None
    """Standard error of the ratio's logarithm; of exposed communication, of the ratio."""
    freedom: float | None = None
    """Its degrees of freedom; None where there are infinitely many."""
    suspected: bool = False
    """A regression that may be the machine's; reason says why."""
    decides: bool = False
    """True where it can fail the gate; else it is `informational` beyond the threshold."""

    @property
    def column(self) -> Metric | None:
        return None if self.metric is None else GATED_METRICS[self.metric]


def make_change(ours: GateCase, theirs: GateCase | None, verdict: Verdict, reason: str = "") -> Change:
    """Describe a case of the baseline and, where it is there, of the candidate."""
    before, after = ours.result, (theirs or ours).result
    is_one = theirs is None or ours.key == theirs.key  # not of a watched training with other settings
    return Change(
        case_id=before.case_id,
        label=label_case(before) if is_one else name_case_parts(before)[0],
        name=name_case(before) if is_one else name_case_parts(before)[0],
        stand_in=STAND_IN in (before.impl, after.impl),
        metric=None,
        verdict=verdict,
        reason=reason,
        units=(before.unit, after.unit),
        decides=True,
    )


def compare_metric(
    ours: GateCase,
    theirs: GateCase,
    metric: Metric,
    *,
    errors: EndErrors,
    threshold: float,
    obstacle: str,
    interleaved: bool,
    decides: bool = True,
) -> Change:
    """Judge a metric of a case in the baseline (`ours`) and the candidate (`theirs`).

    `obstacle` says why figures must not be compared; one that does not decide informs. Figures of
    `interleaved` runs are compared within rounds and launches, those of others as each run fitted them, with
    how much each run changed within itself.
    """
    before, after = ours.rounds[metric.name], theirs.rounds[metric.name]
    estimators = ours.result.exposed_by, theirs.result.exposed_by
    if metric.name == EXPOSED_COMM and not obstacle and len(set(estimators)) > 1:
        obstacle = "exposed communication is estimated by {} in the baseline, by {} in the candidate".format(
            *estimators
        )
    found = replace(
        make_change(ours, theirs, "not comparable", obstacle),
        metric=metric.name,
        baseline=_get_typical(ours, metric, as_fitted=not interleaved),
        candidate=_get_typical(theirs, metric, as_fitted=not interleaved),
        threshold=threshold,
        num_rounds=(len(before), len(after)),
        decides=decides,
    )
    if obstacle:
        return found
    if not metric.has_interval:
        (was,), (now,) = before.values(), after.values()
        found = _judge_ratio(found, Interval(now / was, math.nan, math.nan), metric)
    elif interleaved:
        difference, baseline, candidate = _pair_rounds(ours, theirs, metric)
        sides = replace(found, baseline=baseline, candidate=candidate)
        found = _judge_difference(sides, difference, metric, errors)
    else:
        found = _judge_difference(found, _subtract_fits(ours, theirs, metric), metric, errors)
    if has_shared_devices(ours, theirs):
        return replace(found, verdict="not gated", reason="its devices are shared")
    if not decides and found.verdict in ("regressed", "improved"):
        return replace(found, verdict="informational")
    return found


def _get_typical(case: GateCase, metric: Metric, *, as_fitted: bool) -> float:
    """Return a metric's typical value: by the run's fit, in which all figures agree, else of its rounds."""
    fit = case.fitted.get(metric.name) if as_fitted else None
    if fit is None:
        return statistics.median(case.rounds[metric.name].values())
    return fit.value if metric.relative_to else math.exp(fit.value)


def has_shared_devices(ours: GateCase, theirs: GateCase) -> bool:
    """Return whether devices are shared in the baseline or the candidate, which tells nothing of speed."""
    return ours.result.oversubscribed or theirs.result.oversubscribed


def _pair_rounds(ours: GateCase, theirs: GateCase, metric: Metric) -> tuple[Estimate, float, float]:
    """Estimate how interleaved sides differ, of pairs within rounds; and typical values of both."""
    before, after = ours.rounds[metric.name], theirs.rounds[metric.name]
    if metric.relative_to:
        steps = ours.rounds[metric.relative_to]
        common = before.keys() & after.keys() & steps.keys()
        found = estimate_launches({key: (after[key] - before[key]) / steps[key] for key in common})
        baseline = statistics.median(before.values())
        return found, baseline, baseline + found.value * statistics.median(steps.values())
    common = after.keys() & before.keys()
    found = estimate_launches({key: math.log(after[key] / before[key]) for key in common})
    candidate, baseline = find_typical_sides(after, before, math.exp(found.value))
    return found, baseline, candidate


def _subtract_fits(ours: GateCase, theirs: GateCase, metric: Metric) -> Estimate | None:
    """Subtract the fits of separate runs, widened by how much each changed within itself; None without."""
    if metric.name not in ours.fitted or metric.name not in theirs.fitted:
        return None
    alone, scale = theirs.fitted[metric.name].subtract(ours.fitted[metric.name]), 1.0
    series = [
        np.array([one for _, one in sorted(side.rounds[metric.name].items())]) for side in (ours, theirs)
    ]
    if metric.relative_to:
        scale = 1 / statistics.median(ours.rounds[metric.relative_to].values())
    else:
        series = [np.log(one) for one in series]
    return add_between_run_variance(alone, *series).scale(scale)


def _judge_difference(measured: Change, found: Estimate | None, metric: Metric, errors: EndErrors) -> Change:
    """Judge what differs: a logarithm, or, in parts of a step, one less a ratio."""
    unknown = replace(measured, verdict="undecided", reason="too few rounds for an interval")
    if found is None:
        return unknown
    reach = errors.compute_interval(found, metric)
    ratio = reach.shift(1.0) if metric.relative_to else reach.exponentiate()
    if not math.isfinite(found.error):
        return replace(unknown, ratio=ratio)
    freedom = found.freedom if math.isfinite(found.freedom) else None
    return _judge_ratio(replace(measured, error=found.error, freedom=freedom), ratio, metric)


def _judge_ratio(measured: Change, ratio: Interval, metric: Metric) -> Change:
    threshold = measured.threshold or 0.0
    verdict = judge(ratio, higher_is_better=metric.higher_is_better, threshold=threshold)
    before, after = measured.baseline, measured.candidate
    if before is not None and after is not None and abs(after - before) < metric.min_change:
        verdict = "no regression"
    worse, better = ("below", "above") if metric.higher_is_better else ("above", "below")
    limit, gain = (f"{sign}{100 * threshold:g}%" for sign in ("-+" if metric.higher_is_better else "+-"))
    rule = RULES[verdict].format(worse=worse, better=better, limit=limit, gain=gain)
    reason = rule if metric.has_interval else "one reading, no interval"
    return replace(measured, verdict=verdict, reason=reason, ratio=ratio)


def estimate_launches(by_round: Rounds) -> Estimate:
    """Estimate how two interleaved sides differ, of the rounds of all launches; see `average_launches`."""
    launches: dict[int, list[float]] = {}
    for launch, r in sorted(by_round):
        launches.setdefault(launch, []).append(by_round[launch, r])
    return average_launches([estimate_difference(differences) for differences in launches.values()])


def find_typical_sides(numerator: Rounds, denominator: Rounds, ratio: float) -> tuple[float, float]:
    """Numerator and denominator of a typical round, whose quotient is `ratio`.

    Medians of the sides by themselves can contradict the median of the ratios within rounds. So the level
    that both share is estimated, the median of their geometric means, and divided by the ratio. Positive
    figures.
    """
    common = numerator.keys() & denominator.keys()
    level = statistics.median(math.sqrt(numerator[key]) * math.sqrt(denominator[key]) for key in common)
    return level * math.sqrt(ratio), level / math.sqrt(ratio)


def judge(ratio: Interval, *, higher_is_better: bool, threshold: float) -> Verdict:
    """`regressed`, `improved`, `no regression` or `undecided`, for candidate / baseline.

    Without ends (nothing was repeated) the ratio is taken as exact.
    """
    known = Interval(*[ratio.estimate] * 3) if math.isnan(ratio.low) else ratio
    found = classify_ratio(known, (1 - threshold, 1 + threshold), min_change=threshold)
    if found in (FASTER, SLOWER):
        return "improved" if (found == FASTER) == higher_is_better else "regressed"
    within = known.low >= 1 - threshold if higher_is_better else known.high <= 1 + threshold
    return "no regression" if within else "undecided"
