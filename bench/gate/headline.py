"""The headline of a gate: what was decided, and the change that it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..common.numbers import format_count
from ..common.text import begin_sentence, format_list
from ..page.page import BAD, GOOD, UNSURE, Tone
from .compare import Gate
from .decide import Word
from .judge import Change
from .wording import describe_change, describe_size

TONES: Mapping[Word, Tone] = {
    "pass": GOOD,
    "regression": BAD,
    "missing": BAD,
    "undecided": UNSURE,
    "not comparable": UNSURE,
}

MAX_NAMED = 2
"""Conditions in one sentence."""


def describe_verdict(gate: Gate) -> str:
    """Say what was decided, and by which change: `Pass, no regression: throughput of DDP … changed by …`."""
    verdict = gate.decision.verdict
    words = "pass, no regression" if verdict == "pass" else verdict
    return f"{begin_sentence(words)}: {_describe_reason(gate)}"


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
    # The rate names a case where it decides; comparisons are sorted, worst first.
    first = judged[0]
    worst = next((c for c in judged if (c.verdict, c.metric) == (first.verdict, "images_per_s")), first)
    if gate.needs_more_launches and gate.lacks_launches:
        launches = format_count(gate.num_launches, "launch")
        return f"{launches} of each side, at least {gate.looks[0]} are needed ({describe_size(worst)})"
    if gate.needs_more_launches and not worst.suspected:
        return _describe_worst(worst)
    others = Counter(
        {c.case_id: c.verdict for c in reversed(deciding) if c.case_id != worst.case_id}.values()
    )
    counted = (f"{format_count(number, 'other case')}: {word}" for word, number in others.items())
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
