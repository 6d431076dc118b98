"""Holds everything the page shows, as plain data: strings are final; report/drawings.py has the figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_bench.report.drawings import Drawing


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    `kind` is empty, `number` (aligned to the right), `long` (broken into lines) or `links`.
    """

    name: str
    kind: str = ""


@dataclass(frozen=True)
class Hyperlink:
    """A place on the page, or a file beside it."""

    label: str
    href: str


@dataclass(frozen=True)
class Table:
    """A titled table of final strings; a missing value is an empty string.

    `below` explains what it holds; `links` are those of each row, shown in the column of that kind.
    """

    title: str
    note: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[str, ...], ...]
    below: tuple[str, ...] = ()
    links: tuple[tuple[Hyperlink, ...], ...] = ()


@dataclass(frozen=True)
class RunFiles:
    """What the page says of a run's files: tables, traces by case, `failures` by their name in its folder.

    An address is empty where the page cannot lead there.
    """

    tables: tuple[Hyperlink, ...] = ()
    traces: Mapping[str, tuple[Hyperlink, ...]] = field(default_factory=dict)
    failures: Mapping[str, Hyperlink] = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """One condition of a run; `code` marks text to be read letter by letter."""

    name: str
    value: str
    code: bool = False


@dataclass(frozen=True)
class Group:
    """Conditions that belong together."""

    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Card:
    """One answer: `state` is `found`, `equal` or `open`, `label` names it in words, `paste` is code.

    `leave` says that nothing is to be changed.
    """

    title: str
    state: str
    label: str
    sentence: str
    paste: str = ""
    leave: bool = False


@dataclass(frozen=True)
class Following:
    """The command to run next, and why."""

    why: str
    command: str


@dataclass(frozen=True)
class Section:
    """Figures and tables under a heading of their own; findings and warnings come before everything."""

    title: str
    notes: tuple[str, ...]
    figures: tuple[Drawing, ...]
    tables: tuple[Table, ...]
    findings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    following: Following | None = None


@dataclass(frozen=True)
class RunView:
    """One run on the page: `heading` names what was measured, `title` the run.

    `figures` are unfolded, `more_figures` wait in a fold.
    """

    key: str
    title: str
    heading: str
    status: str
    subtitle: tuple[str, ...]
    warnings: tuple[str, ...]
    cards: tuple[Card, ...]
    following: Following | None
    cautions: tuple[Fact, ...]
    notes: tuple[str, ...]
    figures: tuple[Drawing, ...]
    more_figures: tuple[Drawing, ...]
    tables: tuple[Table, ...]
    files: RunFiles
    unmeasured: Table | None
    conditions: tuple[Group, ...]
    condition_tables: tuple[Table, ...]
    topology: str
    predicted: Section | None = None
    forms: Section | None = None


@dataclass(frozen=True)
class Page:
    """The whole page; `differences` compares the conditions of several runs, `together` their numbers."""

    title: str
    runs: tuple[RunView, ...]
    differences: Table | None
    together: Section | None = None

    @property
    def figures(self) -> list[Drawing]:
        """Every figure of the page, in its order."""
        found = list(self.together.figures) if self.together is not None else []
        for run in self.runs:
            sections = (run.forms, run.predicted)
            found += [*run.figures, *(f for s in sections if s is not None for f in s.figures)]
            found += run.more_figures
        return found
