"""Makes one table from rows of a run: columns with units and intervals, blanks where nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from ddp_bench.bench.findings.numbers import count, finite, number, with_interval
from ddp_bench.bench.findings.wording import (
    Row,
    case_label,
    device_noun,
    estimate,
    settings_label,
    short_mode,
    text,
    truth,
)
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.stats import Interval
from ddp_bench.report.model import Hyperlink, Table, TableColumn

Field = tuple[TableColumn, Callable[[Row], str]]
Links = Callable[[Row], tuple[Hyperlink, ...]]


def value(name: str, column: str, unit: str) -> Field:
    """Make a column of numbers without an interval, its unit in the header."""
    return _headed(name, unit), lambda row: number(finite(row[column]))


def interval(name: str, column: str, unit: str, factor: float = 1.0) -> Field:
    """Make a column of numbers with their intervals where known, its unit in the header."""
    return _headed(name, unit), lambda row: _exact(estimate(row, column), factor)


def _exact(found: Interval | None, factor: float = 1.0) -> str:
    """Write a number, without an interval that has no width."""
    if found is not None and found.low == found.high:
        return number(found.estimate * factor)
    return with_interval(found, "", factor)


def _headed(name: str, unit: str) -> TableColumn:
    return TableColumn(f"{name} ({unit})" if unit else name, "number")


def whole(name: str, column: str) -> Field:
    """Make a column of counts."""
    return TableColumn(name, "number"), lambda row: count(finite(row[column]))


CASE_ID: Field = (TableColumn("Id"), lambda row: text(row["case_id"]))
SHARED: Field = (TableColumn("Sharing"), lambda row: "shared" if truth(row["oversubscribed"]) else "")
WORKLOAD: Field = (TableColumn("Workload"), lambda row: text(row["workload"]))
CASE: Field = (
    TableColumn("Case"),
    lambda row: case_label(row, device_noun(text(row["device_type"]))),
)
NAME: tuple[Field, ...] = (CASE, WORKLOAD)
APART: tuple[Field, ...] = (
    (TableColumn("Mode"), short_mode),
    whole("Devices", "num_devices"),
    SHARED,
    (TableColumn("DDP settings"), settings_label),
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
    """Make a table without rows and columns that are blank throughout; None when nothing is left."""
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
