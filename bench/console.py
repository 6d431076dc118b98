"""Progress on stderr: a live line on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

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

    def progress(self, what: str, done: int, total: int, left_s: float | None) -> None:
        """What runs now, how far along, and the time left where it is known."""
        if self._silent:
            return
        left = "" if left_s is None else f"at most {format_s(left_s)} left"
        if self._rich.is_terminal:
            bar = self._started()
            bar.update(bar.task_ids[0], description=visible(what), completed=done, total=total, left=left)
            assert self._live is not None  # just started
            self._live.update(Group(*([self._table] if self._table is not None else []), bar))
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self.note(f"{what} ({done + 1} of {total}){', ' + left if left else ''}")

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
            what, left = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[left]}")
            self._progress = Progress(what, BarColumn(), left)
            self._progress.add_task("", total=1, left="")
            self._live = Live(console=self._rich, transient=True)
            self._live.start()
        return self._progress
