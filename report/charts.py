"""What each figure draws and says, from rows of cases.csv. Pure: figures.py does the drawing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from report.model import Chart, Panel, Point, Series, Tick
from report.numbers import finite, interval, plural, quantity
from report.select import (
    by_mode,
    cap_label,
    estimate,
    mode_label,
    records,
    settings_label,
    step_time,
    text,
    truth,
    usual_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from report.numbers import Estimate
    from report.select import Row, Workload

_LOG_FROM = 16
_MOST_CAPS = 12
_SHARED = " Hollow marks: more devices than the machine has, so they share cores or GPUs."
_BARS = "Bars are 95% intervals over rounds."


def throughput(workload: Workload, *, key: str) -> Chart | None:
    """Throughput against devices, with the ideal line from “single”; None without a multi-device case."""
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
        title="Throughput against devices",
        x_label=f"devices ({workload.device}s), {workload.scaling} scaling",
        y_label="throughput (images/s)",
        ticks=device_ticks(counts),
        panels=(Panel("", series),),
        caption=_throughput_caption(series, workload.device, single),
        how_to_read="Higher is better. On the dotted line every device adds as much as one alone gives. "
        f"{_BARS}{hollow_note(series)}",
        log_x=max(counts) > _LOG_FROM,
        log_y=max(counts) > _LOG_FROM,
    )


def efficiency(workload: Workload, *, key: str) -> Chart | None:
    """Efficiency in percent against devices, 100 being ideal; None without a multi-device case."""
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
        ticks=device_ticks(counts),
        panels=(Panel("", (*series, ideal)),),
        caption=_efficiency_caption(series, workload.device),
        how_to_read="Efficiency is throughput over that of “single”, divided by the number of devices; "
        f"100% is ideal, and what is missing was lost on the way. {_BARS}{hollow_note(series)}",
        log_x=max(counts) > _LOG_FROM,
    )


def bucket_caps(workload: Workload, *, key: str) -> Chart | None:
    """Step time against bucket cap, a panel per device count; None where no count has two caps."""
    ddp = usual_settings(workload.cases[workload.cases["mode"] == "ddp"], free="bucket_cap_mb")
    caps = sorted({text(cap) for cap in ddp["bucket_cap_mb"]} - {""}, key=_cap_order)
    by_count: dict[float, dict[str, Point]] = {}
    for row in records(ddp.dropna(subset="num_devices").drop_duplicates(["num_devices", "bucket_cap_mb"])):
        cap, point = text(row["bucket_cap_mb"]), _step_point(row)
        if cap and point is not None:
            by_count.setdefault(row["num_devices"], {})[cap] = point
    drawn = _drawn(caps, by_count.values())
    panels, said = [], []
    for num_devices, points in sorted(by_count.items()):
        if len(points) < 2:
            continue
        ordered = tuple(replace(points[cap], x=float(i)) for i, cap in enumerate(drawn) if cap in points)
        devices = _devices(ordered[0], workload.device, num_devices)
        panels.append(Panel(devices, (Series("DDP", "ddp", ordered, joined=False),)))
        said.append(f"{devices}: {_cap_finding(points)}")
    if not panels:
        return None
    hollow = hollow_note(s for panel in panels for s in panel.series)
    each = " Cap 0 gives every parameter a bucket of its own." if "0" in drawn else ""
    if len(drawn) < len(caps):
        each += f" Of {len(caps)} caps {len(drawn)} are drawn, the shortest step among them."
    return Chart(
        key=f"{key}-buckets",
        title="Step time against bucket cap",
        x_label="bucket cap (MiB)",
        y_label="step time (ms)",
        ticks=tuple(Tick(float(i), _short(cap)) for i, cap in enumerate(drawn)),
        panels=tuple(panels),
        caption="; ".join(said) + ".",
        how_to_read="Lower is better. The number beside a mark counts the buckets that its cap makes."
        f"{each} Step time is global batch / throughput. {_BARS} Each panel has its own scale, which does "
        f"not start at zero.{hollow}",
        from_zero=False,
    )


def by_devices(workload: Workload, column: str, factor: float) -> tuple[Series, ...]:
    """A series per mode of `column` times `factor` over device counts, DDP at its usual settings."""
    made = []
    for mode in ("single", "dp", "ddp"):
        rows = records(by_mode(workload.cases, mode))
        points = tuple(p for row in rows if (p := _point(row, column, factor)) is not None)
        if points:
            unusual = settings_label(rows[0], with_cap=text(rows[0]["bucket_cap_mb"]) != "default")
            label = mode_label(rows[0]) + (f", {unusual}" if unusual else "")
            made.append(Series(label, mode, points))
    return tuple(made)


def _point(row: Row, column: str, factor: float) -> Point | None:
    x, y = finite(row["num_devices"]), estimate(row, column)
    return None if x is None or y is None else marked(x, y.times(factor), row)


def _drawn(caps: list[str], by_count: Iterable[dict[str, Point]]) -> list[str]:
    """As many caps as can be told apart: the default, the best at each count, and others evenly."""
    if len(caps) <= _MOST_CAPS:
        return caps
    best = {min(points, key=lambda cap: points[cap].y) for points in by_count}
    evenly = {caps[round(i * (len(caps) - 1) / (_MOST_CAPS - 1))] for i in range(_MOST_CAPS)}
    return [cap for cap in caps if cap in best | evenly]


def _step_point(row: Row) -> Point | None:
    step, buckets = step_time(row), finite(row["num_buckets"])
    if step is None:
        return None
    return replace(marked(0.0, step, row), note="" if buckets is None else f"{buckets:.0f}")


def marked(x: float, y: Estimate, row: Row) -> Point:
    """A mark at `x`, hollow where the case's devices are shared."""
    return Point(x=x, y=y.value, low=y.low, high=y.high, hollow=truth(row["oversubscribed"]))


def hollow_note(series: Iterable[Series]) -> str:
    """What hollow marks mean, where there are any."""
    return _SHARED if any(p.hollow for s in series for p in s.points) else ""


def _headline(series: tuple[Series, ...]) -> list[tuple[Point, str]]:
    """The modes at the most devices that are not shared, best first; shared ones where all are."""
    marks = [(p, s.label) for s in series if s.style in {"dp", "ddp"} for p in s.points]
    at = max((p for p, _ in marks), key=lambda p: (p.x > 1, not p.hollow, p.x))
    return sorted(((p, label) for p, label in marks if p.x == at.x), key=lambda mark: -mark[0].y)


def _throughput_caption(series: tuple[Series, ...], device: str, single: float | None) -> str:
    (best, name), *others = _headline(series)
    ideal = f", {quantity(100 * best.y / (single * best.x), '%', 2)} of ideal" if single else ""
    rest = "".join(f"; {label} {_shown(p, 'images/s')}" for p, label in others)
    return f"At {_devices(best, device)}: {name} {_shown(best, 'images/s')}{ideal}{rest}."


def _efficiency_caption(series: tuple[Series, ...], device: str) -> str:
    marks = _headline(series)
    kept = ", ".join(f"{name} {_shown(p, '%')}" for p, name in marks)
    return f"Kept of ideal at {_devices(marks[0][0], device)}: {kept}."


def _cap_finding(points: dict[str, Point]) -> str:
    """The cap with the shortest step, beside the default where that is another."""
    best = min(points, key=lambda cap: points[cap].y)
    default = points.get("default")
    beside = "" if default is None or best == "default" else f", default {_shown(default, 'ms')}"
    return f"shortest at {cap_label(best)}, {_shown(points[best], 'ms')}{beside}"


def _shown(point: Point, unit: str) -> str:
    return interval(point.y, point.low, point.high, unit)


def _devices(point: Point, device: str, num_devices: float | None = None) -> str:
    shared = " (shared)" if point.hollow else ""
    return plural(point.x if num_devices is None else num_devices, device) + shared


def _counts(series: Iterable[Series]) -> list[float]:
    return sorted({p.x for s in series for p in s.points})


def device_ticks(counts: list[float]) -> tuple[Tick, ...]:
    """A tick at every device count, and at one."""
    return tuple(Tick(n, f"{n:.0f}") for n in sorted({1.0, *counts}))


def _cap_order(cap: str) -> tuple[int, float, str]:
    value = finite(cap)
    return (0, 0.0, "") if cap == "default" else (1, value, cap) if value is not None else (2, 0.0, cap)


def _short(label: str) -> str:
    return label if len(label) <= 10 else f"{label[:9]}…"
