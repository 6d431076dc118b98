"""What a table is made of: columns that know how to show a row. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from report.model import Column, Table
from report.numbers import count, finite, quantity
from report.select import estimate, mode_label, records, settings_label, text, truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from report.select import Row

Field = tuple[Column, Callable[["Row"], str]]


def value(name: str, column: str, unit: str) -> Field:
    """A number without an interval."""
    return Column(name, "number"), lambda row: quantity(finite(row[column]), unit)


def interval(name: str, column: str, unit: str, factor: float = 1.0) -> Field:
    """A number with its interval where one is known."""

    def shown(row: Row) -> str:
        cell = estimate(row, column)
        return "" if cell is None else cell.times(factor).shown(unit)

    return Column(name, "number"), shown


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
    title: str, note: str, cases: pd.DataFrame, name: Sequence[Field], values: Sequence[Field]
) -> Table | None:
    """The table without rows and columns that are blank throughout; None when nothing is left."""
    rows = [
        [show(row) for _, show in (*name, *values)]
        for row in records(cases)
        if any(show(row) for _, show in values)
    ]
    fields = [column for column, _ in (*name, *values)]
    kept = [i for i in range(len(fields)) if any(row[i] for row in rows)]
    if not rows:
        return None
    return Table(
        title, note, tuple(fields[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows)
    )
