"""A gate in words: one sentence, what to read before and after the table, the table; and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict

from ..common.cli import get_message_prefix
from ..common.console import Annotation
from ..common.errors import ExitCode
from ..common.numbers import format_count
from ..common.text import escape_controls, format_list, to_json
from ..findings.wording import CPU_STAND_IN
from ..machine.conditions import Difference
from ..page.page import BAD, GOOD, UNSURE, Card, Heading, Page, Table, Tone
from .compare import Gate
from .decide import INFORMATIVE_ERRORS, MAX_ERROR
from .headline import (
    MAX_NAMED,
    TONES,
    describe_changes,
    describe_ratios_only,
    describe_reason,
    describe_verdict,
    write_headline,
)
from .judge import VERDICTS, Change, Verdict
from .wording import describe_change, format_row

NOT_INTERLEAVED = "Not measured in turns: a change may be the machine's, not the code's."
"""Stands before every comparison of two separate runs."""

_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
"""A commit; twelve digits name it."""

_COLUMNS = (
    *(Heading("Case"), Heading("Metric")),
    *(Heading("Baseline", "number", drop=1), Heading("Candidate", "number", drop=1)),
    *(Heading("Change", "number"), Heading("Verdict")),
)

_TONES: dict[Verdict, Tone] = {
    "regressed": BAD,
    "missing": BAD,
    "improved": GOOD,
    "allowed": GOOD,
}


def make_outline(gate: Gate) -> Page:
    """Make the page of a gate without its figures: the decision, the table, how to read it, what to do."""
    rows = tuple(map(format_row, gate.shown))
    return Page(
        title="",
        status=write_headline(gate),
        tone=TONES[gate.decision.verdict],
        facts=list_facts(gate),
        warnings=list_warnings(gate),
        cards=make_cards(gate),
        following=gate.more,
        notes=list_notes(gate),
        tables=[Table("Every comparison", "The worst first.", _COLUMNS, rows)] if rows else [],
    )


def make_cards(gate: Gate) -> list[Card]:
    """A card for each metric, of its worst verdict."""
    by_metric: dict[str, list[Change]] = {"throughput": []}  # comes first
    for one in gate.shown:
        by_metric.setdefault(one.column.label if one.column else "cases", []).append(one)
    made = []
    for label, found in by_metric.items():
        if not found:
            continue
        worst = min((one.verdict for one in found), key=VERDICTS.index)
        those = [one for one in found if one.verdict == worst]
        if worst == "allowed":
            sentence = f"No case is worse by more than {100 * (those[0].threshold or 0):g}%."
        elif worst == "not comparable" and gate.conditions_block:
            continue  # the headline says what differs
        elif worst == "not comparable":
            sentence = _make_sentence(those[0].reason)
        else:
            sentence = _make_sentence(describe_changes(those))
        tone = _TONES.get(worst, UNSURE)
        state = "equal" if worst == "noted" else tone.name
        sign = "" if worst == "noted" else f"{tone.sign} "
        made.append(
            Card(f"{label[:1].upper()}{label[1:]}", state, f"{sign}{worst[:1].upper()}{worst[1:]}", sentence)
        )
    return made


def list_warnings(gate: Gate) -> list[str]:
    """Say what speaks against the comparison: separate runs, the machine, conditions that differ."""
    found = [] if gate.interleaved else [NOT_INTERLEAVED]
    found += [f"{CPU_STAND_IN}."] if gate.on_cpu else []
    found += map(_make_sentence, gate.cautions)
    unnamed = gate.blocking[MAX_NAMED * gate.conditions_block :]  # the headline names the first
    found += [f"differs: {_format_difference(d)}" for d in unnamed]
    others = [d for d in gate.differences if not d.blocking]
    return _format_lines(found, [f"differs (not blocking): {_format_difference(d)}" for d in others])


def list_facts(gate: Gate) -> list[str]:
    """Say why it was decided so, then what was compared, and on what machine; a line each."""
    why = describe_ratios_only(gate) if gate.conditions_block else describe_reason(gate)
    return _format_lines(
        map(_make_sentence, filter(None, (why, gate.code.describe_same_code(), *gate.machine)))
    )


def _make_sentence(said: str) -> str:
    return f"{said[:1].upper()}{said[1:]}."


def _format_difference(one: Difference) -> str:
    return f"{one.name}: {one.then} → {one.now}"


def _format_lines(*found: Iterable[str]) -> list[str]:
    return [escape_controls(_HASH.sub(r"\1", line)) for lines in found for line in lines]


def list_notes(gate: Gate) -> list[str]:
    """Explain how to read the table, and why undecided changes are undecided."""
    lines = []
    compared = [c for c in gate.comparisons if c.ratio is not None]
    if compared:
        bound = (
            f"; over all cases and looks at most {100 * MAX_ERROR:g}% of gates report a regression that is "
            "none, or pass one at the threshold"
        )
        lines.append(
            f"Change: candidate / baseline - 1. Intervals: {gate.errors}{bound if gate.interleaved else ''}."
        )
        if any(not c.decides and c.verdict == "noted" for c in gate.shown):
            lines.append(
                f"A noted change informs and fails nothing; its interval is one of "
                f"{100 * (1 - INFORMATIVE_ERRORS.worse - INFORMATIVE_ERRORS.better):g}% by itself."
            )
        lines += _describe_launches(gate)
    if gate.interleaved and any(c.metric == "speedup" for c in gate.shown):
        lines.append("Speed-up is the typical ratio within rounds, not the quotient of the two rates shown.")
    if any(c.column is not None and c.column.in_parts_of for c in gate.shown):
        lines.append("The change of exposed communication is in percent of the baseline's step.")
    lines += list_reasons(gate)
    shown = gate.shown
    if hidden := [c for c in gate.comparisons if c not in shown]:
        names = [*dict.fromkeys(c.column.label for c in hidden if c.column is not None)]
        lines.append(
            f"Not shown: {format_count(len(hidden), 'change')} of metrics that only inform "
            f"({format_list(names)}); "
            "--strict lets every metric fail the gate."
        )
    if gate.only_in_candidate:
        lines.append(f"Only in the candidate, not gated: {'; '.join(gate.only_in_candidate)}.")
    if gate.only_in_baseline:
        lines.append(f"Not measured in the candidate, not gated: {', '.join(gate.only_in_baseline)}.")
    return lines


def list_reasons(gate: Gate) -> list[str]:
    """Why rows have their verdicts, each once, with the rows where there are several reasons."""
    found: dict[str, dict[str, list[str]]] = {}
    for c in gate.shown:
        if c.reason and not (gate.conditions_block and c.verdict == "not comparable"):
            metric = f"{c.column.label} of " if c.column is not None else ""
            found.setdefault(c.verdict, {}).setdefault(c.reason, []).append(f"{metric}{c.name}")
    return [
        f"{verdict[:1].upper()}{verdict[1:]}: {reason}{'' if len(by) == 1 else f' ({format_list(names)})'}."
        for verdict, by in found.items()
        for reason, names in by.items()
    ]


def _describe_launches(gate: Gate) -> list[str]:
    """Write how far the intervals hold for other launches."""
    if not gate.interleaved:
        return ["Intervals are of these launches; others may differ by more."]
    turns = f"Measured in turns, {format_count(gate.num_launches, 'launch')} of each side"
    looked = f" (looks after {format_list([*map(str, gate.looks)], 20)})" if len(gate.looks) > 1 else ""
    looked += ", ended by --max-time" if gate.ended_early else ""
    if gate.num_launches == 1:
        return [f"{turns}{looked}: another may differ by more."]
    lines = [f"{turns}{looked}: intervals include launch-to-launch, not day-to-day, variation."]
    if (width := gate.compute_resolvable_change()) is not None:
        lines.append(f"This gate can resolve changes of about ±{100 * width:.2g}%.")
    return lines


def make_annotations(gate: Gate) -> list[Annotation]:
    """Return GitHub's annotations: an error for each regression, a warning where nothing was decided."""
    title = get_message_prefix("gate")
    if gate.exit_code == ExitCode.UNDECIDED:
        return [Annotation("warning", title, describe_verdict(gate))]
    bad = (
        [*gate.select_verdict("regressed"), *gate.select_verdict("missing")]
        if gate.exit_code == ExitCode.FAILED
        else []
    )
    return [Annotation("error", f"{title}: {c.verdict}", describe_change(c)) for c in bad]


def encode_gate(gate: Gate) -> str:
    """Everything, for a program, comparisons worst first; what is unknown is null."""
    return to_json(
        {
            "verdict": gate.decision.verdict,
            "exit_code": gate.exit_code,
            "headline": write_headline(gate),
            "sentence": describe_verdict(gate),
            "end_errors": asdict(gate.errors),  # of each single interval, fractions
            "cpu_stand_in": gate.on_cpu,
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
            "comparisons": gate.comparisons,
        }
    )
