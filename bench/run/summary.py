"""Prints the end of a run on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from bench.cli import print_table, to_json
from bench.findings.stability import Caution
from bench.findings.wording import CPU_STAND_IN, stand_in, text
from bench.text import visible


def print_summary(
    cases: pd.DataFrame,
    sentences: Sequence[str],
    cautions: Sequence[Caution],
    timing: dict[str, Any],
    page: Path,
) -> None:
    """Print the table, the times of the run, and what was found."""
    _print_cases(cases)
    print(
        f"{timing['rounds']} rounds ({timing['stopped_because']}); start-up {timing['startup_s']:.0f} s, "
        f"{timing['timed_share_pct']:.0f}% of the {timing['total_s'] - timing['startup_s']:.0f} s after it "
        "were timed steps"
    )
    for sentence in sentences:
        print(sentence)
    for caution in cautions:
        print(f"Caution, {caution.kind}: {caution.sentence}")
    print(f"Report: {page}")


def summary_json(
    folder: Path,
    cases: pd.DataFrame,
    sentences: Sequence[str],
    cautions: Sequence[Caution],
    timing: dict[str, Any],
) -> str:
    """Return the same as JSON."""
    whole = {
        "results": str(folder),
        "findings": sentences,
        "cautions": [asdict(caution) for caution in cautions],
        "timing": timing,
        "cases": json.loads(cases.to_json(orient="records")),
    }
    return to_json(whole)


def _print_cases(cases: pd.DataFrame) -> None:
    """Print every planned case, measured with its interval or why not."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in (
        ("case", False),
        ("devices", True),
        ("cap MiB", True),
        ("buckets", True),
        ("images/s [95%]", True),
        ("step ms", True),
        ("p95 ms", True),
        ("speed-up [95%]", True),
        ("efficiency", True),
        ("exposed ms [95%]", True),
        ("hidden", True),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in cases.to_dict("records"):
        name = f"{row['mode']}{stand_in(row)}"
        count = f"{row['num_devices']}{'*' if row['oversubscribed'] else ''}"
        if row["status"] == "ok":
            table.add_row(
                name,
                count,
                text(row["bucket_cap_mb"]),
                text(row["num_buckets"]),
                _ranged(row, "images_per_s", ".1f"),
                _number(row["step_ms_p50"], ".1f"),
                _number(row["step_ms_p95"], ".1f"),
                _ranged(row, "speedup", ".2f"),
                _number(row["efficiency"] * 100, ".0f", "%"),
                _ranged(row, "exposed_comm_ms", ".0f"),
                _number(row["hidden_pct"], ".0f", "%"),
            )
    print_table(table)
    for row in cases[cases["status"] != "ok"].to_dict("records"):
        print(visible(f"{row['case_id']}: {row['status']}: {row['reason']}"))
    if bool(cases["oversubscribed"].any()):
        print("* oversubscribed: more devices than there are; they share cores or GPUs")
    if (cases["device_type"] == "cpu").any():
        print(CPU_STAND_IN)


def _number(value: float, spec: str, unit: str = "") -> str:
    return "" if pd.isna(value) else f"{value:{spec}}{unit}"


def _ranged(row: dict[Any, Any], name: str, spec: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    interval = "" if pd.isna(low) else f" [{low:{spec}}, {high:{spec}}]"
    return _number(row[name], spec) + interval
