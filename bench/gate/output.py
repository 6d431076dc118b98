"""A gate in words: one sentence, what to read before and after the table, the table; and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..common.cli import speaker
from ..common.console import Annotation
from ..common.errors import ExitCode
from ..common.numbers import plural
from ..common.text import listed, to_json, visible
from ..findings.next_step import NextStep
from ..findings.wording import CPU_STAND_IN
from ..page.page import Card, Heading, Page, Step, Table
from .compare import Gate
from .decide import FAMILY_CONFIDENCE, INFORMING_CONFIDENCE
from .judge import VERDICTS, Change, Verdict, cells, said
from .more import UNKNOWN_REF

NOT_INTERLEAVED = "Not measured in turns: a change may be the machine's, not the code's."
"""Stands before every comparison of two separate runs."""

_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
"""A commit; twelve digits name it."""

MOST_NAMED = 2
"""Cases in one sentence."""

_COLUMNS = (
    *(Heading("Case"), Heading("Metric")),
    *(Heading("Baseline", "number", drop=1), Heading("Candidate", "number", drop=1)),
    *(Heading("Change", "number"), Heading("Verdict")),
)

_STATES: dict[Verdict, str] = {
    "regressed": "found",
    "improved": "found",
    "noted": "equal",
    "allowed": "equal",
}


def outline(gate: Gate) -> Page:
    """Make the page of a gate without its figures: the decision, the table, how to read it, what to do."""
    step = decides(gate)
    rows = tuple(map(cells, gate.shown))
    return Page(
        title="",
        status=verdict(gate),
        warnings=conditions(gate),
        cards=cards(gate),
        following=Step(step.why, step.command) if step else None,
        notes=notes(gate),
        tables=[Table("Every comparison", "The worst first.", _COLUMNS, rows)] if rows else [],
    )


def cards(gate: Gate) -> list[Card]:
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
        elif worst == "not comparable":
            differing = ", ".join(d.name for d in gate.differences if d.blocking)
            why = f"the runs differ in {differing}" if differing else those[0].reason
            sentence = f"{why[:1].upper()}{why[1:]}."
        else:
            sentence = f"{named(those)[:1].upper()}{named(those)[1:]}."
        title, state = f"{label[:1].upper()}{label[1:]}", _STATES.get(worst, "open")
        made.append(Card(title, state, f"{worst[:1].upper()}{worst[1:]}", sentence))
    return made


def conditions(gate: Gate) -> list[str]:
    """What is to be read before any number: separate runs, the code compared, what differs; a line each."""
    differing = [
        f"{'differs' if d.blocking else 'differs, no obstacle'}: {d.name}: {d.then} -> {d.now}"
        for d in gate.differences
    ]
    first = [] if gate.interleaved else [NOT_INTERLEAVED]
    first += [f"{CPU_STAND_IN}."] if gate.on_cpu else []
    return [visible(_HASH.sub(r"\1", line)) for line in (*first, *gate.code.lines(), *differing)]


def notes(gate: Gate) -> list[str]:
    """How to read the table, and why what is not decided is not."""
    lines = []
    compared = [c for c in gate.comparisons if c.ratio is not None]
    if compared:
        lines.append(
            f"Change: candidate / baseline - 1. Intervals: {100 * gate.confidence:.4g}% each, "
            f"{100 * FAMILY_CONFIDENCE:g}% for all changes that can fail the gate, and all looks, together."
        )
        if any(not c.decides and c.verdict == "noted" for c in gate.shown):
            lines.append(
                f"A noted change informs and fails nothing; its interval is one of "
                f"{100 * INFORMING_CONFIDENCE:g}% by itself."
            )
        lines += _launches(gate)
    if any(c.column is not None and c.column.in_parts_of for c in gate.shown):
        lines.append("The change of exposed communication is in percent of the baseline's step.")
    lines += reasons(gate)
    if hidden := len(gate.comparisons) - len(gate.shown):
        lines.append(
            f"Not shown: {plural(hidden, 'change')} of metrics that only inform; --strict lets every metric "
            "fail the gate."
        )
    if gate.only_in_candidate:
        lines.append(f"Only in the candidate, not gated: {'; '.join(gate.only_in_candidate)}.")
    if gate.only_in_baseline:
        lines.append(f"Not measured in the candidate, not gated: {', '.join(gate.only_in_baseline)}.")
    return lines


def reasons(gate: Gate) -> list[str]:
    """Why rows have their verdicts, each once, with the rows where there are several reasons."""
    found: dict[str, dict[str, list[str]]] = {}
    for c in gate.shown:
        if c.reason:
            metric = f"{c.column.label} of " if c.column is not None else ""
            found.setdefault(c.verdict, {}).setdefault(c.reason, []).append(f"{metric}{c.name}")
    return [
        f"{verdict[:1].upper()}{verdict[1:]}: {reason}{'' if len(by) == 1 else f' ({listed(names)})'}."
        for verdict, by in found.items()
        for reason, names in by.items()
    ]


def decides(gate: Gate) -> NextStep | None:
    """What would decide it, or tell the code from the machine; None where nothing is left to be told."""
    if gate.decision.verdict == "undecided" and gate.more:
        return gate.more.step
    told_apart = gate.code.is_identical and not gate.differences
    if told_apart or not gate.interleave_command or not any(c.ratio for c in gate.comparisons):
        return None
    where = ", REF being the baseline's commit" if f" {UNKNOWN_REF} " in gate.interleave_command else ""
    return NextStep(
        f"to tell the code from the machine{where}, where both were started", gate.interleave_command
    )


def verdict(gate: Gate) -> str:
    """What was decided, in one sentence."""
    found = gate.decision.verdict
    why = {"pass": _passed, "undecided": _undecided, "not comparable": _not_comparable}.get(found, _failed)
    return f"{found}: {why(gate)}"


def _failed(gate: Gate) -> str:
    regressed = gate.having("regressed")
    if not regressed:
        return f"{named(gate.decision.reasons)}; --allow-missing passes without them"
    others = len({c.case_id for c in gate.undecided} - {c.case_id for c in regressed})
    undecided = f"; {plural(others, 'other case')} undecided" if others else ""
    limit = _limit(regressed)
    are = "are" if " and " in limit else "is"
    return f"{named(regressed)}{undecided}; {limit} {are} allowed{_apart(gate)}"


def _limit(found: Iterable[Change]) -> str:
    """The thresholds of changes; where they differ, each with its metric."""
    by_metric = {c.column.label: f"{100 * (c.threshold or 0):g}%" for c in found if c.column is not None}
    if len(set(by_metric.values())) == 1:
        return next(iter(by_metric.values()))
    return " and ".join(f"{limit} of {label}" for label, limit in by_metric.items())


def _passed(gate: Gate) -> str:
    reasons = gate.decision.reasons
    noted = [said(c) for c in gate.having("noted")]
    more = f"; for information: {'; '.join(noted[:MOST_NAMED])}" if noted else ""
    if better := [c for c in reasons if c.verdict == "improved"]:
        caveat = _apart(gate)
        return f"{named(better)}{caveat and f'{caveat}, so it may be the machine'}{more}"
    # A case passes by its rate; other metrics may be allowed other changes.
    rates = [c for c in reasons if c.metric == "images_per_s"] or reasons
    return f"no case is more than {_limit(rates)} slower{more}"


def _undecided(gate: Gate) -> str:
    if suspected := [c for c in gate.comparisons if c.suspected]:
        return f"{said(suspected[0])}, but {suspected[0].reason}"
    if gate.undecided:
        return f"{named(gate.undecided)}: perhaps over the allowed {_limit(gate.undecided)}, perhaps not"
    return "every case shares its devices, so none is judged"


def _not_comparable(gate: Gate) -> str:
    names = [d.name for d in gate.differences if d.blocking]
    if names and gate.decision.reasons:
        ratios = any(c.metric == "speedup" for c in gate.comparisons)
        fix = "--ratios-only still compares speed-up" if ratios else "--interleave REF measures both in turns"
        if not ratios and not gate.interleave_command:
            fix = "measure both alike"
        return f"the runs differ in {', '.join(names)}; {fix}"
    if gate.decision.reasons:
        return gate.decision.reasons[0].reason
    return "the runs share no metric that could be gated"


def _apart(gate: Gate) -> str:
    return "" if gate.interleaved else "; the runs were not measured in turns"


def named(found: Sequence[Change]) -> str:
    """Say what became of two cases, by their throughput if it is among it, and how many others there are."""
    by_case = {c.case_id: c for c in sorted(found, key=lambda c: c.metric == "images_per_s")}
    first = list(dict.fromkeys(by_case[c.case_id] for c in found))
    others = [f"and {plural(len(first) - MOST_NAMED, 'other case')}"] if len(first) > MOST_NAMED else []
    return "; ".join([*map(said, first[:MOST_NAMED]), *others])


def _launches(gate: Gate) -> list[str]:
    """What the intervals hold of other launches."""
    if not gate.interleaved:
        return ["Intervals are of these launches; others may differ by more."]
    turns = f"Measured in turns, {plural(gate.num_launches, 'launch')} of each side"
    if gate.num_launches == 1:
        return [f"{turns}: another may differ by more."]
    looked = f" (looks after {listed([*map(str, gate.looks)])})" if len(gate.looks) > 1 else ""
    return [f"{turns}{looked}: intervals cover how launches differ, not days."]


def annotations_of(gate: Gate) -> list[Annotation]:
    """What GitHub shows above the log: an error for each regression, a warning where nothing was decided."""
    title = speaker("gate")
    if gate.exit_code == ExitCode.UNDECIDED:
        return [Annotation("warning", title, verdict(gate))]
    bad = [*gate.having("regressed"), *gate.having("missing")] if gate.exit_code == ExitCode.FAILED else []
    return [Annotation("error", f"{title}: {c.verdict}", said(c)) for c in bad]


def as_json(gate: Gate) -> str:
    """Everything, for a program, comparisons worst first; what is unknown is null."""
    return to_json(
        {
            "verdict": gate.decision.verdict,
            "exit_code": gate.exit_code,
            "sentence": verdict(gate),
            "interval_confidence": gate.confidence,  # of each single interval, a fraction
            "cpu_stand_in": gate.on_cpu,
            "code": gate.code.of_both(),
            "interleaved": gate.interleaved,
            "interleave_command": gate.interleave_command or None,
            "differences": gate.differences,
            "only_in_candidate": gate.only_in_candidate,
            "more": gate.more,  # what would decide it, where it is undecided
            "num_launches": gate.num_launches,
            "comparisons": gate.comparisons,
        }
    )
