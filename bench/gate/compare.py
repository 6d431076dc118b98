"""A candidate run against a baseline: which cases belong together, and a verdict for every metric.

Two kinds of error are held apart. A change counts only where its interval excludes "no change" **and** the
change exceeds the threshold. And many changes can fail a gate, so the ends of their intervals that would make
it a regression are Bonferroni ones: at most one gate in a hundred reports a regression that is not there.
Bonferroni rather than Holm, because then the interval shown is the interval that decided. What only informs
has intervals of 95%, each by itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ..common.errors import ExitCode, NotComparableError, UsageError
from ..common.text import format_list
from ..findings.wording import label_case, name_case
from ..machine.conditions import Difference
from ..results.case_columns import GATED_METRICS
from ..results.commands import write_command
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import Estimate
from .code import Code
from .decide import INFORMATIVE_ERRORS, MIN_LAUNCHES, Decision, Policy, compute_look_shares, decide
from .judge import VERDICTS, Change, EndErrors, Verdict, compare_metric, has_shared_devices, make_change
from .machine import describe_machine
from .more import (
    DecidingCommand,
    is_interleaved,
    measure_alike,
    propose_command,
    write_distinguishing_command,
)
from .runs import LAUNCH_OFFSET, SWEPT_COLUMNS, GateCase, GateRun, find_run_differences
from .watched import StepChange, compare_steps

OF_THE_MACHINE: dict[str, Any] = {
    "verdict": "undecided",
    "reason": "both runs measured the same code under the same conditions: the machine changed",
    "suspected": True,
}
"""Verdict on a slow-down that is none of the code."""

OF_ONE_LAUNCH: dict[str, Any] = {
    "verdict": "undecided",
    "reason": "one launch cannot tell how much launches differ; give the gate more time",
}
"""Verdict where the time ended before a second launch."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """All that a gate found, worst first."""

    differences: tuple[Difference, ...]
    comparisons: tuple[Change, ...]
    errors: EndErrors
    """Error probabilities of each single interval that can fail the gate."""
    code: Code
    interleaved: bool
    """True where the two runs were interleaved on one machine."""
    only_in_candidate: tuple[str, ...]
    only_in_baseline: tuple[str, ...]
    """Metrics of compared cases that the candidate's passes left out."""
    num_launches: int
    """Number of launches of interleaved runs; 1 of others, whose intervals hold within their launches."""
    looks: tuple[int, ...]
    """Numbers of launches after which it could have ended."""
    decision: Decision
    steps: StepChange | None = None
    """Steps of two watched trainings; None of runs, and where it is not known."""
    machine: tuple[str, ...] = ()
    """Facts about the machine while both sides were measured."""
    cautions: tuple[str, ...] = ()
    """Facts of these that speak against the comparison."""
    more: DecidingCommand | None = None
    """The next thing to do; None where nothing is open."""

    @property
    def exit_code(self) -> ExitCode:
        return self.decision.exit_code

    @property
    def needs_more_launches(self) -> bool:
        """True where the gate is undecided for want of launches alone."""
        return self.decision.verdict == "undecided" and bool(self.undecided)

    @property
    def blocking(self) -> list[Difference]:
        """Return the differences that make the sides not comparable."""
        return [one for one in self.differences if one.blocking]

    @property
    def conditions_block(self) -> bool:
        """True where nothing is compared because the sides differ in their conditions."""
        return self.decision.verdict == "not comparable" and bool(self.blocking and self.decision.reasons)

    @property
    def undecided(self) -> list[Change]:
        """The changes that could fail it and are not known to be within their threshold, nor beyond."""
        return [c for c in self.comparisons if c.decides and c.verdict == "undecided"]

    @property
    def shown(self) -> list[Change]:
        """The rows of a table: what decides, and what surely changed; none where conditions differ."""
        if self.conditions_block:
            return []
        return [c for c in self.comparisons if c.decides or c.verdict not in ("undecided", "no regression")]

    @property
    def ended_early(self) -> bool:
        """Return whether time ended it between two looks."""
        return self.num_launches < max(self.looks, default=0) and self.num_launches not in self.looks

    @property
    def lacks_launches(self) -> bool:
        """Return whether time ended it before its first look."""
        return bool(self.looks) and self.num_launches < self.looks[0]

    def compute_resolvable_change(self, launches: int | None = None) -> float | None:
        """Return the change that every case can tell from none, a fraction; None while that is not known.

        With `launches`, what is expected after so many, from the scatter of those that there are.
        """
        now, looks = self.num_launches, self.looks
        known = [(c.error, c.freedom or math.inf) for c in self.comparisons if c.decides and c.error]
        if not known or (looks and now < min(MIN_LAUNCHES, looks[0])):
            return None
        better = self.errors.better
        if launches is not None and now > 1:
            then, here = (compute_look_shares(looks, number).better for number in (launches, now))
            better *= then / here
            known = [(error * math.sqrt(now / launches), launches - 1) for error, _ in known]
        return max(Estimate(0.0, *one).compute_quantile_interval(better, better).high for one in known)

    def select_verdict(self, verdict: Verdict) -> list[Change]:
        return [c for c in self.comparisons if c.verdict == verdict]


def join(baseline: GateRun, candidate: GateRun) -> list[tuple[GateCase, GateCase | None]]:
    """Every measured case of the baseline and its counterpart: the same id, else the same swept settings.

    Two watched trainings on as many ranks are each other's counterpart, whatever DDP's settings. Raises
    UsageError where one id names different settings.
    """
    most = 2 if baseline.manifest.watched and candidate.manifest.watched else None  # mode and devices
    by_id = {case.result.case_id: case for case in candidate.cases}
    by_key = {(case.key[:most], case.result.batch_name): case for case in candidate.cases}
    pairs = []
    for case in baseline.cases:
        same_id = by_id.get(case.result.case_id)
        if same_id is not None and same_id.key != case.key:
            name = next(n for n, a, b in zip(SWEPT_COLUMNS, case.key, same_id.key, strict=True) if a != b)
            raise UsageError(
                f"{case.result.case_id} has another {name} in each run: one was edited; measure again"
            )
        if case.result.is_ok:
            pairs.append((case, same_id or by_key.get((case.key[:most], case.result.batch_name))))
    return pairs


def compare(
    baseline: GateRun,
    candidate: GateRun,
    *,
    policy: Policy,
    looks: Sequence[int] = (),
    asked: Sequence[str] | None = None,
    environments: tuple[Mapping[str, str], ...] = (),
) -> Gate:
    """Gate `candidate` against `baseline` by a policy.

    Runs with `looks`, or whose manifests say so, took turns on one machine: their rounds are compared in
    pairs, and what differs between them is what is being tested, so it does not block. Of others the
    intervals hold how much each run changed within itself, too. `looks` are the numbers of launches after
    which the gate may have ended; each costs width. Throughput in different units is never compared.
    `environments` are the variables that the gate set for each side alone. `asked` is how an interleaved gate
    was asked for, as `more` takes it.

    Raises NotComparableError where no case is common to both or one has too few rounds, UsageError where the
    baseline measured nothing.
    """
    interleaved = bool(looks) or is_interleaved([baseline.manifest, candidate.manifest])
    watched = baseline.manifest.watched and candidate.manifest.watched
    if watched:  # Raced bucket caps follow the training itself, and are not compared.
        baseline, candidate = (dataclasses.replace(run, cases=run.cases[:1]) for run in (baseline, candidate))
    joined = join(baseline, candidate)
    if not joined:
        raise UsageError(f"{baseline.path} has no case with status ok; it cannot be a baseline")
    pairs = [(ours, theirs) for ours, theirs in joined if theirs is not None]
    if not pairs:
        step = measure_alike(baseline.manifest, candidate.manifest, SWEPT_COLUMNS)
        raise NotComparableError(
            f"no case is in both: the baseline has {_list_ids(baseline)}, the "
            f"candidate {_list_ids(candidate)}; "
            + (f"{step.why}: {step.command}" if step else "watch the same training on as many ranks")
        )
    both_ok = [(ours, theirs) for ours, theirs in pairs if theirs.result.is_ok]
    require_rounds(baseline, [ours for ours, _ in both_ok])
    require_rounds(candidate, [theirs for _, theirs in both_ok])
    differing = find_run_differences(baseline, candidate, pairs)
    sides, paths = (baseline.manifest, candidate.manifest), (baseline.path, candidate.path)
    code = Code(*sides, interleaved=interleaved, environments=environments, paths=paths)
    blocked = "" if policy.ratios_only else _find_obstacle(pairs, differing, interleaved=interleaved)
    metrics = [metric for metric in GATED_METRICS.values() if not (policy.ratios_only and metric.absolute)]
    # A pass that one of them left out says nothing of its speed.
    had = [(a, b, metric) for a, b in both_ok for metric in metrics if a.rounds[metric.name]]
    wanted = [(a, b, metric) for a, b, metric in had if b.rounds[metric.name]]
    left_out = [(a, m) for a, b, m in had if m.has_interval and not b.rounds[m.name]]
    deciding = [not has_shared_devices(a, b) and policy.can_fail(metric) for a, b, metric in wanted]
    can_fail = sum(one and metric.has_interval for one, (_, _, metric) in zip(deciding, wanted, strict=True))
    num_launches = len({r // LAUNCH_OFFSET for a, _ in both_ok for r in a.rounds["images_per_s"]})
    errors = policy.divide_error(can_fail, compute_look_shares(looks, num_launches))
    found = [
        _mark_missing(ours, theirs) for ours, theirs in joined if theirs is None or not theirs.result.is_ok
    ]
    found += [
        compare_metric(
            a,
            b,
            metric,
            errors=errors if decides else INFORMATIVE_ERRORS,
            threshold=policy.thresholds[metric.name],
            blocked=blocked,
            interleaved=interleaved,
            decides=decides,
        )
        for decides, (a, b, metric) in zip(deciding, wanted, strict=True)
    ]
    if code.is_identical and not differing and not interleaved:
        # What got slower of the same code under the same conditions is the machine.
        slower = [c for c in found if c.verdict == "regressed" and c.column and c.column.has_interval]
        found = [replace(c, **OF_THE_MACHINE) if c in slower else c for c in found]
    if num_launches == 1 and looks and looks[0] > 1:
        seeming = ("regressed", "improved", "no regression")
        found = [replace(c, **OF_ONE_LAUNCH) if c.verdict in seeming else c for c in found]
    matched = {theirs.result.case_id for _, theirs in pairs}
    lacks_cases = any(theirs is None for _, theirs in joined)
    machine, cautions = describe_machine(baseline, candidate, both_ok)
    gate = Gate(
        differences=differing,
        comparisons=tuple(sorted(found, key=_compute_badness)),
        errors=errors,
        code=code,
        interleaved=interleaved,
        only_in_candidate=tuple(
            label_case(c.result)
            for c in candidate.cases
            if c.result.is_ok and c.result.case_id not in matched
        ),
        only_in_baseline=tuple(f"{metric.label} of {name_case(case.result)}" for case, metric in left_out),
        num_launches=num_launches if interleaved else 1,
        looks=tuple(looks),
        decision=decide(found, policy),
        steps=next(
            (compare_steps(baseline, candidate, c) for c in found if watched and c.metric == "images_per_s"),
            None,
        ),
        machine=machine,
        cautions=cautions,
    )
    step, regressed = None, gate.decision.verdict == "regression"
    if gate.needs_more_launches and not watched:
        step = propose_command(
            sides,
            gate.undecided,
            errors=policy.divide_error(can_fail, compute_look_shares((), 0)),
            launches=num_launches * interleaved,
            lacking=looks[0] if gate.lacks_launches else 0,
            asked=asked,
        )
    elif blocked or (gate.decision.verdict == "missing" and lacks_cases and not interleaved):
        step = measure_alike(
            *sides, [*(d.name for d in gate.blocking), *(SWEPT_COLUMNS if lacks_cases else ())]
        )
    elif not interleaved and (differing or not code.is_identical) and (gate.undecided or regressed):
        step = write_distinguishing_command(*sides, candidate.path)
    return dataclasses.replace(gate, more=step)


def _find_obstacle(
    pairs: Sequence[tuple[GateCase, GateCase]], differing: Sequence[Difference], *, interleaved: bool
) -> str:
    """Why absolute figures must not be compared; empty where they may."""
    every = ((ours.result.unit, theirs.result.unit) for ours, theirs in pairs)
    units = next((pair for pair in every if len(set(pair)) > 1), None)
    if units is not None:
        return f"the baseline counts {units[0]}, the candidate {units[1]}"
    blocking = any(difference.blocking for difference in differing) and not interleaved
    return "measured under other conditions" if blocking else ""


def _mark_missing(ours: GateCase, theirs: GateCase | None) -> Change:
    reason = "not in the candidate"
    if theirs is not None:
        reason = f"{theirs.result.status}: {theirs.result.reason or 'no reason given'}"
    return make_change(ours, theirs, "missing", reason)


def require_rounds(run: GateRun, cases: Sequence[GateCase]) -> None:
    """Raise NotComparableError where a case has too few rounds for an interval."""
    for case in cases:
        if (num_rounds := len(case.rounds["images_per_s"])) < MIN_ROUNDS:
            longer = write_command(run.manifest, rounds=f"{2 * MIN_ROUNDS}", max_time=None, out=None)
            fix = "watch more steps" if run.manifest.watched else f"measure longer: {longer}"
            raise NotComparableError(
                f"{run.path}: {case.result.case_id} has {num_rounds} rounds, a gate needs at least "
                f"{MIN_ROUNDS}; {fix}"
            )


def _list_ids(run: GateRun) -> str:
    return format_list([case.result.case_id for case in run.cases])


def _compute_badness(comparison: Change) -> tuple[int, float]:
    worse = 0.0
    if comparison.ratio is not None and comparison.column is not None:
        ratio, is_better = comparison.ratio, comparison.column.higher_is_better
        end = ratio.low if is_better else ratio.high
        # Of what is within the limit, or may not be, the end that is nearest to it; memory has no ends.
        by_end = comparison.verdict in ("undecided", "no regression") and not math.isnan(end)
        change = (end if by_end else ratio.estimate) - 1
        worse = -change if is_better else change
    is_gain = comparison.verdict == "informational" and worse < 0
    return VERDICTS.index("improved" if is_gain else comparison.verdict), -worse
