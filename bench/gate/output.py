"""A gate as text: the plain verdict, a table for the terminal, Markdown, JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from ..cli import speaker, to_json
from ..conditions import Difference
from ..errors import ExitCode
from ..findings.next_step import NOT_INTERLEAVED, UNKNOWN_REF
from ..findings.numbers import rate
from ..findings.wording import CPU_STAND_IN
from ..github import Annotation
from ..manifest import Record
from ..text import markdown as markdown_text
from ..text import visible
from .code import CodeOfBoth
from .compare import FAMILY_CONFIDENCE, SAME_CODE, Gate
from .judge import DECIDED, Comparison, Verdict
from .runs import OF_THE_MODEL

Word = Literal["pass", "regression", "not comparable", "undecided"]
WORDS: dict[ExitCode, Word] = {
    ExitCode.OK: "pass",
    ExitCode.FAILED: "regression",
    ExitCode.NOT_COMPARABLE: "not comparable",
}

HEADINGS = ("verdict", "case", "metric", "baseline", "candidate", "ratio [interval]", "allowed", "")

_COUNTED: tuple[Verdict, ...] = ("regressed", "missing", "inconclusive", "improved", "unchanged")

MOST_ROUNDS = 1000
"""Advice to measure more rounds than this would help nobody."""


def table(gate: Gate) -> Table:
    """The comparisons, worst first, for rich."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        right = heading in ("baseline", "candidate", "ratio [interval]", "allowed")
        made.add_column(Text(heading), justify="right" if right else "left", overflow="fold")
    for comparison in gate.comparisons:
        made.add_row(*(Text(visible(cell)) for cell in cells(comparison)))
    return made


def conditions(gate: Gate) -> list[str]:
    """What is to be read before any number: separate runs, the code compared, what differs; a line each."""
    differing = [
        f"{'differs' if d.blocking else 'also differs'}: {d.name}: {d.then} -> {d.now}"
        for d in gate.differences
    ]
    first = [] if gate.interleaved else [NOT_INTERLEAVED]
    return [visible(line) for line in (*first, *gate.code.lines(), *differing)]


def notes(gate: Gate) -> list[str]:
    """How to read the table."""
    lines = []
    compared = [c for c in gate.comparisons if c.ratio is not None]
    if compared:
        lines.append(
            f"ratio: candidate / baseline, {100 * gate.confidence:.4g}% intervals "
            f"({100 * FAMILY_CONFIDENCE:g}% for all together); "
            + (
                "median of rounds compared in pairs: the two sides took turns on one machine; baseline and "
                "candidate are of a typical round of both, not what each run has by itself on its page."
                if gate.interleaved
                else "of the figures in cases.csv; they hold how much each run changed within itself."
            )
        )
    if any(c.column is not None and c.column.in_parts_of for c in compared):
        lines.append("of the step: candidate less baseline, in parts of the baseline's step.")
    if gate.model_change:
        lines.append(f"{gate.model_change}.")
    once = {c.column.label for c in gate.comparisons if c.column is not None and not c.is_repeated}
    if once:
        lines.append(f"{', '.join(sorted(once))}: one reading per run, compared exactly, no interval.")
    if gate.only_in_candidate:
        lines.append(f"only in the candidate, not gated: {', '.join(gate.only_in_candidate)}")
    if gate.only_in_baseline:
        lines.append(f"not measured in the candidate, not gated: {', '.join(gate.only_in_baseline)}")
    if compared and gate.interleave_command and (gate.differences or not gate.code.is_identical):
        unknown = f" {UNKNOWN_REF} " in gate.interleave_command
        where = f", {UNKNOWN_REF} being the baseline's commit" if unknown else ""
        lines.append(
            f"to tell the code from the machine{where}, in the folder that the runs were started in: "
            f"{gate.interleave_command}"
        )
    return [*lines, f"{CPU_STAND_IN}."] if gate.on_cpu else lines


def word(gate: Gate) -> Word:
    """`pass`, `regression`, `not comparable`; `undecided` where every interval was too wide."""
    compared = any(c.ratio is not None for c in gate.comparisons)
    return "undecided" if gate.exit_code == ExitCode.NOT_COMPARABLE and compared else WORDS[gate.exit_code]


def verdict(gate: Gate) -> str:
    """The last line: what was decided, on what, and what to do where nothing was."""
    counts = [f"{len(found)} {name}" for name in _COUNTED if (found := gate.having(name))]
    head = f"{word(gate)}: "
    if word(gate) == "not comparable":
        names = [d.name for d in gate.differences if d.blocking]
        if names and gate.having("not comparable"):
            return f"{head}the runs differ in {', '.join(names)}; {_nevertheless(names)}"
        return f"{head}the runs share no metric that could be gated"
    suspected = [c for c in gate.comparisons if c.suspected]
    if word(gate) == "undecided" and suspected:
        return f"{head}{_named(suspected[0])}, but {suspected[0].reason}; {', '.join(counts)}; " + (
            "measure again"
            if suspected[0].reason == SAME_CODE
            else "measure both in turns, with --interleave"
        )
    if word(gate) == "undecided":
        decided = any(c.verdict in DECIDED and c.is_repeated for c in gate.comparisons)
        nothing = "" if decided else ": nothing could be decided"
        return f"{head}{', '.join(counts)}{nothing}; {_longer(gate)}"
    worst = gate.comparisons[0]
    lead = f"{_named(worst)}; " if gate.exit_code == ExitCode.FAILED else ""
    if lead and not gate.interleaved and worst.metric is not None:
        lead += "the runs were not interleaved; "
    if not lead and not gate.interleaved and gate.having("improved"):
        lead = "the runs were not interleaved, so what improved may be the machine; "
    more = f"; to settle what is inconclusive, {_longer(gate)}" if gate.having("inconclusive") else ""
    return f"{head}{lead}{', '.join(counts)}{more if gate.exit_code == ExitCode.OK else ''}"


def markdown(gate: Gate) -> str:
    """The same for a job summary or a pull-request comment."""
    lines = [f"### {speaker('gate')}: {markdown_text(verdict(gate))}", ""]
    lines += [f"- {markdown_text(line)}" for line in conditions(gate)]
    lines += ["", f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(markdown_text(cell) for cell in cells(c))} |" for c in gate.comparisons]
    return "\n".join([*lines, "", *(f"{markdown_text(line)}\n" for line in notes(gate))])


def annotations_of(gate: Gate) -> list[Annotation]:
    """What GitHub shows above the log: an error for each regression, a warning where nothing was decided."""
    title = speaker("gate")
    if gate.exit_code == ExitCode.NOT_COMPARABLE:
        return [Annotation("warning", title, verdict(gate))]
    bad = [*gate.having("regressed"), *gate.having("missing")] if gate.exit_code == ExitCode.FAILED else []
    return [Annotation("error", f"{title}: {c.verdict}", _named(c)) for c in bad]


class Printed(Record, frozen=True, omit_defaults=False):
    """What `ddp-bench gate --json` prints."""

    verdict: Word
    exit_code: ExitCode
    sentence: str
    interval_confidence: float
    """Of each single interval, a fraction."""
    cpu_stand_in: bool
    code: CodeOfBoth
    interleaved: bool
    interleave_command: str | None
    model_change: str | None
    differences: tuple[Difference, ...]
    only_in_candidate: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    """Worst first."""


def as_json(gate: Gate) -> str:
    """Everything, for a program; what is unknown is null."""
    return to_json(
        Printed(
            verdict=word(gate),
            exit_code=gate.exit_code,
            sentence=verdict(gate),
            interval_confidence=gate.confidence,
            cpu_stand_in=gate.on_cpu,
            code=gate.code.of_both(),
            interleaved=gate.interleaved,
            interleave_command=gate.interleave_command or None,
            model_change=gate.model_change or None,
            differences=gate.differences,
            only_in_candidate=gate.only_in_candidate,
            comparisons=gate.comparisons,
        )
    )


def _nevertheless(names: Sequence[str]) -> str:
    """Say which option compares runs that differ in these conditions."""
    of_model = [name for name in names if name in OF_THE_MODEL]
    if len(of_model) == len(names):
        return "--allow-changed-model compares them, and names the change of the model"
    more = "; --allow-changed-model allows another model" if of_model else ""
    return f"--ratios-only still compares speed-up and efficiency{more}"


def cells(c: Comparison) -> tuple[str, ...]:
    """One row of the table, under `HEADINGS`."""
    name = c.case_id + (" (CPU stand-in)" if c.stand_in else "")
    label = c.column.label if c.column is not None else ""
    allowed = "" if c.threshold is None else f"± {100 * c.threshold:g}%"
    both = (_amount(c, c.baseline, c.units[0]), _amount(c, c.candidate, c.units[1]))
    return (c.verdict, name, label, *both, _ratio(c), allowed, c.reason)


def _amount(c: Comparison, value: float | None, unit: str) -> str:
    if value is None or c.column is None:
        return ""
    return rate(value, unit, digits=4) if c.column.is_rate else c.column.written.format(value)


def _ratio(c: Comparison) -> str:
    if c.ratio is None or c.column is None:
        return ""
    if c.column.in_parts_of:
        change, low, high = (100 * (end - 1) for end in (c.ratio.estimate, c.ratio.low, c.ratio.high))
        ends = "" if math.isnan(low) else f" [{low:+.1f}%, {high:+.1f}%]"
        return f"{change:+.1f}% of the step{ends}"
    if math.isnan(c.ratio.low):
        return f"{c.ratio.estimate:.3f}x"
    end = ">99" if c.ratio.high > 99 else f"{c.ratio.high:.3f}"
    return f"{c.ratio.estimate:.3f}x [{c.ratio.low:.3f}, {end}]"


def _named(c: Comparison) -> str:
    if c.column is None or c.ratio is None:
        what = f" {c.column.label}" if c.column else ""
        return f"{c.case_id}{what} is missing ({visible(c.reason)})"
    label, then, now, ratio = cells(c)[2:6]
    return f"{c.case_id} {label} {then} -> {now}, {ratio}"


def _longer(gate: Gate) -> str:
    """Rounds that bring the widest throughput interval to the threshold: its width goes as 1/sqrt(n)."""
    wanted = []
    for c in gate.having("inconclusive"):
        if not (c.column and c.column.is_rate and c.ratio and c.num_rounds and c.threshold):
            continue
        if math.isfinite(width := c.ratio.high - c.ratio.low):
            # Bounded: the square of a very wide one overflows.
            narrower = min(max(width / (2 * c.threshold), 1.0), MOST_ROUNDS)
            wanted.append(math.ceil(min(c.num_rounds) * narrower**2))
    most = max(wanted, default=0)
    if not 0 < most <= MOST_ROUNDS:
        return f"measure on a quieter machine and with more --rounds{' behind --' * gate.interleaved}"
    num_rounds = max(most, 10)
    if gate.interleaved:
        return f"measure with up to about --rounds {num_rounds} behind --"
    return f"measure both with up to about {num_rounds} rounds ({speaker('run')} --rounds {num_rounds})"
