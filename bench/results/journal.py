"""The log of a run: its plan, its blocks, what became of each case, and what is under way, one event a line.

It is only ever appended to, so that a process that dies at any moment leaves all but its last line. With the
manifest it is all that is needed to resume a run, or to make its tables without the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ..common.errors import UsageError
from ..common.text import to_json
from ..machine.records import Count, Record
from ..plan.buckets import BucketLayout
from ..plan.sweep import Planned
from .blocks import Block, Milliseconds
from .case_columns import CASES
from .columns import STATUSES
from .disk import append, open_binary, open_regular

if TYPE_CHECKING:
    from .round_times import RoundTimes

JOURNAL = "journal.jsonl"

VERSION = 2
"""Version of the log: from 2 on it holds the blocks."""

MAX_LOG_BYTES = 2**32
"""A block takes some 50 bytes for each rank, and 200 for itself: more than in blocks.csv with one rank."""

MAX_LINE_BYTES = 2**26
"""A block of 1,024 ranks, 1,000 steps each, takes 7 MiB."""

PLAN_CASES = 1000
"""Cases in a line of the plan: some 1 MiB."""

_CASES = {column.name: column for column in CASES}


class _Event(Record, frozen=True, tag_field="event", tag=str.lower):
    """A line of the log; `event` names its kind."""


class Plan(_Event, frozen=True):
    """The first lines: all cases, some in each."""

    cases: tuple[Planned, ...]
    version: int = 1


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
    times_ms: Sequence[tuple[Count, Annotated[Sequence[Milliseconds], Meta(min_length=1)]]] = ()
    """Bytes of a message, and its repetitions; none where the curve failed."""


class End(_Event, frozen=True):
    """Why the run ended."""

    because: str


Event: TypeAlias = Plan | Attempt | UnderWay | Settled | Retry | Layout | Block | Curve | End

_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)

_DAMAGE = (msgspec.ValidationError, RecursionError, TypeError, ValueError, KeyError, ArithmeticError)
"""Errors of a line that no run writes."""


class Completion(StrEnum):
    """Why a run ended by itself; without a failed case it has nothing left to do then."""

    ROUNDS = "all rounds done"
    TARGET = "precision target reached"
    NARROW = "every comparison is narrow enough for the margin"
    TIME = "time limit reached"
    FULL = "blocks.csv has become as large as can be read"
    NO_CASE = "no case is left to measure"


def _make_times() -> RoundTimes:
    from .round_times import RoundTimes  # it takes a second, and ranks ask for events alone

    return RoundTimes()


@dataclass
class State:
    """The state of a run, as its log tells it."""

    version: int = VERSION
    plan: list[Planned] = field(default_factory=list)
    settled: dict[int, Settled] = field(default_factory=dict)
    layouts: dict[str, BucketLayout] = field(default_factory=dict)
    curves: dict[tuple[int, str], Curve] = field(default_factory=dict)
    """The all-reduce curves that are done, by rank count and backend."""
    times: RoundTimes | None = field(default=None, compare=False)
    """Its blocks as numbers, where they are asked for: of a large run they take minutes."""
    num_blocks: int = 0
    table_bytes: int = 0
    """Size of blocks.csv, made of these blocks, at most."""
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

    def apply_event(self, event: Event) -> None:  # noqa: C901 - a table
        """Go on by one line. Raises ValueError for what no run writes."""
        match event:
            case Block():
                if self.times is not None:
                    self.times.add(event)
                self.num_blocks += 1
                self.table_bytes += event.table_bytes
            case Plan():
                self.plan += event.cases
                self.version = event.version
            case Attempt():
                self.attempts.append(event)
                self.under_way, self.ended = None, ""
            case UnderWay():
                self._check_place(event.index)
                self.under_way = event
            case Settled():
                self._apply_outcome(event)
            case Retry():
                self.settled = {i: s for i, s in self.settled.items() if i not in event.indices}
            case Layout():
                self.layouts[event.case_id] = BucketLayout(event.num_bytes, event.parameters)
            case Curve():
                self.curves[event.num_ranks, event.backend] = event
            case End():
                self.ended = event.because

    def _check_place(self, index: int | None) -> None:
        # Without a plan the folder is refused as a whole, by who wants to go on with it.
        if index is not None and self.plan and index >= len(self.plan):
            raise ValueError(f"the plan has no case {index}")

    def _apply_outcome(self, outcome: Settled) -> None:
        self._check_place(outcome.index)
        for name, value in outcome.facts.items():
            if name not in _CASES or not _CASES[name].can_hold(value):
                raise ValueError(f"{name} of a case is not {value!r}")
        self.settled[outcome.index] = outcome
        if outcome.status != "ok" and self.under_way and self.under_way.index == outcome.index:
            self.under_way = None


class Journal:
    """Appends to a run's log and keeps its state in step."""

    def __init__(self, folder: Path) -> None:
        """Go on with the log of `folder`, cut behind its last whole line. Raises UsageError as `read`."""
        self.path = folder / JOURNAL
        self.state = State(times=_make_times())
        end = _read_state(self.path, self.state) if os.path.lexists(self.path) else 0
        self._descriptor = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if os.fstat(self._descriptor).st_size > end > 0:
            os.ftruncate(self._descriptor, end)

    def write(self, event: Event, *, sync: bool = False) -> None:
        """Append a line, all or nothing of it. Raises OSError."""
        line = f"{to_json(event, indent=None)}\n".encode()
        before = os.fstat(self._descriptor).st_size
        try:
            append(self._descriptor, line)
            if sync:
                os.fsync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise
        # Round trip: the state must be the one that a reader will find.
        self.state.apply_event(_parse_event(line))

    def is_in_place(self) -> bool:
        """Return whether the log has not been removed, and no other is at its place by now."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        return False

    def close(self) -> None:
        os.close(self._descriptor)


def read(folder: Path, *, with_times: bool = False) -> State:
    """Read the state that a folder's log tells. Raises UsageError where there is none, or it is damaged."""
    if not (folder / JOURNAL).is_file():
        raise UsageError(f"{folder} has no {JOURNAL}: no run that could be resumed; name a run's folder")
    state = State(times=_make_times() if with_times else None)
    _read_state(folder / JOURNAL, state)
    return state


def read_blocks(folder: Path) -> Iterator[Block]:
    """Read the blocks in a folder's log, in the order in which they were measured. Raises as `read`."""
    return (event for event, _ in _read_events(folder / JOURNAL) if isinstance(event, Block))


def has_ended(folder: Path) -> bool:
    """Tell whether the log of a folder ends with its run's end, when all tables were written."""
    with open_binary(folder / JOURNAL, most_bytes=MAX_LOG_BYTES) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 2**16, 0))
        return file.read()[:-1].rpartition(b"\n")[2].startswith(b'{"event": "end"')


def _read_state(path: Path, state: State) -> int:
    """Bring a new state to what a log tells; where the last whole line ends."""
    end = 0
    for number, (event, behind) in enumerate(_read_events(path), start=1):
        try:
            state.apply_event(event)
        except _DAMAGE as error:
            raise _make_damage_error(path, number, error) from None
        end = behind
    if state.version != VERSION:
        raise UsageError(f"{path} is of another version; go on with the ddp-bench that began the run")
    return end


def _read_events(path: Path) -> Iterator[tuple[Event, int]]:
    """Read each event of a log, and where its line ends; what a crash left behind the last is passed over."""
    end = number = 0
    cut: UsageError | None = None
    with open_binary(path, most_bytes=MAX_LOG_BYTES) as file:
        while line := file.readline(MAX_LINE_BYTES):
            number, end = number + 1, end + len(line)
            if len(line) == MAX_LINE_BYTES:
                raise _make_damage_error(path, number, "longer than any that a run writes")
            try:
                event = _parse_event(line)
            except json.JSONDecodeError as error:
                cut = cut or _make_damage_error(path, number, error)
                continue
            except _DAMAGE as error:
                raise _make_damage_error(path, number, error) from None
            if cut is not None:
                raise cut
            if line.endswith(b"\n"):
                yield event, end


def _parse_event(line: bytes) -> Event:
    """Parse the event on a line. Raises ValueError; its `json.JSONDecodeError` means no JSON."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError):  # also for a lone surrogate, in a text of the user's
        event: Event = msgspec.convert(json.loads(line.decode(errors="replace")), Event)
        return event


def _make_damage_error(path: Path, number: int, error: object) -> UsageError:
    return UsageError(f"{path} line {number} is damaged ({error}); restore it, or start anew")
