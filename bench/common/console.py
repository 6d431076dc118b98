"""Output of a command: tables, progress on stderr, and on GitHub annotations and the summary of a job.

GitHub's formats: https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .text import escape_controls

PLAIN_INTERVAL_S = 10.0
"""Seconds between two lines without a terminal: a log of an hour has a few hundred."""

PIPED_WIDTH = 180
"""Columns of a table that is not on a terminal, where rich would wrap at 80: names of cases may be long."""


def print_table(table: Table) -> None:
    """Print a table on stdout, `PIPED_WIDTH` wide at most where that is no terminal."""
    RichConsole(file=sys.stdout, width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)


def format_s(seconds: float) -> str:
    """`1m 05s` or `8s`."""
    whole = max(round(seconds), 0)
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class Console:
    """Display of a run while it works; a silent one serves ranks other than the first."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._rich = RichConsole(stderr=True)
        self._live: Live | None = None
        self._table: Table | None = None
        self._last_plain = -PLAIN_INTERVAL_S

    def print_note(self, text: str, *, is_fault: bool = False) -> None:
        """Print a line that stays; of a fault also where all else is silent."""
        if self._silent and not is_fault:
            return
        text = escape_controls(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, emoji=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def show_progress(self, what: str, done: float, how_far: str) -> None:
        """Show what runs now and comes next, the share of the whole run that is done, and that in words."""
        if self._silent:
            return
        if self._rich.is_terminal:
            if self._live is None:
                # A thread that refreshes by itself would do so within blocks, 15 ms of a core each time.
                self._live = Live(console=self._rich, transient=True, auto_refresh=False)
                self._live.start()
            bar = Table.grid(padding=(0, 1))
            bar.add_row(ProgressBar(1.0, done, width=40), Text(how_far))
            above = [self._table] if self._table is not None else []
            self._live.update(Group(*above, bar, Text(escape_controls(what))), refresh=True)
        elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain = time.monotonic()
            self.print_note(f"{how_far}: {what}")

    def show_table(self, table: Table) -> None:
        """Show what is known so far, above the live line; nowhere but on a terminal."""
        self._table = table

    def hide_progress(self) -> None:
        """Take the live line and its table away."""
        if self._live is not None:
            self._live.stop()
            self._live = self._table = None


MAX_ANNOTATIONS = 10
"""Annotations of one level and one step that GitHub shows."""


class Annotation(NamedTuple):
    """A sentence that GitHub shows above the log and on the pull request's page."""

    level: Literal["error", "warning"]
    title: str
    text: str

    def format_command(self) -> str:
        """Format the line by which a step hands it to GitHub."""
        title = _escape_text(self.title).replace(":", "%3A").replace(",", "%2C")
        return f"::{self.level} title={title}::{_escape_text(self.text)}"


def _escape_text(text: str) -> str:
    return escape_controls(text).replace("%", "%25")


def show_on_github(
    annotations: Sequence[Annotation],
    summary: Callable[[], str],
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Print annotations on stderr and append `summary`, Markdown, to the job's; elsewhere nothing.

    A summary that cannot be written is said in a line: the result stands without it.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return
    for annotation in annotations[:MAX_ANNOTATIONS]:
        print(annotation.format_command(), file=sys.stderr)
    place = environment.get("GITHUB_STEP_SUMMARY")
    if place:
        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write(f"{summary()}\n")
        except OSError as error:
            print(f"no job summary: {escape_controls(str(error))}", file=sys.stderr)
