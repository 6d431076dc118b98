"""Makes the tables of a run: every measured number with its unit, blanks where nothing was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd

from bench.findings.wording import (
    MIB,
    TIMES,
    Row,
    case_label,
    count,
    device_noun,
    estimate,
    finite,
    number,
    plural,
    ranged,
    settings_label,
    short_mode,
    text,
    truth,
    with_interval,
)
from bench.layout import BucketLayout
from bench.results.typical import Typical
from bench.stats import Interval
from report.model import Hyperlink, Table, TableColumn
from report.select import records, throughput_ratio, unshared

Field = tuple[TableColumn, Callable[[Row], str]]
Links = Callable[[Row], tuple[Hyperlink, ...]]
Against = Callable[[Row, Row], Interval | None]

MOST_REFERENCES = 24
"""Rows of a table among which the reader may choose the reference: the page holds every pair."""


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


def linked(name: str, column: str, links: Links) -> Field:
    """Make a column of counts, or of the links that stand for them."""
    return TableColumn(
        name, "links"
    ), lambda row: " ".join(link.label for link in links(row)) or count(finite(row[column]))


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
    against: Against | None = None,
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
        against=_matrix([row for row, _ in shown], against) if against is not None else (),
    )


def _matrix(rows: Sequence[Row], against: Against) -> tuple[tuple[str, ...], ...]:
    """Write every row against every other."""
    if len(rows) > MOST_REFERENCES:
        return ()
    return tuple(
        tuple("1, the reference" if row is other else with_interval(against(row, other)) for other in rows)
        for row in rows
    )


def _against_default(row: Row) -> str:
    found = estimate(row, "vs_ddp_default")
    is_reference = found is not None and found.low == found.high == 1
    return "1, the default" if is_reference else with_interval(found)


def _cost(row: Row) -> str:
    """Write what instruments cost, which cannot be less than nothing."""
    found = estimate(row, "anatomy_slowdown_pct")
    if found is None:
        return ""
    least = found.estimate if math.isnan(found.low) else found.low
    return with_interval(found) if least > 0 else "below the noise"


AGAINST: Field = (TableColumn(f"Against DDP's default ({TIMES})", "number against"), _against_default)
RESULTS: tuple[Field, ...] = (
    interval("Throughput", "images_per_s", "images/s"),
    AGAINST,
    interval("Efficiency", "efficiency", "%", 100.0),
    value("Cost of an epoch", "epoch_cost", ""),
)
EVERY: tuple[Field, ...] = (
    interval("Throughput", "images_per_s", "images/s"),
    value("Throughput, pauses included", "images_per_s_sustained", "images/s"),
    AGAINST,
    interval("Speed-up", "speedup", TIMES),
    interval("Efficiency", "efficiency", "%", 100.0),
    interval("Step", "step_ms", "ms"),
    value("Step, median", "step_ms_p50", "ms"),
    value("Step, p95", "step_ms_p95", "ms"),
    interval("Arithmetic per device", "tflop_per_s", "TFLOP/s"),
    value("Peak memory", "peak_mem_mib", "MiB"),
    value("Epoch", "epoch_h", "h"),
    value("Cost of an epoch", "epoch_cost", ""),
)
ANATOMY: tuple[Field, ...] = (
    interval("Data", "data_ms", "ms"),
    interval("Forward", "forward_ms", "ms"),
    interval("Backward", "backward_ms", "ms"),
    interval("Optimizer", "optimizer_ms", "ms"),
    (TableColumn("Cost of instruments (%)", "number"), _cost),
)
DP_STAGES: tuple[Field, ...] = (
    interval("Scatter", "dp_scatter_ms", "ms"),
    interval("Replicate", "dp_replicate_ms", "ms"),
    interval("Apply", "dp_apply_ms", "ms"),
    interval("Gather", "dp_gather_ms", "ms"),
    interval("Backward", "dp_backward_ms", "ms"),
    interval("Reduce", "dp_reduce_ms", "ms"),
    interval("Only device 0 works", "dp_device0_pct", "%"),
)


def _sizes(row: Row) -> str:
    layout = BucketLayout.of_cell(row["bucket_bytes"])
    return f"{' + '.join(number(size / MIB) for size in layout.num_bytes)} MiB" if layout else ""


BUCKETS: tuple[Field, ...] = (
    whole("Buckets", "num_buckets"),
    (TableColumn("Sizes in all-reduce order"), _sizes),
)
UNMEASURED: tuple[Field, ...] = (
    (TableColumn("Status"), lambda row: text(row["status"])),
    (TableColumn("Mode"), short_mode),
    whole("Devices", "num_devices"),
    SHARED,
    (TableColumn("DDP settings"), settings_label),
    (TableColumn("Reason", "long"), lambda row: text(row["reason"])),
    CASE_ID,
)

_RESULTS_NOTE = (
    "Estimate (95% interval over rounds); the ratios to DDP's default at the same number of devices hold all "
    "at once, and those to a reference that you choose each by itself. Efficiency is throughput over that of "
    "“single”, divided by devices."
)
_EVERY_NOTE = (
    "All cases, those on shared devices too. Speed-up is throughput over that of “single”. Arithmetic counts "
    "three times the forward's matrix products and convolutions. An epoch has the 1,281,167 images of "
    "ImageNet-1k, of the size measured, at the throughput with pauses. cases.csv holds the measured numbers "
    "under the name in column “Id”."
)
_ANATOMY_NOTE = (
    "Per step, from the anatomy pass, which is not the timed one: the last column says how much slower its "
    "instruments make the step. Backward includes exposed communication."
)
_DP_NOTE = "Per step: DataParallel's own stages, in order. Outside apply and backward only device 0 works."
_STAND_IN = " “CPU stand-in”: the same stages, carried out on CPU cores and host memory."
_BUCKETS_NOTE = "DDP's buckets after the rebuild. Caps that make equal sizes are the same layout."


def tables(ok: pd.DataFrame, links: Links, typical: Typical) -> tuple[Table, ...]:
    """Make the tables of the measured cases; `ok` has a column `workload`, blank where there is only one.

    `links` leads from a case's row of the results to its rounds and trace; `typical` is the fit of the run.
    """
    dp = ok[ok["mode"] == "dp"]
    dp_note = _DP_NOTE + (_STAND_IN if (dp["device_type"] == "cpu").any() else "")
    rounds = linked("Rounds", "num_rounds", links)
    own = unshared(ok)
    results = table(
        "Results",
        _RESULTS_NOTE,
        own,
        NAME,
        (*RESULTS, rounds),
        links=links,
        against=lambda row, reference: throughput_ratio(row, reference, typical),
    )
    folded = len(ok) - len(own)
    if results is not None and folded:
        left_out = f"{plural(folded, 'case')} on shared devices: see “Every column”."
        results = replace(results, below=(left_out,))
    every = (*EVERY, rounds, *APART, CASE_ID)
    made = (
        results,
        table("Every column", _EVERY_NOTE, ok, NAME, every, links=links),
        table("Where the step goes", _ANATOMY_NOTE, ok, NAME, ANATOMY),
        communication(ok),
        table("DataParallel's stages", dp_note, dp, NAME, DP_STAGES),
        table("Bucket layouts", _BUCKETS_NOTE, ok[ok["mode"] == "ddp"], NAME, BUCKETS),
    )
    return tuple(made_table for made_table in made if made_table is not None)


def unmeasured(cases: pd.DataFrame) -> Table | None:
    """Tabulate every case without a measurement, and why."""
    rows = cases[cases["status"] != "ok"]
    return table("Not measured", "Planned cases that have no numbers, and why.", rows, (), UNMEASURED)


_APART_PCT = 10
_NAMED = 6
_COLUMNS: tuple[tuple[Field, str], ...] = (
    (
        interval("Communication alone", "comm_ms", "ms"),
        "all-reduce of the recorded bucket sizes back to back, with no compute beside it",
    ),
    (
        interval("Bus bandwidth", "bus_gb_per_s", "GB/s"),
        "bytes of the buckets / communication alone x 2 (n - 1) / n, as nccl-tests defines it",
    ),
    (
        interval("Exposed", "exposed_comm_ms", "ms"),
        "the step minus the same step without synchronising, in the same round: time that communication adds",
    ),
    (
        interval("Hidden", "hidden_pct", "%"),
        "100 x (1 - exposed / alone); negative where it adds more than it takes alone",
    ),
    (
        interval("Overlap, trace", "overlap_trace_pct", "%"),
        "time in which both compute and communication run, over the time communication runs, per rank",
    ),
    (
        interval("Overlap, DDP window", "overlap_window_pct", "%"),
        "DDP's own logger: the part of its communication window that lies inside the backward",
    ),
    (
        interval("Compute slow-down", "compute_slowdown", TIMES),
        "time to the last gradient beside communication, over the same time without it",
    ),
    (
        interval("Rank skew", "rank_skew_ms", "ms"),
        "slowest minus fastest rank's own work; the others wait for the slowest",
    ),
    (
        interval("Step without synchronising", "no_sync_step_ms", "ms"),
        "the step under no_sync: compute, optimizer and batch",
    ),
)
_NOTE = (
    "Per step of every DDP case on several devices: several measures of the same thing side by side, because "
    "each leaves something out."
)
_WHY_TRACE_HIGHER = (
    "Hidden counts the time that communication adds to the step, so compute that it slows and waiting for "
    "other ranks count as exposed; the trace counts all time in which both run."
)
_WHY_TRACE_LOWER = (
    "Where the trace shows less, communication ran in gaps between operators, which it does not lengthen, "
    "or took longer under the profiler than alone."
)


def communication(ok: pd.DataFrame) -> Table | None:
    """Make the table, what its columns mean, and why the trace and the subtraction disagree where they do."""
    ddp = ok[(ok["mode"] == "ddp") & (ok["num_devices"] > 1)]
    made = table("Communication", _NOTE, ddp, NAME, [field for field, _ in _COLUMNS])
    if made is None:
        return None
    shown = {column.name for column in made.columns}
    meanings = (f"{column.name}: {meaning}." for (column, _), meaning in _COLUMNS if column.name in shown)
    return replace(made, below=(*meanings, *_disagreement(ddp)))


def _disagreement(ddp: pd.DataFrame) -> tuple[str, ...]:
    apart = [(row, gap) for row in records(ddp) if abs(gap := _gap_pct(row)) > _APART_PCT]
    if not apart:
        return ()
    why = [
        reason
        for reason, there in (
            (_WHY_TRACE_HIGHER, any(gap > 0 for _, gap in apart)),
            (_WHY_TRACE_LOWER, any(gap < 0 for _, gap in apart)),
        )
        if there
    ]
    named = [_numbers(row) for row, _ in apart[:_NAMED]]
    more = f"; {plural(len(apart) - _NAMED, 'more case')}" if len(apart) > _NAMED else ""
    say = f"The trace's overlap and the hidden share are more than {_APART_PCT} points apart in "
    return (f"{say}{plural(len(apart), 'case')}. {' '.join(why)}", f"{'; '.join(named)}{more}.")


def _gap_pct(row: Row) -> float:
    trace, hidden = finite(row["overlap_trace_pct"]), finite(row["hidden_pct"])
    return 0.0 if trace is None or hidden is None else trace - hidden


def _numbers(row: Row) -> str:
    measured = (
        ("trace", ranged(row, "overlap_trace_pct", "%")),
        ("hidden", ranged(row, "hidden_pct", "%")),
        ("compute slowed", ranged(row, "compute_slowdown", TIMES)),
    )
    said = ", ".join(f"{name} {value}" for name, value in measured if value)
    return f"{case_label(row, device_noun(text(row['device_type'])))}: {said}"
