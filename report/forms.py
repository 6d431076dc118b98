"""Shows the forms of parallel training side by side: data parallel, model parallel, partitioned."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ddp_bench.bench.findings.numbers import TIMES, finite, number, per_second, plural, quantity, rate, times
from ddp_bench.bench.findings.wording import (
    Row,
    case_name,
    estimate,
    settings_label,
    short_mode,
    text,
    unit_of_cases,
)
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.settings import COMPARATORS, STAGED
from ddp_bench.report.devices import BARS, LOG_FROM, device_ticks, hollow_note, marked
from ddp_bench.report.drawings import Chart, Panel, Point, Series
from ddp_bench.report.fields import NAME, Field, interval, table
from ddp_bench.report.model import Section, Table, TableColumn
from ddp_bench.report.select import WorkloadCases, by_mode

FORMS = {
    "dp": "data parallel",
    "ddp": "data parallel",
    "fsdp": "data parallel, sharded",
    "pipeline": "model parallel",
    "partition": "workload partitioning",
}
"""Modes by the form that they belong to, in the order of the section."""

_FORMS_NOTE = (
    "Data parallel: every device has the model and a part of the batch (DP, DDP); sharded, it holds part of "
    "each parameter, gradient and optimizer state, and gathers a block while it computes (FSDP2). Model "
    "parallel: every device has some layers, and micro-batches pass through them (pipeline). Workload "
    "partitioning: the same split and the whole batch at once, so that one device computes at a time "
    "(partition). All cases on as many devices have the same global batch."
)
_TABLE_NOTE = (
    "Layers are split by the time that each takes. The bubble is the share of the stages' time in which they "
    "wait for each other; beside it that of the schedule alone, from the measured time of a micro-batch in "
    "each stage. The bound is the speed-up of equal stages without communication, n m / (m + n - 1) on n "
    "devices with m micro-batches."
)
_NO_PARALLEL_WORK = (
    ", though only one of its devices computes at a time. Why was not measured: each may keep its own "
    "layers in its caches, and its batch is larger where scaling is weak."
)
_HOW = (
    "Above: higher is better. Below, where memory was measured: lower is better; it is that of the tensors "
    "on the fullest device, and does not vary between rounds. "
)


def section(measured: Sequence[WorkloadCases], *, key: str) -> Section | None:
    """Show every form that was measured; None without a mode beside DP and DDP."""
    with_more = [w for w in measured if w.cases["mode"].isin(COMPARATORS).any()]
    if not with_more:
        return None
    figures = [_figure(w, key=f"{key}-{i}") for i, w in enumerate(with_more, 1)]
    several = len(measured) > 1
    rows = pd.concat([_side_by_side(w).assign(workload=w.label if several else "") for w in with_more])
    made = _table(rows)
    return Section(
        title="Forms of parallel training",
        notes=(_FORMS_NOTE, *(note for w in with_more for note in _surprises(w))),
        figures=tuple(figure for figure in figures if figure is not None),
        tables=(made,) if made is not None else (),
    )


def bound(row: Row) -> float | None:
    """The speed-up of equal stages without communication; None for a mode without stages.

    Source: Huang et al. 2019, "GPipe", section 2.3: a bubble of (n - 1) / (m + n - 1).
    """
    if row["mode"] not in STAGED:
        return None
    n, m = finite(row["num_devices"]), finite(row["micro_batches"]) or 1.0
    return None if n is None else n * m / (m + n - 1)


def _table(rows: pd.DataFrame) -> Table | None:
    values: tuple[Field, ...] = (
        (TableColumn("Form"), lambda row: FORMS.get(text(row["mode"]), "")),
        interval("Throughput", "images_per_s", per_second(unit_of_cases(rows))),
        interval("Speed-up", "speedup", TIMES),
        (TableColumn(f"Bound ({TIMES})", "number"), lambda row: number(bound(row))),
        interval("Against DDP's default", "vs_ddp_default", TIMES),
        (TableColumn("Memory of each device (MiB)"), _memory),
        (TableColumn("Layers of each device"), lambda row: text(row["layers_by_device"]).replace("/", " + ")),
        interval("Bubble", "bubble_pct", "%"),
        interval("Bubble of the stages", "bubble_of_stages_pct", "%"),
    )
    return table("Side by side", _TABLE_NOTE, rows, NAME, values)


def _memory(row: Row) -> str:
    return " / ".join(number(finite(mib)) for mib in text(row["mem_by_device_mib"]).split("/") if mib)


def _side_by_side(workload: WorkloadCases) -> pd.DataFrame:
    """One case of each mode and device count, of pipelines all, the forms in order after `single`."""
    cases = workload.cases
    chosen = [by_mode(cases, "single")]
    chosen += [by_mode(cases, m) if m != "pipeline" else cases[cases["mode"] == m] for m in FORMS]
    found: pd.DataFrame = pd.concat(chosen)
    return found


def _figure(workload: WorkloadCases, *, key: str) -> Chart | None:
    unit = per_second(workload.unit)
    speed = _series(workload, "images_per_s", unit)
    memory = _series(workload, "peak_mem_mib", "MiB")
    counts = sorted({p.x for s in speed for p in s.points})
    if len(counts) == 0:
        return None
    panels = [Panel("", speed, f"throughput ({unit})")]
    panels += [Panel("", memory, "memory per device (MiB)")] if memory else []
    return Chart(
        key=f"{key}-forms",
        title="Speed and memory of each form",
        x_label=workload.devices_label,
        y_label=f"throughput ({unit})",
        ticks=device_ticks(counts, speed),
        panels=tuple(panels),
        caption=_finding(workload, counts[-1]),
        how_to_read=f"{_HOW}{BARS}{hollow_note(speed)}",
        log_x=max(counts) > LOG_FROM,
    )


def _series(workload: WorkloadCases, column: str, unit: str) -> tuple[Series, ...]:
    made = []
    for i, mode in enumerate(FORMS, start=1):
        rows = records(by_mode(workload.cases, mode))
        points: list[Point] = []
        for row in rows:
            value = estimate(row, column)
            if value is not None:
                points.append(marked(float(row["num_devices"]), value, row, unit))
        if points:
            made.append(Series(_label(rows[0]), f"run{i}", tuple(points)))
    return tuple(made)


def _label(row: Row) -> str:
    return ", ".join(filter(None, (short_mode(row), settings_label(row, with_cap=False))))


def _finding(workload: WorkloadCases, most: float) -> str:
    """Say what is fastest at the most devices, and what takes the least memory."""
    rows = [row for row in records(_side_by_side(workload)) if row["num_devices"] == most]
    where = plural(most, workload.device)
    best = max(rows, key=lambda row: finite(row["images_per_s"]) or 0.0)
    said = f"On {where}: most {per_second(workload.unit)} with {_label(best)}, "
    said += rate(estimate(best, "images_per_s"), workload.unit)
    if held := [row for row in rows if finite(row["peak_mem_mib"]) is not None]:
        least = min(held, key=lambda row: float(row["peak_mem_mib"]))
        said += f"; least memory with {_label(least)}, {quantity(finite(least['peak_mem_mib']), 'MiB')}"
    return f"{said}."


def _surprises(workload: WorkloadCases) -> list[str]:
    """Say where devices that take turns are faster than one alone, and why that is no parallel work."""
    found = []
    for row in records(workload.cases[workload.cases["mode"] == "partition"]):
        speedup = estimate(row, "speedup")
        if speedup is not None and speedup.low > 1:
            faster = f"{case_name(row)} is {times(speedup.estimate)} as fast as one device"
            found.append(f"{faster}{_NO_PARALLEL_WORK}")
    return found
