"""Shows step time against bucket cap, of one run or of several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddp_bench.bench.findings.numbers import finite, with_interval
from ddp_bench.bench.findings.wording import Row, cap_label, text
from ddp_bench.bench.results.schema import records
from ddp_bench.report.devices import BARS, hollow_note, marked, on_devices
from ddp_bench.report.drawings import Chart, Panel, Point, Series, Tick
from ddp_bench.report.select import WorkloadCases, step_time, usual_settings

ByCap = dict[str, Point]
_MOST_CAPS = 12
_LONGEST_TICK = 10


def bucket_caps(workload: WorkloadCases, *, key: str) -> Chart | None:
    """Make a panel per device count of step time against bucket cap; None where no count has two caps."""
    by_count = points(workload)
    caps = in_order(by_count.values())
    drawn = _drawn(caps, by_count.values())
    panels, said = [], []
    for num_devices, marks in sorted(by_count.items()):
        if len(marks) < 2:
            continue
        ordered = placed(marks, drawn)
        devices = on_devices(ordered[0], workload.device, num_devices)
        panels.append(Panel(devices, (Series("DDP", "ddp", ordered, joined=False),)))
        said.append(f"{devices}: {_finding(marks)}")
    if not panels:
        return None
    hollow = hollow_note(s for panel in panels for s in panel.series)
    each = " Cap 0 gives every parameter a bucket of its own." if "0" in drawn else ""
    each += _merged(workload, drawn)
    if len(drawn) < len(caps):
        each += f" Of {len(caps)} caps {len(drawn)} are drawn, the shortest step among them."
    return Chart(
        key=f"{key}-buckets",
        title="Step time against bucket cap",
        x_label="bucket cap (MiB)",
        y_label="step time (ms)",
        ticks=tuple(Tick(float(i), _short(_equal_caps(workload, cap))) for i, cap in enumerate(drawn)),
        panels=tuple(panels),
        caption="; ".join(said) + ".",
        how_to_read="Lower is better; the verdict says whether a difference is beyond the noise. The number "
        f"beside a mark counts the buckets that its cap makes.{each} Step time is global batch / throughput. "
        f"{BARS} Each panel has its own scale.{hollow}",
        from_zero=False,
    )


def points(workload: WorkloadCases) -> dict[float, ByCap]:
    """Return DDP's step at its usual settings by device count and cap; the x of a point is not yet known."""
    ddp = usual_settings(workload.cases[workload.cases["mode"] == "ddp"], free="bucket_cap_mb")
    by_count: dict[float, ByCap] = {}
    for row in records(ddp.dropna(subset="num_devices").drop_duplicates(["num_devices", "bucket_cap_mb"])):
        cap, point = text(row["bucket_cap_mb"]), _step_point(row)
        if cap and point is not None:
            by_count.setdefault(row["num_devices"], {})[cap] = point
    return by_count


def in_order(groups: Iterable[ByCap]) -> list[str]:
    """Return every cap once: the default, then numbers by size, then lists."""
    return sorted({cap for marks in groups for cap in marks}, key=_cap_order)


def placed(marks: ByCap, drawn: Sequence[str]) -> tuple[Point, ...]:
    """Return the marks of the drawn caps, each at the place of its cap."""
    return tuple(replace(marks[cap], x=float(i)) for i, cap in enumerate(drawn) if cap in marks)


def _drawn(caps: list[str], by_count: Iterable[ByCap]) -> list[str]:
    """Choose as many caps as can be told apart: the default, the best at each count, and others evenly."""
    if len(caps) <= _MOST_CAPS:
        return caps
    best = {min(marks, key=lambda cap: marks[cap].y) for marks in by_count}
    evenly = {caps[round(i * (len(caps) - 1) / (_MOST_CAPS - 1))] for i in range(_MOST_CAPS)}
    return [cap for cap in caps if cap in best | evenly]


def _step_point(row: Row) -> Point | None:
    step, buckets = step_time(row), finite(row["num_buckets"])
    if step is None:
        return None
    return replace(marked(0.0, step, row, "ms"), note="" if buckets is None else f"{buckets:.0f}")


def _finding(marks: ByCap) -> str:
    """Name the cap with the shortest step, and the default where that is another."""
    best = min(marks, key=lambda cap: marks[cap].y)
    default = marks.get("default")
    beside = (
        "" if default is None or best == "default" else f", default {with_interval(default.interval, 'ms')}"
    )
    return f"shortest step at {cap_label(best)}, {with_interval(marks[best].interval, 'ms')}{beside}"


def _equal_caps(workload: WorkloadCases, cap: str) -> str:
    return "=".join((cap, *workload.equal_layouts.get(cap, ())))


def _merged(workload: WorkloadCases, drawn: Sequence[str]) -> str:
    equal = [_equal_caps(workload, cap) for cap in drawn if cap in workload.equal_layouts]
    if not equal:
        return ""
    return f" Caps that make the same buckets were measured once and share a mark: {', '.join(equal)}."


def _cap_order(cap: str) -> tuple[int, float, str]:
    value = finite(cap)
    return (0, 0.0, "") if cap == "default" else (1, value, cap) if value is not None else (2, 0.0, cap)


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST_TICK else f"{label[: _LONGEST_TICK - 1]}…"
