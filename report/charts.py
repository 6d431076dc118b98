"""What each figure draws and says, from rows of cases.csv. Pure: figures.py does the drawing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from report.model import Figure, Panel, Point, Series, Tick
from report.numbers import finite, interval, plural, quantity
from report.select import by_mode, cap_label, mode_label, records, settings_label, text, truth, usual_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from report.select import Row, Workload

_LOG_FROM = 16
_SHARED = " Hollow marks: more devices than the machine has, so they share cores or GPUs."
_BARS = "Bars are 95% intervals over rounds."


def figures(workload: Workload, *, key: str, heading: str = "") -> tuple[Figure, ...]:
    """Every figure the workload has data for; `heading` names the workload where a page has several."""
    made = (throughput(workload, key=key), efficiency(workload, key=key), bucket_caps(workload, key=key))
    return tuple(_headed(figure, heading) for figure in made if figure is not None)


def throughput(workload: Workload, *, key: str) -> Figure | None:
    """Throughput against devices, with the ideal line from “single”; None without a multi-device case."""
    series = _by_devices(workload, "images_per_s", 1.0)
    if all(s.style == "single" for s in series):
        return None
    single = next((s.points[0].y for s in series if s.style == "single"), None)
    counts = _counts(series)
    if single is not None:
        ideal = tuple(Point(float(n), single * n) for n in sorted({1, *counts}))
        series = (*series, Series("ideal", "ideal", ideal))
    return Figure(
        key=f"{key}-throughput",
        title="Throughput against devices",
        x_label=f"devices ({workload.device}s), {workload.scaling} scaling",
        y_label="throughput (images/s)",
        ticks=_device_ticks(counts),
        panels=(Panel("", series),),
        caption=_throughput_caption(series, workload.device, single),
        how_to_read="Higher is better. On the dotted line every device adds as much as one alone gives. "
        f"{_BARS}{_hollow_note(series)}",
        log_x=max(counts) > _LOG_FROM,
        log_y=max(counts) > _LOG_FROM,
    )


def efficiency(workload: Workload, *, key: str) -> Figure | None:
    """Efficiency in percent against devices, 100 being ideal; None without a multi-device case."""
    series = tuple(s for s in _by_devices(workload, "efficiency", 100.0) if s.style != "single")
    if not series:
        return None
    counts = _counts(series)
    ideal = Series("ideal", "ideal", tuple(Point(float(n), 100.0) for n in sorted({1, *counts})))
    return Figure(
        key=f"{key}-efficiency",
        title="Scaling efficiency",
        x_label=f"devices ({workload.device}s)",
        y_label=f"efficiency, {workload.scaling} scaling (%)",
        ticks=_device_ticks(counts),
        panels=(Panel("", (*series, ideal)),),
        caption=_efficiency_caption(series, workload.device),
        how_to_read="Efficiency is throughput over that of “single”, divided by the number of devices; "
        f"100% is ideal, and what is missing was lost on the way. {_BARS}{_hollow_note(series)}",
        log_x=max(counts) > _LOG_FROM,
    )


def bucket_caps(workload: Workload, *, key: str) -> Figure | None:
    """Step time against bucket cap, a panel per device count; None where no count has two caps."""
    ddp = usual_settings(workload.cases[workload.cases["mode"] == "ddp"], every_cap=True)
    caps = sorted({text(cap) for cap in ddp["bucket_cap_mb"]} - {""}, key=_cap_order)
    panels, said = [], []
    for num_devices in sorted(set(ddp["num_devices"].dropna())):
        rows = ddp[ddp["num_devices"] == num_devices]
        points = {}
        for row in records(rows.drop_duplicates("bucket_cap_mb")):
            cap = text(row["bucket_cap_mb"])
            if cap and (point := _step_point(row, caps.index(cap))) is not None:
                points[cap] = point
        if len(points) < 2:
            continue
        ordered = tuple(points[cap] for cap in caps if cap in points)
        devices = _devices(ordered[0], workload.device, num_devices)
        panels.append(Panel(devices, (Series("DDP", "ddp", ordered, joined=False),)))
        said.append(f"{devices}: {_cap_finding(points)}")
    if not panels:
        return None
    hollow = _hollow_note(s for panel in panels for s in panel.series)
    return Figure(
        key=f"{key}-buckets",
        title="Step time against bucket cap",
        x_label="bucket cap (MiB)",
        y_label="step time (ms)",
        ticks=tuple(Tick(float(i), _short(cap)) for i, cap in enumerate(caps)),
        panels=tuple(panels),
        caption="; ".join(said) + ".",
        how_to_read="Lower is better. The number beside a mark counts the buckets that its cap makes. Step "
        f"time is global batch / throughput. {_BARS} Each panel has its own scale, which does not start at "
        f"zero.{hollow}",
        from_zero=False,
    )


def _by_devices(workload: Workload, column: str, factor: float) -> tuple[Series, ...]:
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
    x, y = finite(row["num_devices"]), finite(row[column])
    if x is None or y is None:
        return None
    low, high = finite(row[f"{column}_low"]), finite(row[f"{column}_high"])
    known = low is not None and high is not None
    return Point(
        x=x,
        y=y * factor,
        low=low * factor if low is not None and known else None,
        high=high * factor if high is not None and known else None,
        hollow=truth(row["oversubscribed"]),
    )


def _step_point(row: Row, x: int) -> Point | None:
    rate, batch = _point(row, "images_per_s", 1.0), finite(row["global_batch"])
    if rate is None or batch is None or min(rate.y, rate.low or rate.y) <= 0:
        return None
    step_ms = [None if r is None else 1000 * batch / r for r in (rate.y, rate.high, rate.low)]
    buckets = finite(row["num_buckets"])
    return Point(
        x=float(x),
        y=step_ms[0] or 0.0,
        low=step_ms[1],
        high=step_ms[2],
        hollow=rate.hollow,
        note="" if buckets is None else f"{buckets:.0f}",
    )


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


def _device_ticks(counts: list[float]) -> tuple[Tick, ...]:
    return tuple(Tick(n, f"{n:.0f}") for n in sorted({1.0, *counts}))


def _hollow_note(series: Iterable[Series]) -> str:
    return _SHARED if any(p.hollow for s in series for p in s.points) else ""


def _cap_order(cap: str) -> tuple[int, float, str]:
    value = finite(cap)
    return (0, 0.0, "") if cap == "default" else (1, value, cap) if value is not None else (2, 0.0, cap)


def _short(label: str) -> str:
    return label if len(label) <= 10 else f"{label[:9]}…"


def _headed(figure: Figure, heading: str) -> Figure:
    return replace(figure, title=f"{figure.title}: {heading}") if heading else figure
