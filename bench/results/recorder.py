"""The record of a run: outcomes and blocks on disk as they are known, reopened after a fault."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from ..common.cli import format_command
from ..common.errors import UsageError
from ..common.process import hold_signals
from ..plan.sweep import Planned, hash_plan
from .aggregate import LogTables, compute_rate_half_widths
from .blocks import Block
from .columns import MAX_NUMBER, MIN_NUMBER
from .commands import write_resume_command
from .disk import remove_unfinished
from .journal import PLAN_CASES, VERSION, End, Event, Journal, Plan, Settled, UnderWay, read_blocks
from .run_folder import RUN_FILES, append_failure, write_manifest, write_trace
from .store import read_manifest


def _make_storable(number: float) -> float | None:
    """Return a number as a cell may hold it: 0 for one too small to tell from 0, None above `MAX_NUMBER`."""
    return 0.0 if abs(number) < MIN_NUMBER else number if abs(number) <= MAX_NUMBER else None


class Recorder:
    """Keeps what was measured and puts it on disk; a case without a block yet counts as not reached.

    What writes raises UsageError where the disk is full or the folder gone, and says what is kept.
    """

    def __init__(self, journal: Journal) -> None:
        self.folder = journal.path.parent
        self.journal = journal
        assert journal.state.times is not None  # a journal that is written to keeps them
        self.times = journal.state.times
        """All blocks so far."""
        self.manifest = read_manifest(self.folder)
        """The manifest as it is on disk."""
        self.refresh()

    @classmethod
    def begin(cls, plan: Sequence[Planned], folder: Path) -> Recorder:
        """Begin the record of a new run. Raises OSError where it cannot be written."""
        journal = Journal(folder)
        for first in range(0, len(plan), PLAN_CASES):
            journal.write(Plan(cases=tuple(plan[first : first + PLAN_CASES]), version=VERSION), sync=True)
        return cls(journal)

    @classmethod
    def reopen(cls, folder: Path) -> Recorder:
        """Reopen the record of a run that broke off; what it had half-written is cut off."""
        try:
            journal = Journal(folder)
            if not journal.state.plan:
                raise UsageError(f"{journal.path} tells of no plan: its first line is damaged; restore it")
            if hash_plan(journal.state.plan) != read_manifest(folder).plan_hash:
                raise UsageError(f"{journal.path} tells of another plan than manifest.json; restore both")
            remove_unfinished(folder, RUN_FILES)
        except OSError as error:
            raise UsageError(f"{folder} cannot be opened: {error.strerror}; free or restore it") from None
        return cls(journal)

    @property
    def launch(self) -> int:
        """Number of the workers' launch that measures now; the blocks of each of their starts count alike."""
        return max(len(self.journal.state.attempts), 1)

    def list_measured(self) -> frozenset[tuple[str, str, int]]:
        """Every block on disk, of every phase: case id, phase, round."""
        return frozenset(
            (case_id, phase, round_index)
            for case_id, case in self.times.cases.items()
            for phase, rounds in case.step_ms.items()
            for round_index in rounds
        )

    @property
    def rounds(self) -> int:
        """The last round with a timed block."""
        return max((r for rounds in self.times.collect_step_ms("timed").values() for r in rounds), default=0)

    def record_start(self, index: int | None, what: str, curve: tuple[int, str] | None = None) -> None:
        """Note what is under way from now on, for whoever has to tell how this process ended.

        Not synced: it must survive this process, not the machine.
        """
        self.append_event(UnderWay(what=what, index=index, curve=curve), sync=False)

    def append_event(self, event: Event, *, sync: bool = True) -> None:
        """Append to the log."""
        with self._report_write_errors():
            self.journal.write(event, sync=sync)

    def set_outcome(
        self, index: int, status: str, reason: str = "", facts: Mapping[str, Any] | None = None
    ) -> None:
        """Status of case `index`; facts are added to those known."""
        old = self.journal.state.settled.get(index)
        told = {n: _make_storable(v) if isinstance(v, float) else v for n, v in (facts or {}).items()}
        known = {**(old.facts if old else {}), **told}
        self.append_event(Settled(index=index, status=status, reason=reason, facts=known))

    def add_failure(self, case_id: str, text: str) -> Path:
        """Keep what the ranks say of a failure of a case; the file, which has those before, too."""
        with self._report_write_errors():
            return append_failure(self.folder, case_id, text)

    def add_block(self, *what: Any) -> None:
        """Add a block of these workers; `what` as in `Block.from_times`."""
        self.append_event(Block.from_times(self.launch, *what))

    def add_trace(self, case_id: str, rank: int, trace: bytes) -> None:
        """Add a gzipped Chrome trace of one rank; a later one of the same case replaces it."""
        with self._report_write_errors():
            write_trace(self.folder, f"{case_id}-rank{rank}.json.gz", trace)

    def refresh(self) -> None:
        """Have `tables` made anew when they are asked for next; nothing is written."""
        self.tables = LogTables(self.manifest, self.journal.state)

    def write(self) -> pd.DataFrame:
        """Write all tables, made anew; the one of cases. Between rounds the log has all that they hold."""
        self.refresh()
        with self._report_write_errors():
            self.tables.write(self.folder, read_blocks(self.folder))
        return self.tables.cases

    def update_manifest(self, **facts: Any) -> None:
        """Replace fields of manifest.json."""
        manifest = msgspec.structs.replace(self.manifest, **facts)
        with self._report_write_errors():
            write_manifest(self.folder, manifest)
        self.manifest = manifest

    def close(self, because: str) -> None:
        """Write why the run ended, and close its files."""
        self.append_event(End(because=because))
        self.journal.close()

    @contextlib.contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        try:
            with hold_signals():
                if not self.journal.is_in_place():
                    raise FileNotFoundError
                yield
        except OSError as error:
            if not self.journal.state.attempts:  # there is nothing of a run that could be kept
                raise
            resume = write_resume_command(self.manifest, self.folder)
            kept = f"every block finished before is kept: make room, then {resume}"
            why = f"cannot be written: {error.strerror}; {kept}"
            if isinstance(error, FileNotFoundError):
                how = f"if renamed, {format_command('run')} --resume with its new name goes on"
                why = f"has been removed or renamed during the run; {how}"
            raise UsageError(f"{self.folder} {why}") from None

    def compute_half_width(self) -> float:
        """Compute the widest throughput interval as last refreshed, a fraction; NaN where one is unknown."""
        widths = compute_rate_half_widths(self.tables.cases, with_single=True).values()
        return math.nan if any(map(math.isnan, widths)) else max(widths, default=math.nan)
