"""What a table of the page is: columns over cases; and a section of tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..bench.findings.numbers import count, number, with_interval
from ..bench.findings.wording import case_label
from ..bench.results.case_result import CaseResult
from .drawing import Figure


class Link(NamedTuple):
    """A file beside the page, or a place on it; empty where the page cannot lead there."""

    label: str
    href: str


Cell = str | tuple[Link, ...]


class Heading(NamedTuple):
    """The head of a column; `kind` is empty, `number` (to the right), `long` (in lines) or `links`."""

    name: str
    kind: str = ""


class Column(NamedTuple):
    """A column of a table of cases: what stands in it of a case, and what that means, to be said below."""

    heading: Heading
    cell: Callable[[CaseResult], Cell]
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """A titled table; a missing value is an empty string. `below` explains what it holds."""

    title: str
    note: str
    columns: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    below: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """Figures and tables under a heading of their own."""

    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


def table(
    title: str,
    note: str,
    cases: Iterable[CaseResult],
    columns: Iterable[Column],
    *,
    below: Iterable[str] = (),
) -> Table | None:
    """Make a table without rows and columns that are blank but for names; None when nothing is left.

    `below` stands after the meanings of the columns.
    """
    columns = list(columns)
    values = [i for i, column in enumerate(columns) if column not in NAME]
    rows = [tuple(column.cell(case) for column in columns) for case in cases]
    rows = [row for row in rows if any(row[i] for i in values)]
    if not rows:
        return None
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    headings = [columns[i].heading for i in kept]
    meanings = [f"{columns[i].heading.name}: {columns[i].meaning}." for i in kept if columns[i].meaning]
    cells = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(title, note, tuple(headings), cells, (*meanings, *below))


def words(name: str, cell: Callable[[CaseResult], str], kind: str = "") -> Column:
    """Make a column of text."""
    return Column(Heading(name, kind), cell)


def figures(name: str, column: str, unit: str = "", factor: float = 1.0, meaning: str = "") -> Column:
    """Make a column of numbers with their intervals where known, its unit in the heading."""

    def cell(case: CaseResult) -> str:
        found = case.interval(column)
        if found is not None and found.low == found.high:  # as of the reference: no interval has no width
            return number(found.estimate * factor)
        return with_interval(found, "", factor)

    return Column(Heading(f"{name} ({unit})" if unit else name, "number"), cell, meaning)


def whole(name: str, column: str) -> Column:
    """Make a column of counts."""
    return words(name, lambda case: count(case.number(column)), "number")


NAME = (
    words("Case", case_label),
    words("Workload", lambda case: case.text("workload")),
)
