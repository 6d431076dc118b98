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
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from ..common.errors import NotComparableError, UsageError
from ..common.text import format_list
from ..findings.wording import label_case, name_case
from ..machine.conditions import Difference
from ..results.case_columns import GATED_METRICS
from ..results.commands import write_command
from ..stats.fit import MIN_ROUNDS
from .code import is_same_code
from .decide import INFORMATIVE_ERRORS, Policy, decide
from .judge import VERDICTS, Change, compare_metric, has_shared_devices, make_change
from .machine import describe_machine
from .more import is_interleaved, measure_alike, propose_command
from .result import NOT_IN_CANDIDATE, Gate
from .runs import SWEPT_COLUMNS, GateCase, GateRun, find_run_differences
from .watched import compare_steps

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


def join(baseline: GateRun, candidate: GateRun) -> list[tuple[GateCase, GateCase | None]]:
    """Every measured case of the baseline and its counterpart: the same id, else the same swept settings.

    Two watched trainings on as many ranks are each other's counterpart, whatever DDP's settings. Raises
    UsageError where one id names different settings, or the baseline measured nothing.
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
    if not pairs:
        raise UsageError(f"{baseline.path} has no case with status ok; it cannot be a baseline")
    return pairs


def compare(
    baseline: GateRun, candidate: GateRun, *, policy: Policy, asked: Sequence[str] | None = None
) -> Gate:
    """Gate `candidate` against `baseline` by a policy.

    Runs of a policy with looks, or whose manifests say so, took turns on one machine: their rounds are
    compared in pairs, and what differs between them is what is being tested, so it does not block. Of others
    the intervals hold how much each run changed within itself, too. Throughput in different units is never
    compared. `asked` is what was typed behind the name of an interleaved gate.

    Raises NotComparableError where no case is common to both or one has too few rounds, UsageError where the
    baseline measured nothing.
    """
    interleaved = bool(policy.looks) or is_interleaved([baseline.manifest, candidate.manifest])
    watched = baseline.manifest.watched and candidate.manifest.watched
    if watched:  # Raced bucket caps follow the training itself, and are not compared.
        baseline, candidate = (dataclasses.replace(run, cases=run.cases[:1]) for run in (baseline, candidate))
    joined = join(baseline, candidate)
    pairs = [(ours, theirs) for ours, theirs in joined if theirs is not None]
    if not pairs:
        raise _make_nothing_common_error(baseline, candidate)
    both_ok = [(ours, theirs) for ours, theirs in pairs if theirs.result.is_ok]
    require_rounds(baseline, [ours for ours, _ in both_ok])
    require_rounds(candidate, [theirs for _, theirs in both_ok])
    differing = find_run_differences(baseline, candidate, pairs)
    obstacle = "" if policy.ratios_only else _find_obstacle(pairs, differing, interleaved=interleaved)
    metrics = [metric for metric in GATED_METRICS.values() if not (policy.ratios_only and metric.absolute)]
    # A pass that one of them left out says nothing of its speed.
    had = [(a, b, metric) for a, b in both_ok for metric in metrics if a.rounds[metric.name]]
    wanted = [
        (a, b, metric, not has_shared_devices(a, b) and policy.can_fail(metric))
        for a, b, metric in had
        if b.rounds[metric.name]
    ]
    num_launches = len({launch for a, _ in both_ok for launch, _ in a.rounds["images_per_s"]})
    can_fail = sum(decides and metric.has_interval for *_, metric, decides in wanted)
    errors = policy.divide_error(can_fail, num_launches)
    found = [
        *(_mark_missing(a, b) for a, b in joined if b is None or not b.result.is_ok),
        *(
            compare_metric(
                a,
                b,
                metric,
                errors=errors if decides else INFORMATIVE_ERRORS,
                threshold=policy.named.get(metric.name, policy.threshold),
                obstacle=obstacle,
                interleaved=interleaved,
                decides=decides,
            )
            for a, b, metric, decides in wanted
        ),
    ]
    if is_same_code(baseline.manifest, candidate.manifest) and not differing and not interleaved:
        # What got slower of the same code under the same conditions is the machine.
        slower = [c for c in found if c.verdict == "regressed" and c.column and c.column.has_interval]
        found = [replace(c, **OF_THE_MACHINE) if c in slower else c for c in found]
    if num_launches == 1 < min(policy.looks, default=1):
        seeming = ("regressed", "improved", "no regression")
        found = [replace(c, **OF_ONE_LAUNCH) if c.verdict in seeming else c for c in found]
    machine, cautions = describe_machine(baseline, candidate, both_ok)
    matched = {theirs.result.case_id for _, theirs in pairs}
    others = (case.result for case in candidate.cases if case.result.case_id not in matched)
    left_out = ((a, m) for a, b, m in had if m.has_interval and not b.rounds[m.name])
    rates = (c for c in found if watched and c.metric == "images_per_s")
    gate = Gate(
        baseline=baseline,
        candidate=candidate,
        policy=policy,
        asked=asked,
        differences=differing,
        comparisons=tuple(sorted(found, key=_compute_badness)),
        errors=errors,
        interleaved=interleaved,
        obstacle=obstacle,
        only_in_candidate=tuple(label_case(result) for result in others if result.is_ok),
        only_in_baseline=tuple(f"{metric.label} of {name_case(case.result)}" for case, metric in left_out),
        num_launches=num_launches if interleaved else 1,
        decision=decide(found, policy),
        steps=next((compare_steps(baseline, candidate, rate) for rate in rates), None),
        machine=machine,
        cautions=cautions,
    )
    return dataclasses.replace(gate, more=propose_command(gate))


def _make_nothing_common_error(baseline: GateRun, candidate: GateRun) -> NotComparableError:
    step = measure_alike(baseline.manifest, candidate.manifest, SWEPT_COLUMNS)
    ours, theirs = (format_list([c.result.case_id for c in run.cases]) for run in (baseline, candidate))
    return NotComparableError(
        f"no case is in both: the baseline has {ours}, the candidate {theirs}; "
        + (f"{step.why}: {step.command}" if step else "watch the same training on as many ranks")
    )


def _find_obstacle(
    pairs: Iterable[tuple[GateCase, GateCase]], differing: Iterable[Difference], *, interleaved: bool
) -> str:
    """Why absolute figures must not be compared; empty where they may."""
    for ours, theirs in pairs:
        if ours.result.unit != theirs.result.unit:
            return f"the baseline counts {ours.result.unit}, the candidate {theirs.result.unit}"
    blocking = any(difference.blocking for difference in differing) and not interleaved
    return "measured under other conditions" if blocking else ""


def _mark_missing(ours: GateCase, theirs: GateCase | None) -> Change:
    reason = NOT_IN_CANDIDATE
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
