"""The headline of a gate: who was compared, what was decided and by how much, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..common.numbers import format_count
from ..common.text import format_list
from ..page.page import BAD, GOOD, UNSURE, Tone
from ..results.case_columns import GATED_METRICS
from .compare import Gate
from .decide import Word
from .judge import Change
from .wording import describe_change, format_change

TONES: Mapping[Word, Tone] = {
    "pass": GOOD,
    "regression": BAD,
    "missing": BAD,
    "undecided": UNSURE,
    "not comparable": UNSURE,
}

MAX_NAMED = 2
"""Cases in one sentence."""


def write_headline(gate: Gate) -> str:
    """Say who was compared and the verdict: `net 1a2 → 5d6: pass, DDP on 2 GPUs +0.2% (…)`."""
    return f"{gate.code.name_sides()}: {describe_outcome(gate)}"


def describe_outcome(gate: Gate) -> str:
    """Say the verdict and the worst change that it rests on."""
    found = [c for c in gate.comparisons if c.decides and c.ratio is not None and c.column is not None]
    if gate.decision.verdict == "missing":
        return f"missing, {format_list([c.name for c in gate.decision.reasons], MAX_NAMED)}"
    if not found:
        differing = [f"{d.name} differs ({d.then} → {d.now})" for d in gate.blocking]
        more = f", {format_list(differing, MAX_NAMED)}" if gate.conditions_block else ""
        return f"{gate.decision.verdict}{more}"
    # The rate decides where it can; `comparisons` are sorted, worst first.
    worst = next((c for c in found if c.verdict == found[0].verdict and c.metric == "images_per_s"), found[0])
    metric = "" if worst.column is None or worst.column.is_rate else f"{worst.column.label} of "
    # Of each case its worst change.
    others = {c.case_id: c.verdict for c in reversed(found) if c.case_id != worst.case_id}
    more = "".join(
        f", {format_count(n, 'other case')} {word}" for word, n in Counter(others.values()).items()
    )
    figure = format_change(worst).replace("-", "\N{MINUS SIGN}")
    return f"{gate.decision.verdict}, {metric}{worst.name} {figure}{more}"


def describe_verdict(gate: Gate) -> str:
    """Say what was decided, and why, in one sentence."""
    return f"{gate.decision.verdict}: {describe_reason(gate)}"


def describe_reason(gate: Gate) -> str:
    """Say why the gate decided as it did."""
    why = {
        "pass": _describe_passed,
        "undecided": _describe_undecided,
        "not comparable": _describe_not_comparable,
    }
    return why.get(gate.decision.verdict, _describe_failed)(gate)


def _describe_failed(gate: Gate) -> str:
    regressed = gate.select_verdict("regressed")
    if not regressed:
        return f"{describe_changes(gate.decision.reasons)}; --allow-missing passes without them"
    others = len({c.case_id for c in gate.undecided} - {c.case_id for c in regressed})
    undecided = f"; {format_count(others, 'other case')} undecided" if others else ""
    limit = _format_limits(regressed)
    are = "are" if " and " in limit else "is"
    return f"{describe_changes(regressed)}{undecided}; {limit} {are} allowed{_describe_separation(gate)}"


def _format_limits(found: Iterable[Change]) -> str:
    """Write the thresholds of changes; where they differ, each with its metric, in the order of metrics."""
    limits = {c.metric: f"{100 * (c.threshold or 0):g}%" for c in found if c.column is not None}
    by_metric = {column.label: limits[name] for name, column in GATED_METRICS.items() if name in limits}
    if len(set(by_metric.values())) == 1:
        return next(iter(by_metric.values()))
    return " and ".join(f"{limit} of {label}" for label, limit in by_metric.items())


def _describe_passed(gate: Gate) -> str:
    reasons = gate.decision.reasons
    noted = [describe_change(c) for c in gate.select_verdict("noted")]
    more = f"; for information: {'; '.join(noted[:MAX_NAMED])}" if noted else ""
    if better := [c for c in reasons if c.verdict == "improved"]:
        caveat = _describe_separation(gate)
        return f"{describe_changes(better)}{caveat and f'{caveat}, so it may be the machine'}{more}"
    # A case passes by its rate; other metrics may be allowed other changes.
    rates = [c for c in reasons if c.metric == "images_per_s"] or reasons
    return f"no case is more than {_format_limits(rates)} slower{more}"


def _describe_undecided(gate: Gate) -> str:
    if suspected := [c for c in gate.comparisons if c.suspected]:
        return f"{describe_change(suspected[0])}, but {suspected[0].reason}"
    if gate.undecided:
        return (
            f"{describe_changes(gate.undecided)}: perhaps over the "
            f"allowed {_format_limits(gate.undecided)}, perhaps not"
        )
    return "every case shares its devices, so none is judged"


def _describe_not_comparable(gate: Gate) -> str:
    if gate.conditions_block:
        names = ", ".join(d.name for d in gate.blocking)
        return "; ".join(filter(None, (f"the runs differ in {names}", describe_ratios_only(gate))))
    if gate.decision.reasons:
        return gate.decision.reasons[0].reason
    return "the runs share no metric that could be gated"


def describe_ratios_only(gate: Gate) -> str:
    """Say that speed-up can be compared though the sides differ; empty where there is none."""
    has_ratios = gate.conditions_block and any(c.metric == "speedup" for c in gate.comparisons)
    return "--ratios-only still compares speed-up" if has_ratios else ""


def _describe_separation(gate: Gate) -> str:
    return "" if gate.interleaved else "; the runs were not interleaved"


def describe_changes(found: Sequence[Change]) -> str:
    """Say what became of two cases, by their throughput if it is among it, and how many others there are."""
    by_case = {c.case_id: c for c in sorted(found, key=lambda c: c.metric == "images_per_s")}
    first = list(dict.fromkeys(by_case[c.case_id] for c in found))
    others = [f"and {format_count(len(first) - MAX_NAMED, 'other case')}"] if len(first) > MAX_NAMED else []
    return "; ".join([*map(describe_change, first[:MAX_NAMED]), *others])
