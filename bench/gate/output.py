"""A gate in words: one sentence, what to read before and after the table, the table; and JSON."""

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
from ..page.page import Heading, Page, Table
from .compare import Gate
from .decide import INFORMATIVE_ERRORS, MAX_ERROR
from .headline import TONES, describe_verdict, get_next_step
from .watched import make_cards, tabulate_parts
from .wording import describe_change, format_row

NOT_INTERLEAVED = "The runs were not interleaved: a change may be the machine's, not the code's."
"""Stands before every comparison of two separate runs."""

_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
"""A commit; twelve digits name it."""

_COLUMNS = (
    *(Heading("Case"), Heading("Metric")),
    *(Heading("Baseline", "number", drop=1), Heading("Candidate", "number", drop=1)),
    *(Heading("Change", "number"), Heading("Verdict")),
)

_DIFFERENCES = (Heading("Condition"), Heading("Baseline"), Heading("Candidate"), Heading("Effect"))


def make_outline(gate: Gate) -> Page:
    """Make the page of a gate without its figures: the decision, the table, how to read it, what to do."""
    parts = [tabulate_parts(gate.code.baseline, gate.code.candidate)] if gate.steps else []
    return Page(
        title="",
        status=describe_verdict(gate),
        tone=TONES[gate.decision.verdict],
        facts=list_facts(gate),
        cards=make_cards(gate.steps) if gate.steps else [],
        warnings=list_warnings(gate),
        following=get_next_step(gate),
        differences=_tabulate_differences(gate),
        notes=list_notes(gate),
        tables=[table for table in (_tabulate_changes(gate), *parts) if table.rows],
    )


def _tabulate_changes(gate: Gate) -> Table:
    rows = tuple(map(format_row, gate.shown))
    below = list_reasons(gate)
    if gate.interleaved and any(c.metric == "speedup" for c in gate.shown):
        below.append("Speed-ups are taken within rounds: they can differ from the ratio of the rates shown.")
    return Table("Every comparison", "The worst first.", _COLUMNS, rows, below=tuple(below))


def _tabulate_differences(gate: Gate) -> Table | None:
    """List the conditions that differ, those that block the comparison first; None where none does."""
    effects = ("does not block", "blocks the comparison")
    rows = [_format_lines((d.name, d.then, d.now, effects[d.blocking])) for d in gate.differences]
    width = len(_DIFFERENCES) - (not gate.conditions_block)
    shown = tuple(tuple(row[:width]) for row in rows)
    return Table("What differs between the sides", "", _DIFFERENCES[:width], shown) if shown else None


def list_warnings(gate: Gate) -> list[str]:
    """Say what speaks against the comparison: separate runs, the machine."""
    separate = [] if gate.interleaved or gate.conditions_block else [NOT_INTERLEAVED]
    return _format_lines(separate, map(_make_sentence, gate.cautions))


def list_facts(gate: Gate) -> list[str]:
    """Say what was compared, on what machine, and what changed beside what decided; a line each."""
    noted = [f"for information: {describe_change(c)}" for c in gate.select_verdict("informational")]
    has_ratios = gate.conditions_block and any(c.metric == "speedup" for c in gate.comparisons)
    ratios = "--ratios-only still compares speed-up" if has_ratios else ""
    about = (ratios, gate.code.describe_same_code(), *gate.machine, *noted)
    return _format_lines(map(_make_sentence, filter(None, (gate.code.name_sides(), *about))))


def _make_sentence(said: str) -> str:
    return f"{begin_sentence(said)}."


def _format_lines(*found: Iterable[str]) -> list[str]:
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
    looks = format_list([*map(str, gate.looks)], 20)
    turns += f" (interim analyses after {looks})" if len(gate.looks) > 1 else ""
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
    return to_json(
        {
            "verdict": gate.decision.verdict,
            "exit_code": gate.exit_code,
            "sentence": describe_verdict(gate),
            "compared": gate.code.name_sides(),
            "end_errors": asdict(gate.errors),  # of each single interval, fractions
            "cpu_stand_in": any(CPU_STAND_IN in one for one in gate.cautions),
            "code": gate.code.to_record(),
            "interleaved": gate.interleaved,
            "differences": gate.differences,
            "only_in_candidate": gate.only_in_candidate,
            "more": gate.more,  # what to do next
            "num_launches": gate.num_launches,
            "ended_early": gate.ended_early,  # by --max-time, between two looks
            "resolvable": gate.compute_resolvable_change(),  # a fraction
            "machine": gate.machine,
            "cautions": gate.cautions,
            "load": {"baseline": gate.code.baseline.load, "candidate": gate.code.candidate.load},
            "steps": gate.steps,  # of watched trainings, ms
            "comparisons": gate.comparisons,
        }
    )
