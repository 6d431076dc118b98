"""What a table is made of: columns that know how to show a row. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from report.model import Column, Link, Table
from report.numbers import count, finite, quantity
from report.select import estimate, mode_label, records, settings_label, text, truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from report.select import Row

Field = tuple[Column, Callable[["Row"], str]]
Links = Callable[["Row"], tuple[Link, ...]]


def value(name: str, column: str, unit: str) -> Field:
    """A number without an interval."""
    return Column(name, "number"), lambda row: quantity(finite(row[column]), unit)


def interval(name: str, column: str, unit: str, factor: float = 1.0) -> Field:
    """A number with its interval where one is known."""

    def shown(row: Row) -> str:
        cell = estimate(row, column)
        return "" if cell is None else cell.times(factor).shown(unit)

    return Column(name, "number"), shown


def linked(name: str, column: str, links: Links) -> Field:
    """A count, or where it leads on to."""
    return Column(
        name, "links"
    ), lambda row: " ".join(link.label for link in links(row)) or count(finite(row[column]))


def whole(name: str, column: str) -> Field:
    """A count."""
    return Column(name, "number"), lambda row: count(finite(row[column]))


CASE_ID: Field = (Column("Case"), lambda row: text(row["case_id"]))
SHARED: Field = (Column("Sharing"), lambda row: "shared" if truth(row["oversubscribed"]) else "")
NAME: tuple[Field, ...] = (
    (Column("Workload"), lambda row: text(row["workload"])),
    (Column("Mode"), mode_label),
    whole("Devices", "num_devices"),
    SHARED,
    (Column("DDP settings"), settings_label),
)


def table(
    title: str,
    note: str,
    cases: pd.DataFrame,
    name: Sequence[Field],
    values: Sequence[Field],
    *,
    links: Links | None = None,
) -> Table | None:
    """The table without rows and columns that are blank throughout; None when nothing is left."""
    fields = (*name, *values)
    every = [(row, [show(row) for _, show in fields]) for row in records(cases)]
    shown = [(row, cells) for row, cells in every if any(cells[len(name) :])]
    if not shown:
        return None
    kept = [i for i in range(len(fields)) if any(cells[i] for _, cells in shown)]
    return Table(
        title,
        note,
        columns=tuple(fields[i][0] for i in kept),
        rows=tuple(tuple(cells[i] for i in kept) for _, cells in shown),
        links=tuple(links(row) for row, _ in shown) if links is not None else (),
    )
