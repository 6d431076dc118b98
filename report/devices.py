"""Shows what changes with the number of devices: throughput, efficiency, DDP against DP, memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_bench.bench.findings.numbers import TIMES, finite, per_second, plural, quantity, rate, with_interval
from ddp_bench.bench.findings.wording import (
    Row,
    case_label,
    device_noun,
    estimate,
    settings_label,
    short_mode,
    text,
    truth,
    unit_of,
)
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.results.typical import Typical
from ddp_bench.bench.stats import Interval
from ddp_bench.report.drawings import Chart, Panel, Point, Series, Tick
from ddp_bench.report.select import WorkloadCases, answered_ratio, by_mode

_DIRECT_CHARACTERS = 12

LOG_FROM = 16
"""Devices: more are drawn on a logarithmic axis, where counts double from tick to tick."""

_HOLLOW = " Hollow marks: shared cores or GPUs."
_MEMORY_OF = {
    "dp": " DataParallel gathers outputs and gradients on device 0.",
    "ddp": " DDP adds its buckets on every device.",
}
BARS = "Bars are 95% intervals over rounds."
"""What the bars of every chart are."""


def throughput(workload: WorkloadCases, *, key: str) -> Chart | None:
    """Show throughput against devices, with the ideal line from “single”; None without several devices."""
    series = by_devices(workload, "images_per_s", 1.0)
    if all(s.style == "single" for s in series):
        return None
    single = next((s.points[0].y for s in series if s.style == "single"), None)
    counts = _counts(series)
    if single is not None:
        ideal = tuple(Point(float(n), single * n) for n in sorted({1, *counts}))
        series = (*series, Series("ideal", "ideal", ideal))
    return Chart(
        key=f"{key}-throughput",
        title="Scaling curve",
        x_label=workload.devices_label,
        y_label=f"throughput ({per_second(workload.unit)})",
        ticks=device_ticks(counts, series),
        panels=(Panel("", series),),
        direct=is_direct(series),
        caption=_throughput_caption(series, workload),
        how_to_read="Higher is better. On the dotted line every device adds as much as one alone gives. "
        f"{BARS}{hollow_note(series)}",
        log_x=max(counts) > LOG_FROM,
        log_y=max(counts) > LOG_FROM,
    )


def efficiency(workload: WorkloadCases, *, key: str) -> Chart | None:
    """Show efficiency in percent against devices, 100 being ideal; None without several devices."""
    series = tuple(s for s in by_devices(workload, "efficiency", 100.0) if s.style != "single")
    if not series:
        return None
    counts = _counts(series)
    ideal = Series("ideal", "ideal", tuple(Point(float(n), 100.0) for n in sorted({1, *counts})))
    return Chart(
        key=f"{key}-efficiency",
        title="Scaling efficiency",
        x_label=f"devices ({workload.device}s)",
        y_label=f"efficiency, {workload.scaling} scaling (%)",
        ticks=device_ticks(counts, series),
        panels=(Panel("", (*series, ideal)),),
        direct=is_direct(series),
        caption=_efficiency_caption(series, workload.device),
        how_to_read="Efficiency is throughput over that of “single”, divided by the number of devices; "
        f"100% is ideal. {BARS}{hollow_note(series)}",
        log_x=max(counts) > LOG_FROM,
    )


def by_devices(workload: WorkloadCases, column: str, factor: float) -> tuple[Series, ...]:
    """Make a series per mode of `column` times `factor` over device counts, DDP at its usual settings."""
    made = []
    for mode in ("single", "dp", "ddp"):
        rows = records(by_mode(workload.cases, mode))
        points = tuple(p for row in rows if (p := _point(row, column, factor)) is not None)
        if points:
            unusual = settings_label(rows[0], with_cap=text(rows[0]["bucket_cap_mb"]) != "default")
            label = short_mode(rows[0]) + (f", {unusual}" if unusual else "")
            made.append(Series(label, mode, points))
    return tuple(made)


def _point(row: Row, column: str, factor: float) -> Point | None:
    x, y = finite(row["num_devices"]), estimate(row, column)
    units = {"images_per_s": per_second(unit_of(row)), "efficiency": "%", "peak_mem_mib": "MiB"}
    return None if x is None or y is None else marked(x, y.scaled(factor), row, units.get(column, ""))


def marked(x: float, y: Interval, row: Row, unit: str = "") -> Point:
    """Make a mark at `x`, hollow where the case's devices are shared; its tip names the case."""
    return Point.at(x, y, hollow=truth(row["oversubscribed"]), tip=tip(row, y, unit))


def tip(row: Row, value: Interval, unit: str) -> str:
    """Say what is under the pointer: the case, its rounds, the value with its interval."""
    rounds = finite(row.get("num_rounds"))
    name = case_label(row, device_noun(text(row["device_type"])))
    parts = (name, with_interval(value, unit), plural(rounds, "round") if rounds else "")
    return " · ".join(part for part in parts if part)


def is_direct(series: Iterable[Series]) -> bool:
    """Tell whether the names are short enough to stand beside the lines."""
    return all(len(s.label) <= _DIRECT_CHARACTERS for s in series)


def hollow_note(series: Iterable[Series]) -> str:
    """Say what hollow marks mean, where there are any."""
    return _HOLLOW if any(p.hollow for s in series for p in s.points) else ""


def _headline(series: tuple[Series, ...]) -> list[tuple[Point, str]]:
    """Return the modes at the most devices that are not shared, best first; shared ones where all are."""
    marks = [(p, s.label) for s in series if s.style in {"dp", "ddp"} for p in s.points]
    at = max((p for p, _ in marks), key=lambda p: (p.x > 1, not p.hollow, p.x))
    return sorted(((p, label) for p, label in marks if p.x == at.x), key=lambda mark: -mark[0].y)


def _throughput_caption(series: tuple[Series, ...], workload: WorkloadCases) -> str:
    (best, name), *others = _headline(series)
    rest = "".join(f"; {label} {rate(p.interval, workload.unit)}" for p, label in others)
    return f"At {on_devices(best, workload.device)}: {name} {rate(best.interval, workload.unit)}{rest}."


def _efficiency_caption(series: tuple[Series, ...], device: str) -> str:
    marks = _headline(series)
    kept = ", ".join(f"{name} {with_interval(p.interval, '%')}" for p, name in marks)
    return f"Efficiency at {on_devices(marks[0][0], device)}: {kept}."


def on_devices(point: Point, device: str, num_devices: float | None = None) -> str:
    """Return `2 GPUs`, and whether they are shared."""
    shared = " (shared)" if point.hollow else ""
    return plural(point.x if num_devices is None else num_devices, device) + shared


def _counts(series: Iterable[Series]) -> list[float]:
    return sorted({p.x for s in series for p in s.points})


def device_ticks(counts: Iterable[float], series: Iterable[Series] = ()) -> tuple[Tick, ...]:
    """Place a tick at every device count, and at one; `series` tell which counts share devices."""
    shared = {p.x for s in series for p in s.points if p.hollow}
    return tuple(Tick(n, f"{n:.0f}\nshared" if n in shared else f"{n:.0f}") for n in sorted({1.0, *counts}))


def dp_against_ddp(
    workload: WorkloadCases, typical: Typical, comparisons: Sequence[Comparison], *, key: str
) -> Chart | None:
    """Show throughput of DDP over that of DataParallel; None where no device count has both."""
    dp = {finite(row["num_devices"]): row for row in records(by_mode(workload.cases, "dp"))}
    points, other_mode = [], "DP"
    for row in records(by_mode(workload.cases, "ddp")):
        n = finite(row["num_devices"])
        other = dp.get(n)
        ratio = None if other is None else answered_ratio(row, other, comparisons, typical)
        if n is not None and other is not None and ratio is not None:
            points.append(marked(n, ratio, row, TIMES))
            other_mode = short_mode(other)
    if not points:
        return None
    series = Series(f"DDP / {other_mode}", "ddp", tuple(points))
    counts = [p.x for p in points]
    equal = Series("equally fast", "ideal", tuple(Point(x, 1.0) for x in sorted({1.0, *counts})))
    said = [f"{with_interval(p.interval, TIMES)} on {on_devices(p, workload.device)}" for p in points]
    return Chart(
        key=f"{key}-ratio",
        title="DDP against DataParallel",
        x_label=workload.devices_label,
        y_label=f"throughput of DDP / {other_mode} ({TIMES})",
        ticks=device_ticks(counts, [series]),
        panels=(Panel("", (series, equal)),),
        direct=is_direct([series, equal]),
        caption=f"Throughput of DDP over {other_mode}: {'; '.join(said)}.",
        how_to_read="Above the dotted line DDP is faster, below it DataParallel. The ratio is formed inside "
        "each round, so drift of the machine cancels; bars are 95% intervals, those of the answers above: "
        "one that crosses the line leaves open which is faster."
        f"{hollow_note([series])}",
        from_zero=False,
        log_x=max(counts) > LOG_FROM,
    )


def memory(workload: WorkloadCases, *, key: str) -> Chart | None:
    """Show most memory in use on the fullest device; None where no case tells."""
    series = by_devices(workload, "peak_mem_mib", 1.0)
    counts = _counts(series)
    if not counts:
        return None
    most = counts[-1]
    said = [f"{s.label} {quantity(p.y, 'MiB')}" for s in series for p in s.points if p.x == most]
    return Chart(
        key=f"{key}-memory",
        title="Memory per device",
        x_label=workload.devices_label,
        y_label="peak memory of the fullest device (MiB)",
        ticks=device_ticks(counts, series),
        panels=(Panel("", series),),
        direct=is_direct(series),
        caption=f"On {plural(most, workload.device)}: {', '.join(said)}.",
        how_to_read="Lower is better. The most memory that a case's tensors take on the device that needs "
        f"most of it.{''.join(_MEMORY_OF.get(s.style, '') for s in series)} It is counted once, before the "
        f"rounds, so it has no interval.{hollow_note(series)}",
        log_x=max(counts) > LOG_FROM,
    )
