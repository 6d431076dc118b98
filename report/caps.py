"""Step time against bucket cap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..bench.findings.numbers import with_interval
from ..bench.findings.wording import DEFAULT_CAP, cap_label
from ..bench.results.case_result import finite
from .cases import WorkloadCases, mark, step_time, usual_settings
from .chart import Line, Mark, chart
from .drawing import Figure
from .figures import BARS, evenly, on_devices

ByCap = dict[str, Mark]
_BESIDE = "Beside a mark: how many buckets its cap makes"
_MOST_CAPS = 12
_LONGEST_TICK = 10


def bucket_caps(workload: WorkloadCases, *, key: str) -> Figure | None:
    """Draw step time against bucket cap, a panel per device count; None where no count has two caps."""
    by_count = step_by_cap(workload)
    caps = in_order(by_count.values())
    best = {min(marks, key=lambda cap: marks[cap].value.estimate) for marks in by_count.values()}
    chosen = best | {caps[i] for i in evenly(len(caps), _MOST_CAPS)}
    drawn = [cap for cap in caps if cap in chosen]
    panels, said = {}, []
    for num_devices, marks in sorted(by_count.items()):
        if len(marks) > 1:
            devices = on_devices(next(iter(marks.values()))._replace(x=num_devices), workload.device)
            title = f"{devices}: step time (ms)"
            panels[title] = [Line("DDP", "ddp", placed(marks, drawn), joined=False)]
            said.append(f"{devices}: {_best_cap(marks)}")
    if not panels:
        return None
    equal = {cap: "=".join((cap, *workload.equal_layouts.get(cap, ()))) for cap in drawn}
    merged = ", ".join(name for cap, name in equal.items() if name != cap)
    notes = (
        "Cap 0 gives every parameter a bucket of its own. " if "0" in drawn else "",
        f"Caps that make the same buckets were measured once and share a mark: {merged}. " if merged else "",
        f"Of {len(caps)} caps {len(drawn)} are drawn, the shortest step among them. "
        if len(drawn) < len(caps)
        else "",
    )
    return chart(
        key=f"{key}-buckets",
        title="Step time against bucket cap",
        panels=panels,
        x_label="bucket cap (MiB)",
        ticks=cap_ticks(equal.values()),
        caption=". ".join(["; ".join(said), _BESIDE, *([DEFAULT_CAP] if "default" in drawn else [])]) + ".",
        how_to_read="Lower is better; the verdict says whether a difference is beyond the noise. "
        f"{''.join(notes)}Step time is global batch / "
        f"throughput. {BARS} Each panel has its own scale.",
        from_zero=False,
    )


def step_by_cap(workload: WorkloadCases) -> dict[float, ByCap]:
    """Return DDP's step at its usual settings by device count and cap; marks have no place yet."""
    by_count: dict[float, ByCap] = {}
    for case in usual_settings((c for c in workload.cases if c.mode == "ddp"), free="bucket_cap_mb"):
        marks, step = by_count.setdefault(case.num_devices, {}), step_time(case)
        if step is not None:
            note = "" if case.num_buckets is None else f"{case.num_buckets:.0f}"
            marks.setdefault(case.setting("bucket_cap_mb"), mark(0.0, step, case, "ms", note=note))
    return by_count


def in_order(groups: Iterable[ByCap]) -> list[str]:
    """Return every cap once: the default, then numbers by size, then lists."""

    def order(cap: str) -> tuple[int, float, str]:
        value = finite(cap)
        return (0, 0.0, "") if cap == "default" else (2, 0.0, cap) if value is None else (1, value, cap)

    return sorted({cap for marks in groups for cap in marks}, key=order)


def placed(marks: ByCap, drawn: Sequence[str]) -> tuple[Mark, ...]:
    """Return the marks of the drawn caps, each at the place of its cap."""
    return tuple(marks[cap]._replace(x=float(i)) for i, cap in enumerate(drawn) if cap in marks)


def cap_ticks(labels: Iterable[str]) -> dict[float, str]:
    """Name the places of caps."""
    return {
        float(i): label if len(label) <= _LONGEST_TICK else f"{label[: _LONGEST_TICK - 1]}…"
        for i, label in enumerate(labels)
    }


def _best_cap(marks: ByCap) -> str:
    """Name the cap with the shortest step, and the default where that is another."""
    best = min(marks, key=lambda cap: marks[cap].value.estimate)
    default = None if best == "default" else marks.get("default")
    beside = f", default {with_interval(default.value, 'ms')}" if default else ""
    return f"shortest step at {cap_label(best)}, {with_interval(marks[best].value, 'ms')}{beside}"
