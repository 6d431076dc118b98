"""The journal of a run, and the repair of what a crash leaves.

It tells the plan, what became of each case, and what is under way: one JSON object a line, only ever
appended, so that a process that dies at any moment leaves all but its last line. With `blocks.csv` it is all
that is needed to resume a run, or to close it without the ranks. The tables that grow with it are cut off
behind their last whole block or curve.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from ddp_bench.bench.case import Case
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.results.disk import (
    MOST_JSON_BYTES,
    MOST_LINE,
    MOST_TABLE_BYTES,
    append,
    open_regular,
    open_text,
    replace_file,
)
from ddp_bench.bench.results.schema import ALLREDUCE, BLOCKS, CASES, MOST, STATUSES

JOURNAL = "journal.jsonl"

MOST_JOURNAL_BYTES = 2**28
"""5,000 cases x 30 rounds x 4 phases take 60 MiB."""

MOST_DROPPED = 10_000
"""Rows that a repair leaves out; a curve that was cut off has tens."""

MOST_CUT_LINES = 100
"""Every crash may cut one line; nobody resumes a run that often."""

_CASES = {column.name: column for column in CASES}
_TAIL_BYTES = 2**18
_PHASE, _ROUND, _RANK = (
    next(i for i, c in enumerate(BLOCKS) if c.name == n) for n in ("phase", "round", "rank")
)
_HEADERS = {
    name: ",".join(column.name for column in columns).encode() + b"\n"
    for name, columns in (("blocks.csv", BLOCKS), ("allreduce.csv", ALLREDUCE))
}


@dataclass(frozen=True)
class Settled:
    """What became of a case."""

    status: str
    reason: str
    facts: Mapping[str, Any]


@dataclass
class State:
    """What a journal tells."""

    plan: list[Planned] = field(default_factory=list)
    settled: dict[int, Settled] = field(default_factory=dict)
    layouts: dict[str, BucketLayout] = field(default_factory=dict)
    curves: set[tuple[int, str]] = field(default_factory=set)
    """Rank count and backend of the all-reduce curves that are done."""
    under_way: Mapping[str, Any] | None = None
    """`index` of the case (absent between cases) and `what` was being done to it."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""
    """Why the run ended, if it was closed since the last attempt."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Go on by one line."""
        for kind, value in line.items():
            getattr(self, f"_take_{kind}", lambda _: None)(value)

    def _take_plan(self, rows: Sequence[Any]) -> None:
        self.plan = [Planned(case=Case.of_stored(case), **rest) for case, rest in rows]
        for planned in self.plan:
            _require(_is_whole(planned.num_nodes) and isinstance(planned.oversubscribed, bool), "a place")
            _require(isinstance(planned.skip_reason, str | None), "a reason to skip")
            case = planned.case
            _require(_is_whole(case.units_per_step) and isinstance(case.unit, str), "what a case counts")

    def _take_attempt(self, attempt: dict[str, Any]) -> None:
        _require(isinstance(attempt, dict), "an attempt")
        _require(all(map(_is_whole, attempt.get("oom_kills", {}).values())), "a number of OOM kills")
        self.attempts.append(attempt)
        self.under_way, self.ended = None, ""

    def _take_on(self, under_way: Mapping[str, Any]) -> None:
        index, curve = under_way.get("index"), under_way.get("curve")
        _require(index is None or self._is_place(index), "a place in the plan")
        _require(isinstance(under_way["what"], str), "what is under way")
        _require(curve is None or _is_curve(curve), "a curve")
        self.under_way = under_way

    def _is_place(self, index: object) -> bool:
        # Without a plan the folder is refused as a whole, by who wants to go on with it.
        return _is_whole(index) and (not self.plan or index < len(self.plan))

    def _take_outcome(self, outcome: Sequence[Any]) -> None:
        index, status, reason, facts = outcome
        _require(self._is_place(index), "a place in the plan")
        _require(status in STATUSES and isinstance(reason, str), "an outcome")
        for name, value in facts.items():
            _require(name in _CASES and _CASES[name].allows(value), f"the {name} of a case")
        self.settled[index] = Settled(status, reason, facts)
        if status != "ok" and self.under_way and self.under_way.get("index") == index:
            self.under_way = None

    def _take_retry(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.settled.pop(index, None)

    def _take_layout(self, layout: Sequence[Any]) -> None:
        case_id, sizes, parameters = layout
        _require(all(map(_is_whole, sizes)) and isinstance(case_id, str), "a bucket layout")
        self.layouts[case_id] = BucketLayout(tuple(sizes), tuple(tuple(p) for p in parameters))

    def _take_curve(self, curve: Sequence[Any]) -> None:
        _require(_is_curve(curve), "a curve")
        self.curves.add((curve[0], curve[1]))

    def _take_end(self, because: str) -> None:
        _require(isinstance(because, str), "why a run ended")
        self.ended = because


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it does not tell {what}")


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MOST


def _is_curve(value: Sequence[object]) -> bool:
    return len(value) == 2 and _is_whole(value[0]) and isinstance(value[1], str)


class Journal:
    """Appends to a run's journal and keeps its state in step."""

    def __init__(self, folder: Path) -> None:
        """Go on with the journal of `folder`, if there is one. Raises UsageError where it is damaged."""
        self.path = folder / JOURNAL
        self.state = State()
        if os.path.lexists(self.path):
            self.state, whole = _state(self.path)
            if not whole:
                self._append("\n")

    def begin(self, plan: Sequence[Planned]) -> None:
        """The first line: the plan."""
        names = [f.name for f in fields(Planned) if f.name != "case"]
        rows = [[p.case.stored(), {name: getattr(p, name) for name in names}] for p in plan]
        self.write({"plan": rows}, sync=True)

    def note(self, index: int | None, what: str, **more: Any) -> None:
        """What is under way from now on. Not synced: it must survive this process, not the machine."""
        self.write({"on": {"index": index, "what": what, **more}})

    def write(self, line: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append a line. Raises OSError."""
        text = json.dumps(line, separators=(",", ":"), default=str)
        self._append(text + "\n", sync=sync)
        # Round trip: the state must be the one that a reader will find.
        self.state.take(json.loads(text))

    def _append(self, text: str, *, sync: bool = False) -> None:
        descriptor = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            append(descriptor, text.encode())
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
    """What a journal tells, and whether its last line is whole; of a line cut by a crash nothing happened."""
    state, line = State(), "\n"
    number = num_cut = 0
    with open_text(path, most_bytes=MOST_JOURNAL_BYTES, errors="replace") as file:
        while text := file.readline(MOST_JSON_BYTES):
            number, line = number + 1, text
            if len(line) == MOST_JSON_BYTES:
                raise UsageError(f"{path} line {number} is longer than any that a run writes; restore it")
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                content = None
            num_cut += not isinstance(content, dict)
            if num_cut > MOST_CUT_LINES:
                raise UsageError(f"{path} is no journal: {num_cut} lines are damaged; restore it")
            try:
                if isinstance(content, dict):
                    state.take(content)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise UsageError(
                    f"{path} line {number} is damaged ({error}); restore it, or start anew"
                ) from None
    return state, line.endswith("\n")


def repair_blocks(path: Path, num_ranks: Mapping[str, int]) -> int:
    """Cut blocks.csv behind its last whole block; the number of bytes that went.

    A block is whole with a row of every rank: `num_ranks` by case. Only the end of the file is read: rows are
    appended and synced block by block, so no crash damages more than the last. Raises OSError.
    """
    if not os.path.lexists(path):
        return 0
    with os.fdopen(open_regular(path, os.O_RDWR), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        tail_bytes = _TAIL_BYTES
        while True:
            start = max(0, size - tail_bytes)
            file.seek(start)
            keep = _whole_bytes(file.read(), at_start=start == 0, num_ranks=num_ranks)
            if keep is not None:
                break
            tail_bytes *= 4
        if start + keep < size:
            file.truncate(start + keep)
            os.fsync(file.fileno())
        return size - start - keep


def _whole_bytes(tail: bytes, *, at_start: bool, num_ranks: Mapping[str, int]) -> int | None:
    """Bytes of `tail` up to the end of the last whole block; None where it begins before the tail."""
    lines = tail.splitlines(keepends=True)
    if at_start and not (lines and lines[0] == _HEADERS["blocks.csv"]):
        return 0
    if not at_start:
        lines = lines[1:]  # its begin is cut off
    begin = len(tail) - sum(map(len, lines)) + (len(lines[0]) if at_start else 0)
    rows = [_row(line) for line in (lines[1:] if at_start else lines)]
    lengths = [len(line) for line in (lines[1:] if at_start else lines)]
    # A machine that lost power may leave zeros: nothing behind the first broken row counts.
    good = next((i for i, row in enumerate(rows) if row is None), len(rows))
    if good == 0:
        return begin if at_start else None
    last = rows[good - 1]
    first = good
    while first and (row := rows[first - 1]) is not None and last is not None and row[:3] == last[:3]:
        first -= 1
    if first == 0 and not at_start:
        return None
    assert last is not None
    whole = good - first >= num_ranks.get(last[0], 1)
    return begin + sum(lengths[: good if whole else first])


def _row(line: bytes) -> tuple[str, str, str, str] | None:
    """Case, phase, round and rank of a whole row; None for a broken one."""
    if not line.endswith(b"\n") or b"\0" in line:
        return None
    try:
        cells = next(csv.reader([line.decode("utf-8")], strict=True))
    except (csv.Error, UnicodeDecodeError, StopIteration):
        return None
    if len(cells) != len(BLOCKS) or not cells[_RANK].isdigit():
        return None
    return cells[0], cells[_PHASE], cells[_ROUND], cells[_RANK]


def repair_allreduce(path: Path, done: set[tuple[int, str]]) -> None:
    """Keep the rows of curves that are `done` (rank count, backend), in the file's order.

    Raises OSError, and UsageError for what is no table of all-reduces.
    """
    if not os.path.lexists(path):
        return
    header = _HEADERS["allreduce.csv"].decode()
    kept, dropped = [header], 0
    with open_text(path, most_bytes=MOST_TABLE_BYTES, errors="replace") as file:
        damaged = file.readline(MOST_LINE) != header
        while line := file.readline(MOST_LINE):
            cells = line.split(",")
            if line.endswith("\n") and cells[0].isdigit() and (int(cells[0]), cells[1]) in done:
                kept.append(line)
            elif (dropped := dropped + 1) > MOST_DROPPED:
                raise UsageError(f"{path} is no table of all-reduces; restore it, or remove it")
    if damaged or dropped:
        replace_file(path, lambda part: part.write_text("".join(kept), encoding="utf-8"))
