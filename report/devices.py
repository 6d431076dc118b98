"""What else changes with the number of devices: DDP against DataParallel, and memory. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from report.charts import by_devices, device_ticks, hollow_note, marked
from report.drawings import Chart, Panel, Point, Series
from report.numbers import TIMES, Estimate, finite, plural, quantity
from report.paired import throughput_ratio
from report.select import by_mode, mode_label, records

if TYPE_CHECKING:
    import pandas as pd

    from report.select import Workload

_LOG_FROM = 16


def dp_against_ddp(workload: Workload, blocks: pd.DataFrame, *, key: str) -> Chart | None:
    """Throughput of DDP over that of DataParallel; None where no device count has both."""
    dp = {finite(row["num_devices"]): row for row in records(by_mode(workload.cases, "dp"))}
    points, rival = [], "DP"
    for row in records(by_mode(workload.cases, "ddp")):
        n = finite(row["num_devices"])
        other = dp.get(n)
        ratio = None if other is None else throughput_ratio(row, other, blocks)
        if n is not None and other is not None and ratio is not None:
            points.append(marked(n, ratio, row))
            rival = mode_label(other)
    if not points:
        return None
    series = Series(f"DDP / {rival}", "ddp", tuple(points))
    counts = [p.x for p in points]
    equal = Series("equally fast", "ideal", tuple(Point(x, 1.0) for x in _reach(counts)))
    return Chart(
        key=f"{key}-ratio",
        title="DDP against DataParallel",
        x_label=f"devices ({workload.device}s), {workload.scaling} scaling",
        y_label=f"throughput of DDP / {rival} ({TIMES})",
        ticks=device_ticks(counts),
        panels=(Panel("", (series, equal)),),
        caption=f"Throughput of DDP over {rival}: {'; '.join(_shown(p, workload.device) for p in points)}.",
        how_to_read="Above the dotted line DDP is faster, below it DataParallel. The ratio is formed inside "
        "each round, so drift of the machine cancels; bars are its 95% intervals over rounds, and one that "
        "crosses the line leaves open which is faster. The vertical axis does not start at zero."
        f"{hollow_note([series])}",
        from_zero=False,
        log_x=max(counts) > _LOG_FROM,
    )


def memory(workload: Workload, *, key: str) -> Chart | None:
    """Most memory in use on the fullest device; None where it was not measured, as on CPU cores."""
    series = by_devices(workload, "peak_mem_mib", 1.0)
    counts = sorted({p.x for s in series for p in s.points})
    if not counts:
        return None
    most = counts[-1]
    said = [f"{s.label} {quantity(p.y, 'MiB')}" for s in series for p in s.points if p.x == most]
    return Chart(
        key=f"{key}-memory",
        title="Memory per device",
        x_label=f"devices ({workload.device}s), {workload.scaling} scaling",
        y_label="peak memory of the fullest device (MiB)",
        ticks=device_ticks(counts),
        panels=(Panel("", series),),
        caption=f"On {plural(most, workload.device)}: {', '.join(said)}.",
        how_to_read="Lower is better. The most memory that this case's tensors take on the device that needs "
        "most of it; DataParallel gathers outputs and gradients on device 0, DDP adds its buckets on every "
        f"device. It does not vary between rounds, so it has no interval.{hollow_note(series)}",
        log_x=max(counts) > _LOG_FROM,
    )


def _reach(counts: list[float]) -> list[float]:
    return sorted({1.0, *counts})


def _shown(point: Point, device: str) -> str:
    shared = " (shared)" if point.hollow else ""
    ratio = Estimate(point.y, point.low, point.high).shown(TIMES)
    return f"{ratio} on {plural(point.x, device)}{shared}"
