"""The tables of a run: every measured number with its unit, blanks where nothing was measured. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from report.model import Column, Table
from report.numbers import MIB, TIMES, count, finite, interval, number, quantity
from report.select import mode_label, records, settings_label, text, truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from report.select import Row

Field = tuple[Column, Callable[["Row"], str]]


def _value(name: str, column: str, unit: str, factor: float = 1.0) -> Field:
    def shown(row: Row) -> str:
        value = finite(row[column])
        return quantity(None if value is None else value * factor, unit)

    return Column(name, "number"), shown


def _interval(name: str, column: str, unit: str, factor: float = 1.0) -> Field:
    def shown(row: Row) -> str:
        cells = (finite(row[key]) for key in (column, f"{column}_low", f"{column}_high"))
        estimate, low, high = (None if cell is None else cell * factor for cell in cells)
        return interval(estimate, low, high, unit)

    return Column(name, "number"), shown


def _count(name: str, column: str) -> Field:
    return Column(name, "number"), lambda row: count(finite(row[column]))


CASE_ID: Field = (Column("Case"), lambda row: text(row["case_id"]))
SHARED: Field = (Column("Sharing"), lambda row: "shared" if truth(row["oversubscribed"]) else "")
NAME: tuple[Field, ...] = (
    (Column("Workload"), lambda row: text(row["workload"])),
    (Column("Mode"), mode_label),
    _count("Devices", "num_devices"),
    SHARED,
    (Column("DDP settings"), settings_label),
)
RESULTS: tuple[Field, ...] = (
    _interval("Throughput", "images_per_s", "images/s"),
    _interval("Speed-up", "speedup", TIMES),
    _interval("Efficiency", "efficiency", "%", 100.0),
    _value("Step, median", "step_ms_p50", "ms"),
    _value("Step, p95", "step_ms_p95", "ms"),
    _value("Peak memory", "peak_mem_mib", "MiB"),
    _count("Rounds", "num_rounds"),
)
ANATOMY: tuple[Field, ...] = (
    _value("Data", "data_ms", "ms"),
    _value("Forward", "forward_ms", "ms"),
    _value("Backward", "backward_ms", "ms"),
    _value("Optimizer", "optimizer_ms", "ms"),
    _value("Step without sync", "no_sync_step_ms", "ms"),
    _interval("Communication alone", "comm_ms", "ms"),
    _interval("Communication exposed", "exposed_comm_ms", "ms"),
    _interval("Communication hidden", "hidden_pct", "%"),
    _value("Overlap, trace", "overlap_trace_pct", "%"),
    _value("Overlap, DDP window", "overlap_window_pct", "%"),
    _value("Compute slow-down", "compute_slowdown", TIMES),
    _value("Rank skew", "rank_skew_ms", "ms"),
    _value("Cost of instruments", "anatomy_slowdown_pct", "%"),
)
DP_STAGES: tuple[Field, ...] = (
    _value("Scatter", "dp_scatter_ms", "ms"),
    _value("Replicate", "dp_replicate_ms", "ms"),
    _value("Apply", "dp_apply_ms", "ms"),
    _value("Gather", "dp_gather_ms", "ms"),
    _value("Backward", "dp_backward_ms", "ms"),
    _value("Reduce", "dp_reduce_ms", "ms"),
    _value("Only device 0 works", "dp_device0_pct", "%"),
)


def _sizes(row: Row) -> str:
    sizes = [finite(part) for part in text(row["bucket_bytes"]).split("/")]
    known = [number(size / MIB) for size in sizes if size is not None]
    return f"{' + '.join(known)} MiB" if known else ""


BUCKETS: tuple[Field, ...] = (_count("Buckets", "num_buckets"), (Column("Sizes in all-reduce order"), _sizes))
UNMEASURED: tuple[Field, ...] = (
    (Column("Status"), lambda row: text(row["status"])),
    (Column("Mode"), mode_label),
    _count("Devices", "num_devices"),
    SHARED,
    (Column("DDP settings"), settings_label),
    (Column("Reason", "long"), lambda row: text(row["reason"])),
    CASE_ID,
)

_RESULTS_NOTE = (
    "Estimate [95% interval over rounds]. Speed-up is throughput over that of “single” in the same round; "
    "efficiency is speed-up over devices. cases.csv holds the same numbers under the name in the last column."
)
_ANATOMY_NOTE = (
    "Per step, from passes of their own beside the timed one. Exposed communication is the time it adds: "
    "the step minus the same step without gradient synchronisation; the rest of communication is hidden."
)
_DP_NOTE = "Per step: DataParallel's own stages, in order. Outside apply and backward only device 0 works."
_BUCKETS_NOTE = "DDP's buckets after the rebuild. Caps that make equal sizes are the same layout."


def tables(ok: pd.DataFrame) -> tuple[Table, ...]:
    """Tables of the measured cases; `ok` has a column `workload`, blank where naming it says nothing."""
    made = (
        _table("Results", _RESULTS_NOTE, ok, NAME, (*RESULTS, CASE_ID)),
        _table("Where the step goes", _ANATOMY_NOTE, ok, NAME, ANATOMY),
        _table("DataParallel's stages", _DP_NOTE, ok[ok["mode"] == "dp"], NAME, DP_STAGES),
        _table("Bucket layouts", _BUCKETS_NOTE, ok[ok["mode"] == "ddp"], NAME, BUCKETS),
    )
    return tuple(table for table in made if table is not None)


def unmeasured(cases: pd.DataFrame) -> Table | None:
    """Every case without a measurement, and why."""
    rows = cases[cases["status"] != "ok"]
    return _table("Not measured", "Planned cases that have no numbers, and why.", rows, (), UNMEASURED)


def _table(
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
