"""What a run shows of its cases and its end: a table, its answers, and what to run next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from ..buckets import MIB, BucketLayout
from ..cli import print_table, say
from ..findings.cautions import Caution
from ..findings.findings import Conclusion
from ..findings.next_step import NextStep
from ..findings.numbers import (
    duration,
    finite,
    number,
    per_second,
    plural,
    ratio,
    with_interval,
)
from ..findings.wording import (
    DEFAULT_CAP,
    compile_label,
    estimate,
    hidden_percent,
    settings_label,
    short_mode,
    stand_ins,
    text,
    unit_of_cases,
    workload_parts,
)
from ..manifest import Record, Timing
from ..results.case_columns import EXPOSED_COMM
from ..results.comparisons import by_compile, compile_mode
from ..results.schema import CASES, records
from ..results.store import FAILURES, failure_file, shown
from ..text import visible, visible_lines

COLUMNS = {column.name: column.summary for column in CASES if column.summary is not None}
"""The columns of cases.csv that the table has, and how it shows them."""

OF_SCALING = frozenset(COLUMNS) - {"images_per_s"}
"""What cases that share devices say nothing about."""

TABLE_WIDTH = 100


def print_summary(
    folder: Path, cases: pd.DataFrame, conclusion: Conclusion, timing: Timing, page: Path | None
) -> None:
    """Print the table, the times of the run, what was found, and where its `page` is, if it has one."""
    print_table(case_table(cases), TABLE_WIDTH)
    print()
    print(_workload(cases))
    for row in records(cases[~cases["status"].isin(["ok", "skipped"])]):
        kept = folder / failure_file(str(row["case_id"]))
        why = shown(kept) if kept.is_file() else row["reason"]
        print(visible(f"{row['case_id']}: {row['status']}: {why}"))
    if bool(cases.loc[cases["status"] == "ok", "oversubscribed"].any()):
        print("* more devices than there are: they share cores or GPUs")
    if cases[EXPOSED_COMM].notna().any():
        print("exposed: what communication adds to the step; hidden: what of its time alone it does not add")
    if {"default"} < set(cases["bucket_cap_mb"].dropna()):
        print(DEFAULT_CAP)
    for line in stand_ins(cases):
        print(line)
    print(
        f"{plural(timing.rounds or 0, 'round')} in {duration(timing.measuring_s)} of measuring, "
        f"{duration(timing.total_s)} in all with {timing.startup_s:.0f} s of start-up and preparation, "
        f"{timing.timed_share_pct:.0f}% in timed steps; ended: {timing.stopped_because}"
    )
    # What a terminal shows last is read first.
    for told in filter(None, (conclusion.notes, conclusion.sentences)):
        print(*("", *map(visible_lines, told)), sep="\n")
    if page is not None:
        print(visible(f"Report: {page}"))


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
    trust: str
    """What the answers are worth, in one line; empty where there are none."""
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
        findings=conclusion.notes,
        next=conclusion.next_step,
        trust=conclusion.trust,
        cautions=conclusion.cautions,
        timing=timing,
        cases=tuple(json.loads(cases.to_json(orient="records"))),
    )


def _workload(cases: pd.DataFrame) -> str:
    """Say what was trained; every case of a run trains the same."""
    row = cases.iloc[0].to_dict()  # on one device, whose batch is that in all under strong scaling
    ddp = cases[cases["bucket_bytes"].notna()]
    layout = None if ddp.empty else BucketLayout.of_cell(ddp.iloc[0]["bucket_bytes"])
    torch = text(row["torch_version"])
    parts = (
        *workload_parts(row, finite(row["batch_per_device"])),
        f"gradients of {number(sum(layout.num_bytes) / MIB)} MiB" if layout else "",
        f"torch {torch}" if torch else "",
    )
    return ", ".join(visible(part) for part in parts if part)


def case_table(cases: pd.DataFrame) -> Table:
    """Every measured case, with 95% intervals; what has none here is as well known as what it is made of."""
    rows = records(cases[cases["status"] == "ok"])
    on_cpu = any(row["device_type"] == "cpu" for row in rows)
    rate = f"{escape(visible(per_second(unit_of_cases(cases))))} (95%)"
    headings = [shown.heading or rate for shown in COLUMNS.values()]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0))
    for name in ("case", "cores" if on_cpu else "GPUs", "cap", *headings):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=name != "case")
    several = len(by_compile(rows)) > 1
    for row in rows:
        compiled = compile_label(compile_mode(row)) if several and compile_mode(row) != "off" else ""
        shared = row["oversubscribed"] is True
        table.add_row(
            ", ".join(filter(None, (short_mode(row), compiled, settings_label(row, with_cap=False)))),
            f"{row['num_devices']}{'*' if shared else ''}",
            text(row["bucket_cap_mb"]),
            *("" if shared and name in OF_SCALING else _cell(row, name) for name in COLUMNS),
        )
    return table


def _cell(row: dict[Any, Any], name: str) -> str:
    if name == "hidden_pct":
        return hidden_percent(row, lambda share: f"{share.estimate:.0f}%")
    shown, found = COLUMNS[name], estimate(row, name)
    if found is None:
        return ""
    scaled = found.scaled(shown.factor)
    written = {
        "rate": with_interval(scaled, digits=4),
        "interval": with_interval(scaled),
        "ratio": ratio(scaled),
        "percent": f"{scaled.estimate:.0f}%",
        "number": number(scaled.estimate),
    }
    return written[shown.form]
