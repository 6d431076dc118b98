"""The run's diary beside its results: the plan, what became of each case, and what is under way.

One JSON object a line, only ever appended, so that a process that dies at any moment leaves all but its last
line. With `blocks.csv` it is all that is needed to go on, or to close the books without the ranks.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.plan import BucketLayout, Case, Planned

JOURNAL = "journal.jsonl"


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
    """Why the run ended, if its books were closed since the last attempt."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Go on by one line."""
        for kind, value in line.items():
            getattr(self, f"_take_{kind}", lambda _: None)(value)

    def _take_plan(self, rows: Sequence[Any]) -> None:
        self.plan = [Planned(case=Case(**case), **rest) for case, rest in rows]

    def _take_attempt(self, attempt: dict[str, Any]) -> None:
        self.attempts.append(attempt)
        self.under_way, self.ended = None, ""

    def _take_on(self, under_way: Mapping[str, Any]) -> None:
        self.under_way = under_way

    def _take_outcome(self, outcome: Sequence[Any]) -> None:
        index, status, reason, facts = outcome
        self.settled[index] = Settled(status, reason, facts)
        if status != "ok" and self.under_way and self.under_way.get("index") == index:
            self.under_way = None

    def _take_retry(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.settled.pop(index, None)

    def _take_layout(self, layout: Sequence[Any]) -> None:
        case_id, sizes, parameters = layout
        self.layouts[case_id] = BucketLayout(tuple(sizes), tuple(tuple(p) for p in parameters))

    def _take_curve(self, curve: Sequence[Any]) -> None:
        self.curves.add((curve[0], curve[1]))

    def _take_end(self, because: str) -> None:
        self.ended = because


class Journal:
    """Appends to a run's journal and keeps its state in step."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self.state = State()
        if self._path.exists():
            self._load()

    def _load(self) -> None:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            try:
                content = json.loads(line)
            except ValueError:
                continue  # cut by a crash: what it told of had not happened yet
            if isinstance(content, dict):
                self.state.take(content)
        if text and not text.endswith("\n"):
            self._append("\n")

    def begin(self, plan: Sequence[Planned]) -> None:
        """The first line: the plan."""
        rows = []
        for planned in plan:
            rest = asdict(planned)
            rows.append([rest.pop("case"), rest])
        self.write({"plan": rows}, sync=True)

    def note(self, index: int | None, what: str, **more: Any) -> None:
        """What is under way from now on. Not synced: it must survive this process, not the machine."""
        self.write({"on": {"index": index, "what": what, **more}})

    def write(self, line: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append a line. Raises OSError."""
        text = json.dumps(line, separators=(",", ":"), default=str)
        # Round trip: the state must be the one that a reader will find.
        self.state.take(json.loads(text))
        self._append(text + "\n", sync=sync)

    def _append(self, text: str, *, sync: bool = False) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            content = text.encode()
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Path) -> State:
    """The state that a folder's journal tells. Raises UsageError where there is none."""
    if not (folder / JOURNAL).is_file():
        raise UsageError(f"{folder} has no {JOURNAL}: no run that could be resumed; name a run's folder")
    try:
        text = (folder / JOURNAL).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{folder / JOURNAL} cannot be read: {error.strerror}") from None
    state = State()
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            state.take(content)
    return state
