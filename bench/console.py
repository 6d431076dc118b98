"""Progress on stderr: a live line on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from bench.text import visible

PLAIN_EVERY_S = 10.0


def format_s(seconds: float) -> str:
    """`1m 05s` or `8s`."""
    whole = max(round(seconds), 0)
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class Console:
    """What a run shows while it works; a silent one serves ranks other than the first."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._rich = RichConsole(stderr=True)
        self._live: Progress | None = None
        self._last_plain = -PLAIN_EVERY_S

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._silent:
            return
        text = visible(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, what: str, done: int, total: int, left_s: float | None) -> None:
        """What runs now, how far along, and the time left where it is known."""
        if self._silent:
            return
        left = "" if left_s is None else f"at most {format_s(left_s)} left"
        if self._rich.is_terminal:
            if self._live is None:
                columns = (
                    TextColumn("{task.description}", markup=False),
                    BarColumn(),
                    TextColumn("{task.fields[left]}"),
                )
                self._live = Progress(*columns, console=self._rich, transient=True)
                self._live.start()
                self._live.add_task("", total=total, left="")
            self._live.update(
                self._live.task_ids[0], description=visible(what), completed=done, total=total, left=left
            )
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self.note(f"{what} ({done + 1} of {total}){', ' + left if left else ''}")

    def progress_done(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def print_cases(cases: pd.DataFrame) -> None:
    """The summary table on stdout: every planned case, measured with its interval or why not."""
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
        name = f"{row['mode']}{' (CPU stand-in)' if row['impl'] == 'cpu_standin' else ''}"
        count = f"{row['num_devices']}{'*' if row['oversubscribed'] else ''}"
        if row["status"] == "ok":
            table.add_row(
                name,
                count,
                _text(row["bucket_cap_mb"]),
                _text(row["num_buckets"]),
                _ranged(row, "images_per_s", ".1f"),
                _number(row["step_ms_p50"], ".1f"),
                _number(row["step_ms_p95"], ".1f"),
                _ranged(row, "speedup", ".2f"),
                _number(row["efficiency"] * 100, ".0f", "%"),
                _ranged(row, "exposed_comm_ms", ".0f"),
                _number(row["hidden_pct"], ".0f", "%"),
            )
    # Without a terminal rich would cut the table at 80 columns.
    console = RichConsole(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for row in cases[cases["status"] != "ok"].to_dict("records"):
        print(visible(f"{row['case_id']}: {row['status']}: {row['reason']}"))
    if bool(cases["oversubscribed"].any()):
        print("* oversubscribed: more devices than there are; they share cores or GPUs")
    if (cases["device_type"] == "cpu").any():
        print("A device here is one CPU core standing in for a GPU: ratios show the mechanism, not GPU speed")


def _text(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def _number(value: float, spec: str, unit: str = "") -> str:
    return "" if pd.isna(value) else f"{value:{spec}}{unit}"


def _ranged(row: dict[Any, Any], name: str, spec: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    interval = "" if pd.isna(low) else f" [{low:{spec}}, {high:{spec}}]"
    return _number(row[name], spec) + interval
