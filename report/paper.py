"""Shows the DDP paper's experiments beside this run's; it is another machine, so only shapes compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from ddp_bench.bench.conditions import part
from ddp_bench.bench.findings.numbers import TIMES, finite, mib, plain, plural, short, with_interval
from ddp_bench.bench.findings.wording import Row, case_label, estimate, link_name, ranged, text
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.results.typical import Typical
from ddp_bench.bench.stats import Interval
from ddp_bench.report.anatomy import parts
from ddp_bench.report.caps import bucket_caps
from ddp_bench.report.devices import BARS, hollow_note, marked, on_devices
from ddp_bench.report.drawings import Bar, Bars, Chart, Panel, Part, Point, Series, Tick
from ddp_bench.report.fields import Field, interval, table, value, whole
from ddp_bench.report.model import Section, Table, TableColumn
from ddp_bench.report.select import (
    WorkloadCases,
    answered_ratio,
    at_headline,
    by_mode,
    headline_count,
    step_time,
)

_SOURCE = (
    "Source: Li et al., “PyTorch Distributed: Experiences on Accelerating Data Parallel Training”, "
    "PVLDB 13(12), 2020."
)
_NOTE = (
    "The paper's experiments, repeated at the size of this machine. Its figures are quoted beside ours from "
    "another machine, another model and an older PyTorch: compare directions and shapes, not numbers."
)
_CAPS_BESIDE = "The best bucket for ResNet-50 on 16 GPUs with NCCL was 10 to 25 MB."
_CURVE: tuple[Field, ...] = (
    whole("Devices", "num_devices"),
    (TableColumn("Backend"), lambda row: text(row["backend"])),
    (TableColumn("Message", "number"), lambda row: size_label(finite(row["bytes"]))),
    interval("Time", "time_ms", "ms"),
    value("Bus bandwidth", "busbw_gb_per_s", "GB/s"),
    whole("Repetitions", "num_samples"),
)
_CURVE_NOTE = (
    "One all-reduce by itself, longest rank. Bus bandwidth is bytes / time x 2 (n - 1) / n, in 10⁹ bytes/s."
)
_CURVE_STYLES = ("ddp", "dp", "single", "other")


def section(
    run: RunData,
    workload: WorkloadCases,
    typical: Typical,
    comparisons: Sequence[Comparison],
    *,
    key: str,
) -> Section | None:
    """Make the section for runs that vary one setting at a time as the paper does; None for others."""
    settings = part(run.manifest, "settings")
    if settings.get("sweep") != "star" and run.manifest.get("preset") != "ddp-paper":
        return None
    caps = bucket_caps(workload, key=key)
    figures = (
        overlap(workload, typical, comparisons, key=key),
        None if caps is None else replace(caps, beside=_CAPS_BESIDE),
        allreduce_curve(run.allreduce, workload.device, key=key),
        devices(workload, key=key),
        accumulation(workload, key=key),
    )
    curve = table("All-reduce by itself", _CURVE_NOTE, run.allreduce, (), _CURVE)
    return Section(
        title="The DDP paper beside this run",
        notes=(_NOTE, _SOURCE),
        figures=tuple(figure for figure in figures if figure is not None),
        tables=tuple(made for made in (_differences(run, workload), curve) if made is not None),
    )


def _differences(run: RunData, workload: WorkloadCases) -> Table:
    cases = workload.cases
    ours = {
        "Hardware": _hardware(workload),
        "Model": " at ".join(filter(None, (_once(cases, "arch"), _once(cases, "image_size", " px")))),
        "Gradients per step": mib(finite(part(run.manifest, "model").get("gradient_bytes"))),
        "Backend": _once(cases[cases["mode"] == "ddp"], "backend"),
        "PyTorch": plain(part(run.manifest, "versions").get("torch")),
    }
    theirs = {
        "Hardware": "32 GPUs for the breakdown, 16 for bucket sizes, up to 256 for scaling",
        "Model": "ResNet-50 and BERT; the figures quoted here are ResNet-50's",
        "Gradients per step": mib(4 * 25_557_032),
        "Backend": "nccl and gloo",
        "PyTorch": "1.5",
    }
    rows = tuple((name, theirs[name], ours[name]) for name in theirs)
    columns = (TableColumn("Condition"), TableColumn("The paper"), TableColumn("This run"))
    return Table("What differs from the paper", "Why numbers do not compare.", columns, rows)


def _hardware(workload: WorkloadCases) -> str:
    cases = workload.cases
    count, hosts = headline_count(cases), finite(cases["num_nodes"].max())
    link = ", ".join(dict.fromkeys(link_name(text(cell)) for cell in cases["link"] if text(cell)))
    parts = (
        plural(count or 1, workload.device),
        f"on {plural(hosts, 'host')}" if hosts is not None and hosts > 1 else "",
        f"({_once(cases, 'device_name')})" if workload.device == "GPU" else "",
        f"over a link of {link}" if link else "",
    )
    return " ".join(part for part in parts if part)


def _once(cases: pd.DataFrame, name: str, unit: str = "") -> str:
    return ", ".join(dict.fromkeys(f"{text(cell)}{unit}" for cell in cases[name] if text(cell)))


def overlap(
    workload: WorkloadCases, typical: Typical, comparisons: Sequence[Comparison], *, key: str
) -> Bars | None:
    """Show a step with default buckets beside one with a single bucket; None unless both were measured."""
    rows = records(at_headline(workload.cases, free="bucket_cap_mb"))
    usual = next((row for row in rows if text(row["bucket_cap_mb"]) == "default"), None)
    whole = next((row for row in rows if finite(row["num_buckets"]) == 1), None)
    if usual is None or whole is None or usual is whole:
        return None
    with_overlap, without = step_time(usual), step_time(whole)
    if with_overlap is None or without is None:
        return None
    faster = answered_ratio(usual, whole, comparisons, typical)
    usual_ms, whole_ms = (with_interval(step, "ms") for step in (with_overlap, without))
    gain = "" if faster is None else f"overlap makes DDP {with_interval(faster, TIMES)} as fast: "
    bars = (
        Bar(f"no overlap, {case_label(whole, workload.device)}", _parts(whole, without)),
        Bar(f"overlap, {case_label(usual, workload.device)}", _parts(usual, with_overlap)),
    )
    return Bars(
        key=f"{key}-overlap",
        title="A step with and without overlap",
        caption=f"On {plural(usual['num_devices'], workload.device)} {gain}{usual_ms} per step with default "
        f"buckets, {whole_ms} with one.",
        how_to_read="One bucket holds every gradient, so its all-reduce starts after the last of them and "
        "nothing overlaps. Speeds are compared round by round in the timed pass; the parts are medians of "
        "the anatomy pass.",
        beside="On 32 GPUs overlap speeds ResNet-50 up by 38.0% with NCCL and by 26.8% with Gloo.",
        bars=bars,
    )


def allreduce_curve(measured: pd.DataFrame, device: str, *, key: str) -> Chart | None:
    """Show time and bus bandwidth of one all-reduce over message sizes; None where that was not measured."""
    groups = measured[measured["time_ms"] > 0].groupby(["num_devices", "backend"], dropna=False)
    every_kind = [records(rows.sort_values("bytes")) for _, rows in groups]
    kinds = [
        (finite(rows[0]["num_devices"]) or 0.0, text(rows[0]["backend"]), rows)
        for rows in every_kind[-len(_CURVE_STYLES) :]
    ]
    if not kinds:
        return None
    times, rates = [], []
    for style, (n, backend, rows) in zip(_CURVE_STYLES, kinds, strict=False):
        label = ", ".join(part for part in (plural(n, device), backend) if part)
        times.append(Series(label, style, tuple(_time_point(row) for row in rows)))
        rates.append(Series(label, style, tuple(p for row in rows if (p := _rate_point(row)) is not None)))
    sizes = sorted({finite(row["bytes"]) or 0.0 for _, _, rows in kinds for row in rows})
    every = -(-len(sizes) // 5)
    n, backend, rows = kinds[-1]
    least, most = (ranged(rows[end], "time_ms", "ms") for end in (0, -1))
    panels = [Panel("", tuple(times), "time of one all-reduce (ms)")]
    if all(series.points for series in rates):
        panels.append(Panel("", tuple(rates), "bus bandwidth (GB/s)"))
    return Chart(
        key=f"{key}-allreduce",
        title="All-reduce against message size",
        x_label="message size",
        y_label="time and bus bandwidth",
        ticks=tuple(Tick(size, size_label(size) if i % every == 0 else "") for i, size in enumerate(sizes)),
        panels=tuple(panels),
        caption=f"{plural(n, device)}, {backend}: {size_label(sizes[0])} take "
        f"{least}, {size_label(sizes[-1])} {most}"
        f"{_best_rate(rates[-1])}.",
        how_to_read="Where the time is level, a smaller message takes no less time, so small buckets waste "
        "it. Where the bandwidth is level, the link is full. Both axes are logarithmic. "
        "Bars are 95% intervals over repetitions.",
        beside="The same curve for NCCL and Gloo led to DDP's buckets, because small messages are costly; no "
        "number of it is quoted here.",
        log_x=True,
        log_y=True,
    )


def devices(workload: WorkloadCases, *, key: str) -> Chart | None:
    """Show step time against devices; None where DDP ran at one count only."""
    series = []
    for mode, label in (("single", "single"), ("ddp", "DDP")):
        rows = [
            (row, finite(row["num_devices"]), step_time(row))
            for row in records(by_mode(workload.cases, mode))
        ]
        points = tuple(marked(n, step, row) for row, n, step in rows if n is not None and step is not None)
        if points:
            series.append(Series(label, mode, points))
    counts = sorted({p.x for s in series for p in s.points})
    if not series or series[-1].style != "ddp" or len(counts) < 2:
        return None
    last = series[-1].points[-1]
    ideal = "level" if workload.scaling == "weak" else "halved with every doubling"
    return Chart(
        key=f"{key}-latency",
        title="Step time against devices",
        x_label=workload.devices_label,
        y_label="step time (ms)",
        ticks=tuple(Tick(n, f"{n:.0f}") for n in counts),
        panels=(Panel("", tuple(series)),),
        caption=f"From {_said(series[0].points[0], workload)} to {_said(last, workload)}.",
        how_to_read=f"Lower is better; {ideal} is ideal under {workload.scaling} scaling. {BARS}"
        f"{hollow_note(series)}",
        beside="Near-linear scaling to 256 GPUs is reported, when DDP is configured well.",
        log_x=max(counts) > 4,
    )


def accumulation(workload: WorkloadCases, *, key: str) -> Chart | None:
    """Show time per micro-batch against steps per synchronisation; None unless several were measured."""
    rows = records(at_headline(workload.cases, free="accumulate").sort_values("accumulate"))
    steps = [(row, finite(row["accumulate"]), step_time(row)) for row in rows]
    points = tuple(marked(k, step.scaled(1 / k), row) for row, k, step in steps if k and step is not None)
    if len({p.x for p in points}) < 2:
        return None
    series = [Series("DDP", "ddp", points)]
    compute = next((estimate(row, "no_sync_step_ms") for row, k, _ in steps if k == 1), None)
    if compute is not None:
        floor = tuple(Point(p.x, compute.estimate) for p in points)
        series.append(Series("no communication", "ideal", floor))
    first, last = (with_interval(p.interval, "ms") for p in (points[0], points[-1]))
    return Chart(
        key=f"{key}-accumulate",
        title="Synchronising less often",
        x_label="micro-batches per synchronisation",
        y_label="time per micro-batch (ms)",
        ticks=tuple(Tick(p.x, f"{p.x:.0f}") for p in points),
        panels=(Panel("", tuple(series)),),
        caption=f"On {plural(rows[0]['num_devices'], workload.device)} a micro-batch takes {first} with "
        f"{points[0].x:.0f} per synchronisation, {last} with {points[-1].x:.0f}.",
        how_to_read="Lower is better. The step's time over its micro-batches; at the dotted line "
        f"communication would cost nothing. {BARS}",
        beside="Synchronising every 1, 2, 4 and 8 steps was measured too; no number of it is quoted here.",
        from_zero=False,
        log_x=True,
    )


def size_label(num_bytes: float | None) -> str:
    """Return `64 KiB`, `1 MiB`."""
    if num_bytes is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{short(num_bytes, 3)} {unit}"
        num_bytes /= 1024
    return f"{short(num_bytes, 3)} GiB"


def _parts(row: Row, step: Interval) -> tuple[Part, ...]:
    return parts(row) or (Part("rest", step.estimate),)


def _time_point(row: Row) -> Point:
    time = estimate(row, "time_ms") or Interval(0.0, math.nan, math.nan)
    return Point.at(finite(row["bytes"]) or 0.0, time)


def _rate_point(row: Row) -> Point | None:
    rate, time = finite(row["busbw_gb_per_s"]), estimate(row, "time_ms")
    if rate is None or time is None or rate <= 0:
        return None
    low, high = (rate * time.estimate / end for end in (time.high, time.low))
    return Point.at(finite(row["bytes"]) or 0.0, Interval(rate, low, high))


def _best_rate(series: Series) -> str:
    if not series.points:
        return ""
    best = max(series.points, key=lambda p: p.y)
    return f"; bus bandwidth is highest at {size_label(best.x)}, {with_interval(best.interval, 'GB/s')}"


def _said(point: Point, workload: WorkloadCases) -> str:
    return f"{with_interval(point.interval, 'ms')} on {on_devices(point, workload.device)}"
