"""What a run shows of its cases and its end: a table, its answers, and what to run next."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from ..common.cli import say
from ..common.console import print_table
from ..common.numbers import MIB, TIMES, duration, number, per_second, places, plural, ratio_places, to_places
from ..common.text import visible, visible_lines
from ..findings.cautions import Caution
from ..findings.confidence import Trust
from ..findings.findings import Conclusion
from ..findings.next_step import NextStep
from ..findings.wording import (
    DEFAULT_CAP,
    compile_label,
    hidden_percent,
    hidden_share,
    settings_label,
    short_mode,
    stand_ins,
    unit_of_cases,
    workload_parts,
)
from ..machine.manifest import Record, Timing
from ..plan.buckets import BucketLayout
from ..results.case_columns import CASES
from ..results.case_result import CaseResult
from ..results.comparisons import by_compile
from ..results.store import FAILURES, failure_file, shown
from ..stats.interval import Interval

COLUMNS = {column.name: column.summary for column in CASES if column.summary is not None}
"""The columns of cases.csv that the table has, and how it shows them."""

OF_SCALING = frozenset(COLUMNS) - {"images_per_s"}
"""What cases that share devices say nothing about."""

NOT_RANKED = "not ranked"

TABLE_WIDTH = 100

LABEL_WIDTH = 24
"""Columns of what stands before an answer, as `trust: other machines`; more where that is longer."""


def print_summary(folder: Path, conclusion: Conclusion, timing: Timing, page: Path | None) -> None:
    """Print the table, the times of the run, what was found, and where its `page` is, if it has one."""
    cases = conclusion.cases
    print_table(case_table(cases, conclusion.fastest_id), TABLE_WIDTH)
    print()
    print(_workload(cases))
    for case in cases:
        if case.has_failed:
            kept = folder / failure_file(case.case_id)
            print(visible(f"{case.case_id}: {case.status}: {shown(kept) if kept.is_file() else case.reason}"))
    if any(case.exposed_comm_ms for case in cases):
        print("(a\N{EN DASH}b): 95% interval; speed-up: over single; eff.: speed-up / devices;")
        print("exposed: what communication adds to the step; hidden: share of its own time that adds nothing")
    if {"default"} < {case.setting("bucket_cap_mb") for case in cases if case.mode == "ddp"}:
        print(DEFAULT_CAP)
    print(*stand_ins(cases), sep="\n")
    print(
        f"{plural(timing.rounds or 0, 'round')} in {duration(timing.measuring_s)}, "
        f"{timing.timed_share_pct:.0f}% of it timed steps, after {timing.startup_s:.0f} s of start-up; "
        f"ended: {timing.stopped_because}"
    )
    if conclusion.notes:
        print(*("", *(_filled("- ", note) for note in conclusion.notes)), sep="\n")
    # What a terminal shows last is read first.
    print()
    width = max([LABEL_WIDTH, *(len(label) + 1 for label, _ in conclusion.lines)])
    for label, said in conclusion.lines:
        print(_filled(f"{label:<{width}}", said) if label else visible(f"  {said}"))
    if page is not None:
        print(visible(f"{'report':<{width}}{page}"))


def _filled(label: str, said: str) -> str:
    """A text behind its label, as wide as the table at most."""
    return textwrap.fill(
        visible_lines(said),
        TABLE_WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_not_measured(folder: Path, reasons: Sequence[str]) -> None:
    """Print, last of all, which modes could not be measured and where their tracebacks are."""
    if (folder / FAILURES).is_dir():
        say(f"tracebacks of all ranks: {shown(folder / FAILURES)}")
    for reason in reasons:
        say(f"error: {reason}")


class Answer(Record, frozen=True, omit_defaults=False):
    """What a run says of one question."""

    question: str
    """What is answered, such as wrapper or communication."""
    answer: str
    """Of a comparison one of `ANSWERS`; resolved: nothing was compared."""
    sentence: str
    paste: str
    """A line of code that follows from it; may be empty."""


class Summary(Record, frozen=True, omit_defaults=False):
    """What `ddp-bench run --json` prints at the end of a run."""

    results: str
    answers: tuple[Answer, ...]
    findings: tuple[str, ...]
    next: NextStep | None
    trust: Trust | None
    """What the answers are worth, by what they claim; null where there are none."""
    cautions: tuple[Caution, ...]
    timing: Timing
    cases: tuple[dict[str, Any], ...]


def summary_of(folder: Path, cases: pd.DataFrame, conclusion: Conclusion, timing: Timing) -> Summary:
    """Return the same for a program."""
    return Summary(
        results=str(folder),
        answers=tuple(
            Answer(question=one.question, answer=one.answer, sentence=one.said, paste=one.paste)
            for one in conclusion.verdicts
        ),
        findings=(*conclusion.notes, *conclusion.background),
        next=conclusion.next_step,
        trust=conclusion.trust,
        cautions=conclusion.cautions,
        timing=timing,
        cases=tuple(json.loads(cases.to_json(orient="records"))),
    )


def _workload(cases: Sequence[CaseResult]) -> str:
    """Say what was trained; every case of a run trains the same."""
    first = cases[0]  # on one device, whose batch is that in all under strong scaling
    layout = BucketLayout.of_cell(next((case.bucket_bytes for case in cases if case.bucket_bytes), None))
    parts = (
        *workload_parts(first, first.batch_per_device),
        f"gradients of {number(sum(layout.num_bytes) / MIB)} MiB" if layout else "",
        f"torch {first.torch_version}" if first.torch_version else "",
    )
    return ", ".join(visible(part) for part in parts if part)


def case_table(cases: Sequence[CaseResult], fastest_id: str = "") -> Table:
    """Every measured case with devices of its own, with 95% intervals; `fastest_id` stands out in colour.

    Cases that share devices are shown where there is no other; else the notes have them in one line.
    """
    measured = [case for case in cases if case.is_ok]
    own = [case for case in measured if not case.oversubscribed]
    shown = own if any(case.num_devices > 1 for case in own) else measured
    shown = sorted(shown, key=lambda case: case.is_stand_in)
    on_cpu = any(case.device_type == "cpu" for case in shown)
    rate = escape(visible(per_second(unit_of_cases(cases))))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0))
    headings = [column.heading or rate for column in COLUMNS.values()]
    for name in ("case", "cores" if on_cpu else "GPUs", "cap MiB", *headings):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=name != "case")
    several = len(by_compile(shown)) > 1
    columns = [_column(shown, name) for name in COLUMNS]
    for case, *cells in zip(shown, *columns, strict=True):
        compiled = compile_label(case.compile) if several and case.compile != "off" else ""
        shares = "shared" if case.oversubscribed else ""
        parts = (short_mode(case), compiled, settings_label(case, with_cap=False), shares)
        table.add_row(
            ", ".join(filter(None, parts)),
            f"{case.num_devices}",
            case.setting("bucket_cap_mb") if case.mode == "ddp" else "",
            *cells,
            style="bold green" if case.case_id == fastest_id else None,
        )
    return table


def _column(cases: Sequence[CaseResult], name: str) -> list[str]:
    """A column's cells, with as many decimal places as the narrowest interval of the column bears."""
    how = COLUMNS[name]
    read = hidden_share if name == "hidden_pct" else lambda case: case.interval(name)
    found = [
        None if (case.oversubscribed and name in OF_SCALING) or case.is_stand_in else read(case)
        for case in cases
    ]
    scaled = [one and one.scaled(how.factor) for one in found]
    digits = 4 if how.form == "rate" else 3
    needed = ratio_places if how.form == "ratio" else partial(places, digits=digits)
    behind = max((needed(one) for one in scaled if one), default=0)
    unit = {"ratio": TIMES, "percent": "%"}.get(how.form, "")

    def cell(one: Interval | None) -> str:
        if name == "hidden_pct":
            return hidden_percent(one, lambda share: to_places(replace(share, low=math.nan), behind, unit))
        if one is None:
            return ""
        shown = one if how.form in ("rate", "ratio", "interval") else replace(one, low=math.nan)
        return to_places(shown, behind, unit)

    cells = [cell(one) for one in scaled]
    if name == "speedup":
        cells = [NOT_RANKED if case.is_stand_in else text for case, text in zip(cases, cells, strict=True)]
    return cells
