"""Progress on stderr: a live line on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from .text import visible

PLAIN_EVERY_S = 10.0
"""Without a terminal a line comes so often: a log of an hour has a few hundred."""


def format_s(seconds: float) -> str:
    """`1m 05s` or `8s`."""
    whole = max(round(seconds), 0)
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class Console:
    """What a run shows while it works; a silent one serves ranks other than the first."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._rich = RichConsole(stderr=True)
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._table: Table | None = None
        self._last_plain = -PLAIN_EVERY_S

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._silent:
            return
        text = visible(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, emoji=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, what: str, done: float, how_far: str) -> None:
        """What runs now and comes next, the share of the whole run that is done, and the same in words."""
        if self._silent:
            return
        if self._rich.is_terminal:
            bar = self._started()
            bar.update(bar.task_ids[0], description=how_far, completed=done)
            assert self._live is not None  # just started
            above = [self._table] if self._table is not None else []
            self._live.update(Group(*above, bar, Text(visible(what))))
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self.note(f"{how_far}: {what}")

    def table(self, table: Table) -> None:
        """What is known so far, above the live line; nowhere but on a terminal."""
        self._table = table

    def progress_done(self) -> None:
        """Take the live line and its table away."""
        if self._live is not None:
            self._live.stop()
            self._live = self._progress = self._table = None

    def _started(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(BarColumn(), TextColumn("{task.description}", markup=False))
            self._progress.add_task("", total=1.0)
            self._live = Live(console=self._rich, transient=True)
            self._live.start()
        return self._progress
