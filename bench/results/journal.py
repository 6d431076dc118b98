"""The journal of a run: its plan, what became of each case, and what is under way, one event a line.

It is only ever appended to, so that a process that dies at any moment leaves all but its last line. With
`blocks.csv` it is all that is needed to resume a run, or to close it without the ranks.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ..common.errors import UsageError
from ..common.text import to_json
from ..machine.records import Count, Record
from ..plan.buckets import BucketLayout
from ..plan.sweep import Planned
from .case_columns import CASES
from .columns import STATUSES
from .disk import MOST_JSON_BYTES, append, open_regular, open_text

JOURNAL = "journal.jsonl"

MOST_JOURNAL_BYTES = 2**30
"""5,000 cases x 30 rounds x 4 phases take 60 MiB."""

PLAN_CASES = 1000
"""Cases in a line of the plan: some 1 MiB, of which a reader takes `MOST_JSON_BYTES`."""

MOST_CUT_LINES = 100
"""Every crash may cut one line; nobody resumes a run that often."""

_CASES = {column.name: column for column in CASES}


class _Event(Record, frozen=True, tag_field="event", tag=str.lower):
    """A line of the journal; `event` names its kind."""


class Plan(_Event, frozen=True):
    """The first lines: all cases, some in each."""

    cases: tuple[Planned, ...]


class Attempt(_Event, frozen=True):
    """The ranks have met; `oom_kills` are those of their hosts so far."""

    run_id: str = ""
    progress: tuple[Count, ...] | None = None
    oom_kills: dict[str, Count] = {}


class UnderWay(_Event, frozen=True):
    """The work from now on, on the case at `index` of the plan, or on a curve."""

    what: str
    index: Count | None = None
    curve: tuple[Count, str] | None = None
    """Rank count and backend."""


class Settled(_Event, frozen=True):
    """The outcome of a case; `facts` are columns of cases.csv."""

    index: Count
    status: Annotated[str, Meta(pattern=f"^({'|'.join(STATUSES)})$")]
    reason: str = ""
    facts: dict[str, bool | int | float | str | None] = {}


class Retry(_Event, frozen=True):
    """Cases that failed are to be tried again."""

    indices: tuple[Count, ...]


class Layout(_Event, frozen=True):
    """The gradient buckets of a DDP case."""

    case_id: str
    num_bytes: tuple[Count, ...]
    parameters: tuple[tuple[Count, ...], ...] = ()


class Curve(_Event, frozen=True):
    """An all-reduce curve is done."""

    num_ranks: Count
    backend: str


class End(_Event, frozen=True):
    """Why the run ended."""

    because: str


Event: TypeAlias = Plan | Attempt | UnderWay | Settled | Retry | Layout | Curve | End


class Completion(StrEnum):
    """Why a run ended by itself; without a failed case it has nothing left to do then."""

    ROUNDS = "all rounds done"
    TARGET = "precision target reached"
    NARROW = "every comparison is narrow enough for the margin"
    TIME = "time limit reached"
    FULL = "blocks.csv has become as large as can be read"
    NO_CASE = "no case is left to measure"


@dataclass
class State:
    """The state of a run, as its journal tells it."""

    plan: list[Planned] = field(default_factory=list)
    settled: dict[int, Settled] = field(default_factory=dict)
    layouts: dict[str, BucketLayout] = field(default_factory=dict)
    curves: set[tuple[int, str]] = field(default_factory=set)
    """Rank count and backend of the all-reduce curves that are done."""
    under_way: UnderWay | None = None
    attempts: list[Attempt] = field(default_factory=list)
    ended: str = ""
    """Why the run ended, if it was closed since the last attempt."""

    @property
    def is_complete(self) -> bool:
        """True where the run came to its end and no case failed."""
        settled = all(
            p.skip_reason is not None or (i in self.settled and self.settled[i].status in ("ok", "skipped"))
            for i, p in enumerate(self.plan)
        )
        return self.ended in tuple(Completion) and settled

    def take(self, event: Event) -> None:
        """Go on by one line. Raises ValueError for what no run writes."""
        match event:
            case Plan():
                self.plan += event.cases
            case Attempt():
                self.attempts.append(event)
                self.under_way, self.ended = None, ""
            case UnderWay():
                self._check_place(event.index)
                self.under_way = event
            case Settled():
                self._take_outcome(event)
            case Retry():
                for index in event.indices:
                    self.settled.pop(index, None)
            case Layout():
                self.layouts[event.case_id] = BucketLayout(event.num_bytes, event.parameters)
            case Curve():
                self.curves.add((event.num_ranks, event.backend))
            case End():
                self.ended = event.because

    def _check_place(self, index: int | None) -> None:
        # Without a plan the folder is refused as a whole, by who wants to go on with it.
        if index is not None and self.plan and index >= len(self.plan):
            raise ValueError(f"the plan has no case {index}")

    def _take_outcome(self, outcome: Settled) -> None:
        self._check_place(outcome.index)
        for name, value in outcome.facts.items():
            if name not in _CASES or not _CASES[name].allows(value):
                raise ValueError(f"{name} of a case is not {value!r}")
        self.settled[outcome.index] = outcome
        if outcome.status != "ok" and self.under_way and self.under_way.index == outcome.index:
            self.under_way = None


class Journal:
    """Appends to a run's journal and keeps its state in step."""

    def __init__(self, folder: Path) -> None:
        """Go on with the journal of `folder`, if there is one. Raises UsageError where it is damaged."""
        self.path = folder / JOURNAL
        self.state = State()
        if os.path.lexists(self.path):
            self.state, whole = _state(self.path)
            if not whole:
                self._append(b"\n")

    def write(self, event: Event, *, sync: bool = False) -> None:
        """Append a line. Raises OSError."""
        line = to_json(event, indent=None)
        self._append(f"{line}\n".encode(), sync=sync)
        # Round trip: the state must be the one that a reader will find.
        self.state.take(msgspec.convert(json.loads(line), Event))

    def _append(self, line: bytes, *, sync: bool = False) -> None:
        descriptor = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            append(descriptor, line)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Path) -> State:
    """The state that a folder's journal tells. Raises UsageError where there is none, or it is damaged."""
    if not (folder / JOURNAL).is_file():
        raise UsageError(f"{folder} has no {JOURNAL}: no run that could be resumed; name a run's folder")
    return _state(folder / JOURNAL)[0]


def _state(path: Path) -> tuple[State, bool]:
    """Read a journal's state, and whether its last line is whole; one cut by a crash counts as unwritten."""
    state, line = State(), "\n"
    number = num_cut = 0
    with open_text(path, most_bytes=MOST_JOURNAL_BYTES, errors="replace") as file:
        while text := file.readline(MOST_JSON_BYTES):
            number, line = number + 1, text
            if len(line) == MOST_JSON_BYTES:
                raise UsageError(f"{path} line {number} is longer than any that a run writes; restore it")
            try:
                told = json.loads(line)
            except ValueError:  # a crash cut the line
                num_cut += 1
                if num_cut > MOST_CUT_LINES:
                    raise UsageError(
                        f"{path} is no journal: {num_cut} lines are damaged; restore it"
                    ) from None
                continue
            except RecursionError:
                told = "nested too deeply"
            try:
                state.take(msgspec.convert(told, Event))
            except (msgspec.ValidationError, RecursionError, TypeError, ValueError) as error:
                damaged = f"{path} line {number} is damaged ({error}); restore it, or start anew"
                raise UsageError(damaged) from None
    return state, line.endswith("\n")
