"""A candidate run against a baseline: which cases belong together, and a verdict for every metric.

Two kinds of error are held apart. A change counts only where its interval excludes "no change" **and** the
change exceeds the threshold. And many comparisons are made at once, so each interval is a Bonferroni one:
together they cover the truth with 98%, hence at most one gate in a hundred reports a regression that is not
there. Bonferroni rather than Holm, because then the interval shown is the interval that decided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.conditions import Difference
from bench.errors import ExitCode, NotComparableError, UsageError
from bench.gate.launches import launch_ratio
from bench.gate.runs import SWEPT, GateCase, GateRun, run_differences
from bench.results.round_times import ByRound
from bench.settings import IMAGES
from bench.stats import Interval, ratio_of_medians

MIN_ROUNDS = 3
"""Fewer rounds say nothing of their own spread."""

FAMILY_CONFIDENCE = 0.98
"""Of all intervals of a gate together; half of the rest, 1%, lies on the side of a regression."""

DEFAULT_THRESHOLD = 0.05
"""Share of change that matters where nothing else is said."""

VERDICTS = ("regressed", "missing", "not comparable", "inconclusive", "unchanged", "improved")
"""Worst first."""


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
    Metric(name="images_per_s", label="throughput", higher_is_better=True, absolute=True),
    Metric(name="speedup", label="speed-up", higher_is_better=True),
    Metric(name="efficiency", label="efficiency", higher_is_better=True),
    Metric(name="exposed_comm_ms", label="exposed communication", higher_is_better=False, absolute=True),
    Metric(name="peak_mem_mib", label="peak memory", higher_is_better=False, absolute=True, repeated=False),
)
"""What a gate looks at in every case."""


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


@dataclass(frozen=True, kw_only=True)
class Gate:
    """All that a gate found, worst first."""

    differences: tuple[Difference, ...]
    comparisons: tuple[Comparison, ...]
    confidence: float
    """Of each single interval."""
    interleaved: bool
    """Whether the two runs took turns on one machine."""
    only_in_candidate: tuple[str, ...]
    exit_code: ExitCode

    def having(self, verdict: str) -> list[Comparison]:
        """The comparisons with this verdict."""
        return [c for c in self.comparisons if c.verdict == verdict]


def join(baseline: GateRun, candidate: GateRun) -> list[tuple[GateCase, GateCase | None]]:
    """Every measured case of the baseline and its counterpart: the same id, else the same swept settings.

    Raises UsageError where one id names different settings.
    """
    by_id = {case.case_id: case for case in candidate.cases}
    by_key = {case.key: case for case in candidate.cases}
    pairs = []
    for case in baseline.cases:
        same_id = by_id.get(case.case_id)
        if same_id is not None and same_id.key != case.key:
            name = next(n for n, a, b in zip(SWEPT, case.key, same_id.key, strict=True) if a != b)
            raise UsageError(f"{case.case_id} has another {name} in each run: one was edited; measure again")
        if case.ok:
            pairs.append((case, same_id or by_key.get(case.key)))
    return pairs


def compare(
    baseline: GateRun,
    candidate: GateRun,
    *,
    thresholds: Mapping[str, float],
    ratios_only: bool = False,
    allow_missing: bool = False,
    interleaved: bool = False,
) -> Gate:
    """Gate `candidate` against `baseline`; `thresholds` gives the share allowed for every metric.

    `interleaved` runs took turns on one machine: their rounds are compared in pairs, and what differs between
    them is what is being tested, so it does not block. Throughput in different units is never compared.

    Raises NotComparableError where no case is common to both or one has too few rounds, UsageError where the
    baseline measured nothing.
    """
    joined = join(baseline, candidate)
    if not joined:
        raise UsageError(f"{baseline.path} has no case with status ok; it cannot be a baseline")
    pairs = [(ours, theirs) for ours, theirs in joined if theirs is not None]
    if not pairs:
        raise NotComparableError(
            f"no case is in both: the baseline has {_ids(baseline)}, the candidate {_ids(candidate)}; "
            "measure the same --modes, --gpus, --compile and DDP settings"
        )
    both_ok = [(ours, theirs) for ours, theirs in pairs if theirs.ok]
    for run, cases in ((baseline, [ours for ours, _ in both_ok]), (candidate, [c for _, c in both_ok])):
        require_rounds(run, cases)
    differing = run_differences(baseline, candidate, pairs)
    blocked = "" if ratios_only else _obstacle(pairs, differing, interleaved=interleaved)
    metrics = [metric for metric in METRICS if not (ratios_only and metric.absolute)]
    wanted = [(a, b, metric) for a, b in both_ok for metric in metrics if _is_compared(a, b, metric)]
    # Efficiency is speed-up over a constant: the two are one piece of evidence, counted once.
    evidence = sum(metric.repeated and metric.name != "efficiency" for _, _, metric in wanted)
    confidence = 1 - (1 - FAMILY_CONFIDENCE) / max(evidence, 1)
    found = [_missing(ours, theirs) for ours, theirs in joined if theirs is None or not theirs.ok]
    found += [
        _compare(
            a,
            b,
            metric,
            confidence=confidence,
            threshold=thresholds[metric.name],
            blocked=blocked,
            interleaved=interleaved,
        )
        for a, b, metric in wanted
    ]
    matched = {theirs.case_id for _, theirs in pairs}
    return Gate(
        differences=differing,
        comparisons=tuple(sorted(found, key=_badness)),
        confidence=confidence,
        interleaved=interleaved,
        only_in_candidate=tuple(c.case_id for c in candidate.cases if c.ok and c.case_id not in matched),
        exit_code=_exit_code(found, blocked=bool(blocked), allow_missing=allow_missing),
    )


def _obstacle(
    pairs: Sequence[tuple[GateCase, GateCase]], differing: Sequence[Difference], *, interleaved: bool
) -> str:
    """Why absolute figures must not be compared; empty where they may."""
    units = next(((ours.unit, theirs.unit) for ours, theirs in pairs if ours.unit != theirs.unit), None)
    if units is not None:
        return f"the baseline counts {units[0]}, the candidate {units[1]}"
    blocking = any(difference.blocking for difference in differing) and not interleaved
    return "measured under other conditions" if blocking else ""


def _compare(
    ours: GateCase,
    theirs: GateCase,
    metric: Metric,
    *,
    confidence: float,
    threshold: float,
    blocked: str,
    interleaved: bool,
) -> Comparison:
    left, right = list(_values(ours, metric).values()), list(_values(theirs, metric).values())

    def found(verdict: str, reason: str = "", ratio: Interval | None = None) -> Comparison:
        return Comparison(
            case_id=ours.case_id,
            stand_in="cpu_standin" in (ours.row.get("impl"), theirs.row.get("impl")),
            metric=metric,
            verdict=verdict,
            reason=reason,
            baseline=statistics.median(left),
            candidate=statistics.median(right) if right else None,
            units=(ours.unit, theirs.unit),
            ratio=ratio,
            threshold=threshold,
            num_rounds=(len(left), len(right)),
        )

    if blocked:
        return found("not comparable", blocked)
    if not right:
        return found("missing", "not measured in the candidate")
    if metric.repeated and min(len(left), len(right)) < MIN_ROUNDS:
        return found("not comparable", f"{min(len(left), len(right))} rounds, needs {MIN_ROUNDS}")
    if metric.repeated and interleaved and min(*left, *right) > 0:
        ratio = launch_ratio(_values(theirs, metric), _values(ours, metric), confidence=confidence)
    elif metric.repeated:
        ratio = ratio_of_medians(right, left, confidence=confidence)
    else:
        ratio = Interval(right[0] / left[0], math.nan, math.nan)
    verdict = judge(ratio, higher_is_better=metric.higher_is_better, threshold=threshold)
    return found(verdict, _why(verdict, ratio, threshold, metric), ratio)


def _missing(ours: GateCase, theirs: GateCase | None) -> Comparison:
    reason = "not in the candidate"
    if theirs is not None:
        reason = f"{theirs.row['status']}: {theirs.row.get('reason', 'no reason given')}"
    stand_in = ours.row.get("impl") == "cpu_standin"
    return Comparison(
        case_id=ours.case_id,
        stand_in=stand_in,
        metric=None,
        verdict="missing",
        reason=reason,
        units=(ours.unit, ours.unit if theirs is None else theirs.unit),
    )


def require_rounds(run: GateRun, cases: Sequence[GateCase]) -> None:
    """Raise NotComparableError where a case has too few rounds for an interval."""
    for case in cases:
        if len(case.images_per_s) < MIN_ROUNDS:
            raise NotComparableError(
                f"{run.path}: {case.case_id} has {len(case.images_per_s)} rounds, a gate needs at least "
                f"{MIN_ROUNDS}; measure again with bench.run --rounds 10 or more"
            )


def _ids(run: GateRun) -> str:
    ids = [case.case_id for case in run.cases]
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")


def _badness(comparison: Comparison) -> tuple[int, float]:
    worse = 0.0
    if comparison.ratio is not None and comparison.metric is not None:
        change = comparison.ratio.estimate - 1
        worse = 0.0 if math.isnan(change) else -change if comparison.metric.higher_is_better else change
    return VERDICTS.index(comparison.verdict), -worse


def _exit_code(found: Sequence[Comparison], *, blocked: bool, allow_missing: bool) -> ExitCode:
    if blocked:
        return ExitCode.NOT_COMPARABLE
    verdicts = {c.verdict for c in found}
    if "regressed" in verdicts or ("missing" in verdicts and not allow_missing):
        return ExitCode.FAILED
    # Equal memory alone, or nothing but intervals too wide to say anything, is no pass.
    decided = any(c.verdict in ("improved", "unchanged") for c in found if c.metric and c.metric.repeated)
    return ExitCode.OK if decided else ExitCode.NOT_COMPARABLE


def _is_compared(ours: GateCase, theirs: GateCase, metric: Metric) -> bool:
    """Whether the baseline has the metric; a candidate that keeps no count of memory lost nothing."""
    return bool(_values(ours, metric)) and (metric.repeated or bool(_values(theirs, metric)))


def _values(case: GateCase, metric: Metric) -> ByRound:
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
