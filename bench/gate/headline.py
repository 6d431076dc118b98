"""The headline of a gate: what was decided, the change that it rests on, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..common.cli import NextStep
from ..common.errors import ExitCode
from ..common.numbers import format_count
from ..common.text import begin_sentence, format_list
from ..page.page import BAD, GOOD, UNSURE
from .decide import Word
from .judge import Change
from .result import Gate
from .wording import describe_change, describe_size

TONES = {ExitCode.OK: GOOD, ExitCode.FAILED: BAD, ExitCode.UNDECIDED: UNSURE}

NEXT_STEPS: Mapping[Word, str] = {
    "pass": "accept the candidate: no case is slower by the limit or more",
    "regression": "keep the baseline: find the cause first, by bisecting what differs between the sides, or "
    "by comparing where a step's time goes in the report of a run of each",
    "missing": "read the candidate's log: --out DIR keeps it; --allow-missing passes without the case",
}
"""The next thing to do where no command does it, the action before a colon."""

MAX_NAMED = 2
"""Conditions in one sentence."""


def describe_verdict(gate: Gate) -> str:
    """Say what was decided, by which change, and what to do: `Regression: DDP … 16% slower …. Keep …`."""
    verdict, step = gate.decision.verdict, get_next_step(gate)
    words = "pass, no regression" if verdict == "pass" else verdict
    action = f". {begin_sentence(step.why.partition(': ')[0])}." if step else ""
    return f"{begin_sentence(words)}: {_describe_reason(gate)}{action}"


def get_next_step(gate: Gate) -> NextStep | None:
    """Return the next thing to do, the command that does it where there is one."""
    step = NEXT_STEPS.get(gate.decision.verdict)
    if gate.decision.verdict == "pass" and not gate.interleaved:
        step = "accept the candidate if the machine was the same: the runs were not interleaved"
    return gate.more or (NextStep(step, "") if step else None)


def _describe_reason(gate: Gate) -> str:
    if gate.conditions_block:
        return format_list([f"{d.name} differs ({d.then} → {d.now})" for d in gate.blocking], MAX_NAMED)
    deciding = [c for c in gate.comparisons if c.decides]
    if gate.decision.verdict == "not comparable":
        reasons = [c.reason for c in gate.decision.reasons]
        return reasons[0] if reasons else "the runs share no metric that could be gated"
    # A case whose devices are shared has no share in the decision.
    judged = [c for c in deciding if c in gate.decision.reasons]
    if not judged:
        return "every case shares its devices, so none can be judged"
    # The rate names a case where it decides; comparisons are sorted, worst first. A gain is news of a pass.
    judged = judged[::-1] if judged[-1].verdict == "improved" else judged
    first = judged[0]
    worst = next((c for c in judged if (c.verdict, c.metric) == (first.verdict, "images_per_s")), first)
    if gate.needs_more_launches and gate.num_lacking:
        return f"{describe_size(worst)} after {gate.num_launches} of at least {gate.num_lacking} launches"
    if gate.needs_more_launches and not worst.suspected:
        return _describe_worst(worst)
    others = Counter(
        {c.case_id: c.verdict for c in reversed(deciding) if c.case_id != worst.case_id}.values()
    )
    counted = (f"{format_count(number, 'other case')}: {word}" for word, number in reversed(others.items()))
    return "; ".join((_describe_worst(worst), *counted))


def _describe_worst(worst: Change) -> str:
    """Hold a change against its limit, in words that follow from its verdict."""
    limit = f"{100 * (worst.threshold or 0):g}%"
    if worst.suspected:
        return f"{describe_change(worst)}, but {worst.reason}"
    if worst.verdict == "undecided":
        return f"{describe_size(worst)}: a regression over {limit} is possible"
    if worst.verdict == "no regression":
        return f"{describe_size(worst)}, within the {limit} limit"
    return describe_change(worst) + (f", beyond the {limit} limit" if worst.verdict == "regressed" else "")
