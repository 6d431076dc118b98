"""The tables of a run: every measured number with its unit, blanks where nothing was measured. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.layout import BucketLayout
from report.communication import communication
from report.fields import CASE_ID, NAME, SHARED, Field, Links, interval, linked, table, value, whole
from report.model import Column, Table
from report.numbers import MIB, TIMES, number
from report.select import mode_label, settings_label, text

if TYPE_CHECKING:
    import pandas as pd

    from report.select import Row

RESULTS: tuple[Field, ...] = (
    interval("Throughput", "images_per_s", "images/s"),
    interval("Speed-up", "speedup", TIMES),
    interval("Efficiency", "efficiency", "%", 100.0),
    value("Step, median", "step_ms_p50", "ms"),
    value("Step, p95", "step_ms_p95", "ms"),
    value("Peak memory", "peak_mem_mib", "MiB"),
)
ANATOMY: tuple[Field, ...] = (
    interval("Data", "data_ms", "ms"),
    interval("Forward", "forward_ms", "ms"),
    interval("Backward", "backward_ms", "ms"),
    interval("Optimizer", "optimizer_ms", "ms"),
    interval("Cost of instruments", "anatomy_slowdown_pct", "%"),
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


BUCKETS: tuple[Field, ...] = (whole("Buckets", "num_buckets"), (Column("Sizes in all-reduce order"), _sizes))
UNMEASURED: tuple[Field, ...] = (
    (Column("Status"), lambda row: text(row["status"])),
    (Column("Mode"), mode_label),
    whole("Devices", "num_devices"),
    SHARED,
    (Column("DDP settings"), settings_label),
    (Column("Reason", "long"), lambda row: text(row["reason"])),
    CASE_ID,
)

_RESULTS_NOTE = (
    "Estimate [95% interval over rounds]. Speed-up is throughput over that of “single” in the same round; "
    "efficiency is speed-up over devices. cases.csv holds the same numbers under the name in column “Case”."
)
_ANATOMY_NOTE = (
    "Per step, from the anatomy pass, which is not the timed one: the last column says how much slower its "
    "instruments make the step. Backward includes exposed communication."
)
_DP_NOTE = "Per step: DataParallel's own stages, in order. Outside apply and backward only device 0 works."
_STAND_IN = " “CPU stand-in”: the same stages, carried out on CPU cores and host memory."
_BUCKETS_NOTE = "DDP's buckets after the rebuild. Caps that make equal sizes are the same layout."


def tables(ok: pd.DataFrame, links: Links) -> tuple[Table, ...]:
    """Tables of the measured cases; `ok` has a column `workload`, blank where naming it says nothing.

    `links` leads from a case's row of the results to its rounds and trace.
    """
    dp = ok[ok["mode"] == "dp"]
    dp_note = _DP_NOTE + (_STAND_IN if (dp["device_type"] == "cpu").any() else "")
    results = (*RESULTS, linked("Rounds", "num_rounds", links), CASE_ID)
    made = (
        table("Results", _RESULTS_NOTE, ok, NAME, results, links=links),
        table("Where the step goes", _ANATOMY_NOTE, ok, NAME, ANATOMY),
        communication(ok),
        table("DataParallel's stages", dp_note, dp, NAME, DP_STAGES),
        table("Bucket layouts", _BUCKETS_NOTE, ok[ok["mode"] == "ddp"], NAME, BUCKETS),
    )
    return tuple(made_table for made_table in made if made_table is not None)


def unmeasured(cases: pd.DataFrame) -> Table | None:
    """Every case without a measurement, and why."""
    rows = cases[cases["status"] != "ok"]
    return table("Not measured", "Planned cases that have no numbers, and why.", rows, (), UNMEASURED)
