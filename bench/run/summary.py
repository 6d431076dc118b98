"""What a run shows of its cases and its end: a table, its answers, and what to run next."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from ddp_bench.bench.cli import print_table, speaker
from ddp_bench.bench.findings.caution import Caution
from ddp_bench.bench.findings.findings import Conclusion
from ddp_bench.bench.findings.next_step import NextStep
from ddp_bench.bench.findings.numbers import (
    MIB,
    between,
    duration,
    finite,
    number,
    per_second,
    plural,
    with_interval,
)
from ddp_bench.bench.findings.wording import (
    CPU_STAND_IN,
    compile_label,
    estimate,
    hidden_share,
    mode_label,
    settings_label,
    text,
    unit_of_cases,
    workload_parts,
)
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.manifest import Record, Timing, said
from ddp_bench.bench.results.comparisons import by_compile, compile_mode
from ddp_bench.bench.results.schema import CASES, Shown, records
from ddp_bench.bench.results.store import FAILURES, failure_file, shown
from ddp_bench.bench.text import visible

MOST_CAUTIONS = 2
"""Cautions on the terminal; the page has all."""

SAID_BY_THE_ANSWERS = ("few rounds", "wide intervals")
"""Kinds of caution that the answers state for each question."""

COLUMNS = {column.name: column.summary for column in CASES if column.summary is not None}
"""The columns of cases.csv that the table has, and how it shows them."""

OF_SCALING = frozenset(COLUMNS) - {"images_per_s"}
"""What cases that share devices say nothing about."""


def print_summary(
    cases: pd.DataFrame,
    conclusion: Conclusion,
    cautions: Sequence[Caution],
    timing: Timing,
    page: Path,
) -> None:
    """Print the table, the times of the run, and what was found; `page` is in the run's folder."""
    print_table(case_table(cases))
    print(_workload(cases))
    for row in records(cases[~cases["status"].isin(["ok", "skipped"])]):
        kept = page.parent / failure_file(str(row["case_id"]))
        why = shown(kept) if kept.is_file() else row["reason"]
        print(visible(f"{row['case_id']}: {row['status']}: {why}"))
    for line in _not_measured(cases):
        print(visible(line))
    if bool(cases.loc[cases["status"] == "ok", "oversubscribed"].any()):
        print("* more devices than there are: they share cores or GPUs")
    if (cases["device_type"] == "cpu").any():
        print(CPU_STAND_IN)
    print(
        f"{plural(timing.rounds or 0, 'round')} in {duration(timing.measuring_s)} of measuring, "
        f"{duration(timing.total_s)} in all with {timing.startup_s:.0f} s of start-up and preparation, "
        f"{timing.timed_share_pct:.0f}% in timed steps; ended: {timing.stopped_because}"
    )
    print()
    for sentence in conclusion.sentences:
        print(sentence)
    unsaid = [c for c in cautions if c.kind not in SAID_BY_THE_ANSWERS]
    for caution in unsaid[:MOST_CAUTIONS]:
        print(f"Caution, {caution.kind}: {caution.text}.")
    if len(unsaid) > MOST_CAUTIONS:
        print(f"More cautions on the page: {', '.join(c.kind for c in unsaid[MOST_CAUTIONS:])}.")
    print(f"Report: {page}")


def _not_measured(cases: pd.DataFrame) -> list[str]:
    """Say which cases were skipped, and why; a line per reason. On one device most are the plain module."""
    skipped = cases[(cases["status"] == "skipped") & (cases["num_devices"] > 1)]
    lines = []
    for reason, of_reason in skipped.groupby("reason", sort=False):
        first, *others = of_reason["case_id"]
        more = f" and {plural(len(others), 'other case')}" if others else ""
        lines.append(f"{first}{more}: skipped: {reason}")
    return lines


def print_not_measured(folder: Path, reasons: Sequence[str]) -> None:
    """Print, last of all, which modes could not be measured and where their tracebacks are."""
    if (folder / FAILURES).is_dir():
        print(f"{speaker()}: tracebacks of all ranks: {shown(folder / FAILURES)}", file=sys.stderr)
    for reason in reasons:
        print(visible(f"{speaker()}: error: {reason}"), file=sys.stderr, flush=True)


class Answer(Record, frozen=True, omit_defaults=False):
    """What a run says of one question."""

    question: Annotated[str, said("what is answered, such as wrapper or communication")]
    answer: Annotated[
        str, said("of a comparison faster, slower, equal or unresolved; resolved: nothing was compared")
    ]
    sentence: str
    paste: Annotated[str, said("a line of code that follows from it; may be empty")]


class Summary(Record, frozen=True, omit_defaults=False):
    """What `ddp-bench run --json` prints at the end of a run."""

    results: Annotated[str, said("the run's folder")]
    answers: tuple[Answer, ...]
    findings: Annotated[tuple[str, ...], said("further sentences")]
    next: Annotated[NextStep | None, said("the command to run next")]
    cautions: Annotated[tuple[Caution, ...], said("what to know before trusting the run")]
    timing: Timing
    cases: Annotated[tuple[dict[str, Any], ...], said("the rows of cases.csv")]


def summary_of(
    folder: Path, cases: pd.DataFrame, conclusion: Conclusion, cautions: Sequence[Caution], timing: Timing
) -> Summary:
    """Return the same for a program."""
    return Summary(
        results=str(folder),
        answers=tuple(
            Answer(question=one.question, answer=one.answer, sentence=one.said, paste=one.paste)
            for one in conclusion.verdicts
        ),
        findings=conclusion.notes,
        next=conclusion.next_step,
        cautions=tuple(cautions),
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
    """Every measured case with its intervals."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    unit = escape(visible(unit_of_cases(cases)))
    headings = [
        f"{per_second(unit)} (95%)" if one.digits is None else one.heading for one in COLUMNS.values()
    ]
    for name in ("case", "devices", "cap MiB", *headings, "rounds"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    rows = records(cases[cases["status"] == "ok"])
    several = len(by_compile(rows)) > 1
    for row in rows:
        compiled = compile_label(compile_mode(row)) if several and compile_mode(row) != "off" else ""
        table.add_row(
            ", ".join(filter(None, (mode_label(row), compiled, settings_label(row, with_cap=False)))),
            f"{row['num_devices']}{'*' if row['oversubscribed'] is True else ''}",
            text(row["bucket_cap_mb"]),
            *(
                "" if row["oversubscribed"] is True and name in OF_SCALING else _ranged(row, name, shown)
                for name, shown in COLUMNS.items()
            ),
            text(row["num_rounds"]),
        )
    return table


def _ranged(row: dict[Any, Any], name: str, shown: Shown) -> str:
    found = hidden_share(row) if name == "hidden_pct" else estimate(row, name)
    if found is None:
        return ""
    if shown.digits is None:
        return with_interval(found, digits=4)
    scaled = found.scaled(shown.factor)
    written = f"{scaled.estimate:.{shown.digits}f}"
    return (
        written
        if pd.isna(scaled.low) or scaled.low == scaled.high
        else f"{written} {between(scaled, shown.digits)}"
    )
