"""A gate in words: what to read before and after its table; for GitHub; and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict

from ..common.cli import get_message_prefix
from ..common.console import Annotation
from ..common.errors import ExitCode
from ..common.numbers import format_count
from ..common.text import begin_sentence, escape_controls, format_list, to_json
from ..findings.wording import CPU_STAND_IN
from .code import describe_same_code, make_code_record, name_sides
from .decide import INFORMATIVE_ERRORS, MAX_ERROR
from .headline import describe_verdict
from .result import Gate
from .wording import describe_change

NOT_INTERLEAVED = "The runs were not interleaved: a change may be the machine's, not the code's."
"""Stands before every comparison of two separate runs."""

_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
"""A commit; twelve digits name it."""


def list_warnings(gate: Gate) -> list[str]:
    """Say what speaks against the comparison: separate runs, the machine."""
    separate = [] if gate.interleaved or gate.conditions_block else [NOT_INTERLEAVED]
    return format_lines(separate, map(_make_sentence, gate.cautions))


def list_facts(gate: Gate) -> list[str]:
    """Say what was compared, on what machine, and what changed beside what decided; a line each."""
    noted = [f"for information: {describe_change(c)}" for c in gate.select_verdict("informational")]
    has_ratios = gate.conditions_block and any(c.metric == "speedup" for c in gate.comparisons)
    ratios = "--ratios-only still compares speed-up" if has_ratios else ""
    sides, interleaved = (gate.baseline, gate.candidate), gate.interleaved
    same = describe_same_code(*sides, interleaved=interleaved)
    told = filter(None, (name_sides(*sides), ratios, same, *gate.machine, *noted))
    return format_lines(map(_make_sentence, told))


def _make_sentence(said: str) -> str:
    return f"{begin_sentence(said)}."


def format_lines(*found: Iterable[str]) -> list[str]:
    """Write lines with their control characters visible, and commits short."""
    return [escape_controls(_HASH.sub(r"\1", line)) for lines in found for line in lines]


def list_notes(gate: Gate) -> list[str]:
    """Explain how to read the changes, and what is not among them."""
    lines = []
    compared = [c for c in gate.comparisons if c.ratio is not None]
    if compared:
        most = f"at most {100 * MAX_ERROR:g}%"
        bound = (
            f"; {most} of gates report a false regression, and {most} pass a candidate slower by the limit"
        )
        said = f"Change: candidate / baseline - 1. Intervals {gate.errors}"
        lines.append(f"{said}{bound * gate.interleaved}.")
        if any(c.verdict == "informational" for c in gate.shown):
            lines.append(
                "An informational change cannot fail the gate; its interval is one of "
                f"{100 * (1 - INFORMATIVE_ERRORS.worse - INFORMATIVE_ERRORS.better):g}% by itself."
            )
        lines += _describe_launches(gate)
    if gate.steps:
        lines.append("Times of steps have 95% intervals; their difference has the confidence of the change.")
    if any(c.column is not None and c.column.relative_to for c in gate.shown):
        lines.append("The change of exposed communication is in percent of the baseline's step.")
    shown = gate.shown
    if hidden := [c for c in compared if c not in shown]:
        names = [*dict.fromkeys(c.column.label for c in hidden if c.column is not None)]
        lines.append(
            f"Not shown: {format_count(len(hidden), 'change')} of {format_list(names)}, which cannot fail "
            "the gate and have no certain change beyond the limit; --strict lets every metric fail it."
        )
    if gate.only_in_candidate:
        lines.append(f"Only in the candidate, not gated: {'; '.join(gate.only_in_candidate)}.")
    if gate.only_in_baseline:
        lines.append(f"Not measured in the candidate, not gated: {', '.join(gate.only_in_baseline)}.")
    if gate.conditions_block and (missing := gate.select_verdict("missing")):
        lines.append(f"Not measured in the candidate: {'; '.join(c.label for c in missing)}.")
    return lines


def list_reasons(gate: Gate) -> list[str]:
    """Explain the verdicts of rows, each once, with the rows where there are several reasons."""
    headline, found = describe_verdict(gate), dict[str, dict[str, list[str]]]()
    for c in gate.shown:
        if c.reason and c.reason not in headline:
            metric = f"{c.column.label} of " if c.column is not None else ""
            found.setdefault(c.verdict, {}).setdefault(c.reason, []).append(f"{metric}{c.name}")
    return [
        f"{begin_sentence(verdict)}: {reason}{'' if len(by) == 1 else f' ({format_list(names)})'}."
        for verdict, by in found.items()
        for reason, names in by.items()
    ]


def _describe_launches(gate: Gate) -> list[str]:
    """Write how far the intervals hold for other launches."""
    if not gate.interleaved:
        return ["Intervals are of these launches; others may differ by more."]
    turns = f"Interleaved, {format_count(gate.num_launches, 'launch')} of each side"
    looks = [*map(str, gate.policy.looks)]
    turns += f" (interim analyses after {format_list(looks, 20)})" if len(looks) > 1 else ""
    turns += ", ended by --max-time" if gate.ended_early else ""
    if gate.num_launches == 1:
        return [f"{turns}: another launch may differ by more."]
    lines = [f"{turns}: intervals include launch-to-launch, not day-to-day, variation."]
    rates = [c.ratio.low for c in gate.comparisons if c.decides and c.metric == "images_per_s" and c.ratio]
    if gate.decision.verdict == "pass" and rates:  # --ratios-only judges none
        lines.append(f"No case is slower by more than {100 * max(1 - min(rates), 0.0):.2g}%.")
    if (width := gate.compute_resolvable_change()) is not None:
        lines.append(f"A gate of as many launches can resolve changes of about ±{100 * width:.2g}%.")
    return lines


def make_annotations(gate: Gate) -> list[Annotation]:
    """Return GitHub's annotations: an error for each regression, a warning where nothing was decided."""
    title = get_message_prefix("gate")
    if gate.exit_code == ExitCode.UNDECIDED:
        return [Annotation("warning", title, describe_verdict(gate))]
    bad = ("regressed", "missing") if gate.exit_code == ExitCode.FAILED else ()
    found = [c for c in gate.comparisons if c.verdict in bad]
    return [Annotation("error", f"{title}: {c.verdict}", describe_change(c)) for c in found]


def encode_gate(gate: Gate) -> str:
    """Everything, for a program, comparisons worst first; what is unknown is null."""
    sides = gate.baseline.manifest, gate.candidate.manifest
    return to_json(
        {
            "verdict": gate.decision.verdict,
            "exit_code": gate.exit_code,
            "sentence": describe_verdict(gate),
            "compared": name_sides(gate.baseline, gate.candidate),
            "end_errors": asdict(gate.errors),  # of each single interval, fractions
            "cpu_stand_in": any(CPU_STAND_IN in one for one in gate.cautions),
            "code": make_code_record(*sides),
            "interleaved": gate.interleaved,
            "differences": gate.differences,
            "only_in_candidate": gate.only_in_candidate,
            "more": gate.more,  # what to do next
            "num_launches": gate.num_launches,
            "ended_early": gate.ended_early,  # by --max-time, between two looks
            "resolvable": gate.compute_resolvable_change(),  # a fraction
            "machine": gate.machine,
            "cautions": gate.cautions,
            "load": {"baseline": sides[0].load, "candidate": sides[1].load},
            "steps": gate.steps,  # of watched trainings, ms
            "comparisons": gate.comparisons,
        }
    )
