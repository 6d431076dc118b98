"""A gate as text: the plain verdict, a table for the terminal, Markdown, JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
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
from ..manifest import Manifest, Record
from ..text import markdown as markdown_text
from ..text import visible
from .code import CodeOfBoth
from .compare import FAMILY_CONFIDENCE, SAME_CODE, Gate
from .judge import Comparison, Verdict
from .more import More, more
from .runs import OF_THE_MODEL

Word = Literal["pass", "regression", "missing", "not comparable", "undecided"]
WORDS: dict[ExitCode, Word] = {
    ExitCode.OK: "pass",
    ExitCode.FAILED: "regression",
    ExitCode.NOT_COMPARABLE: "not comparable",
}

HEADINGS = ("verdict", "case", "metric", "baseline", "candidate", "ratio [interval]", "allowed", "")

_COUNTED: tuple[Verdict, ...] = (
    "regressed",
    "missing",
    "inconclusive",
    "improved",
    "unchanged",
    "not judged",
)


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
                "compared within rounds: the two sides took turns on one machine; baseline and candidate are "
                f"of a typical round of both. {_launches(gate.num_launches)}"
                if gate.interleaved
                else "of the figures in cases.csv, within the launches of both runs; they hold how much each "
                "run changed within itself."
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
    """`pass`, `regression`, `missing`; `undecided` where the rounds could not tell; `not comparable`."""
    if gate.exit_code == ExitCode.NOT_COMPARABLE and any(c.ratio is not None for c in gate.comparisons):
        return "undecided"
    lost = gate.exit_code == ExitCode.FAILED and not gate.having("regressed")
    return "missing" if lost else WORDS[gate.exit_code]


def with_more(
    gate: Gate,
    sides: tuple[Manifest, Manifest],
    asked: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Gate:
    """Add what would decide an undecided gate; the arguments are those of `more`."""
    if word(gate) != "undecided" or not gate.undecided:
        return gate
    launches = gate.num_launches if gate.interleaved else 0
    return replace(
        gate,
        more=more(sides, gate.undecided, confidence=gate.confidence, launches=launches, asked=asked),
    )


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
    what = ", ".join(counts)
    if word(gate) == "undecided":
        first = f"{_named(suspected[0])}, but {suspected[0].reason}; " if suspected else ""
        if suspected and suspected[0].reason == SAME_CODE:
            return f"{head}{first}{what}; measure again"
        decides = gate.more.sentence if gate.more else "no case that has its devices for itself was compared"
        return f"{head}{first}{what}; {decides}"
    worst = gate.comparisons[0]
    lead = f"{_named(worst)}; " if gate.exit_code == ExitCode.FAILED else ""
    if lead and not gate.interleaved and worst.metric is not None:
        lead += "the runs were not interleaved; "
    if not lead and not gate.interleaved and gate.having("improved"):
        lead = "the runs were not interleaved, so what improved may be the machine; "
    open_ = sorted({c.column.label for c in gate.having("inconclusive") if c.column})
    rest = f"; not decided, and not needed without --strict: {', '.join(open_)}" if open_ else ""
    return f"{head}{lead}{what}{rest if gate.exit_code == ExitCode.OK else ''}"


def _launches(how_many: int) -> str:
    """What the intervals of a gate in turns hold."""
    if how_many == 1:
        return "One launch: they hold within it, another may differ by more."
    return f"They hold what {how_many} launches differ by."


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
    more: More | None
    """What would decide it, where it is undecided."""
    num_launches: int
    """Of runs in turns; 1 of others: intervals hold within their launches."""
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
            more=gate.more,
            num_launches=gate.num_launches,
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
