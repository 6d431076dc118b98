"""The charts of a run's cases: the scaling curve, step time against bucket cap, and rounds over time.

Each function returns None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..bench.findings.answers import ddp_reference, headline
from ..bench.findings.numbers import per_second, plural, quantity, ratio, with_interval
from ..bench.findings.stability import pace
from ..bench.findings.wording import DEFAULT_CAP, cap_label, case_label, settings_label, short_mode
from ..bench.results.aggregate import images_per_s_by_round, units_per_step
from ..bench.results.case_result import CaseResult, finite
from ..bench.results.round_times import RoundTimes
from .cases import WorkloadCases, by_mode, headline_count, mark, step_time, usual_settings
from .chart import Line, Mark, bare, chart, ideal
from .drawing import Figure

BARS = "Bars are 95% intervals."
"""What the bars of every chart are."""

LOG_FROM = 16
"""Devices: more are drawn on a logarithmic axis, where counts double from tick to tick."""


def scaling(workload: WorkloadCases, *, key: str) -> Figure | None:
    """Draw throughput against devices, with the ideal line from `single`."""
    lines = by_devices(workload)
    counts = counts_of(lines)
    if len(counts) < 2:
        return None
    stands_in = any(case.is_stand_in for case in workload.cases)
    one = next((line.marks[0].value.estimate for line in lines if line.look == "single"), None)
    own = {mark.x for line in lines for mark in line.marks if not mark.hollow} or {*counts}
    dotted = [] if one is None else [ideal("ideal", {n: n * one for n in {1.0, *own}})]
    # What stands in for DP is drawn, and ranked against nothing.
    ranked = [line for line in lines if line.look == "ddp" or (line.look == "dp" and not stands_in)]
    (best, name), *others = _at_headline(ranked or lines)
    unit = per_second(workload.unit)
    rest = "".join(f"; {label} {with_interval(m.value, unit)}" for m, label in others)
    ddp = ddp_reference(headline(workload.cases))
    gain = (
        f"; DDP's speed-up {ratio(ddp.speedup)}" if ddp and ddp.speedup and ddp.num_devices == best.x else ""
    )
    return over_devices(
        key=f"{key}-throughput",
        title="Scaling curve",
        panels={f"throughput ({unit})": [*lines, *dotted]},
        x_label=workload.devices_label,
        caption=f"At {on_devices(best, workload.device)}: {name} {with_interval(best.value, unit)}"
        f"{rest}{gain}.",
        how_to_read="Higher is better. On the dotted line every device adds as much as one alone gives. "
        f"{BARS}",
        log_y=True,
    )


def over_devices(
    *,
    panels: Mapping[str, Sequence[Line]],
    ticks: Mapping[float, str] | None = None,
    log_y: bool = False,
    **words: Any,
) -> Figure:
    """Draw panels over device counts, many of them on logarithmic axes, of values only with `log_y`."""
    lines = [line for drawn in panels.values() for line in drawn if line.look != "ideal"]
    counts = counts_of(lines)
    is_long = counts[-1] > LOG_FROM
    ticks = ticks or device_ticks(counts, lines)
    return chart(panels=panels, ticks=ticks, log_x=is_long, log_y=log_y and is_long, **words)


def by_devices(workload: WorkloadCases) -> list[Line]:
    """Make a line per mode of throughput over device counts, DDP at its usual settings."""
    made, unit = [], per_second(workload.unit)
    for mode in ("single", "dp", "ddp"):
        cases = [case for case in by_mode(workload.cases, mode) if case.images_per_s]
        marks = (mark(case.num_devices, case.images_per_s, case, unit) for case in cases if case.images_per_s)
        if cases:
            made.append(Line(_line_name(cases[0]), mode, tuple(marks)))
    return made


def _line_name(case: CaseResult) -> str:
    """Name the line of a mode, with what of its settings is not usual."""
    unusual = settings_label(case, with_cap=case.setting("bucket_cap_mb") != "default")
    return ", ".join(filter(None, (short_mode(case), unusual)))


def counts_of(lines: Iterable[Line]) -> list[float]:
    """Return every device count that is drawn."""
    return sorted({m.x for line in lines for m in line.marks})


def device_ticks(counts: Iterable[float], lines: Iterable[Line] = ()) -> dict[float, str]:
    """Place a tick at every device count, and at one; `lines` tell which counts share devices."""
    shared = {m.x for line in lines for m in line.marks if m.hollow}
    return {n: f"{n:.0f}\nshared" if n in shared else f"{n:.0f}" for n in sorted({1.0, *counts})}


def evenly(how_many: int, most: int) -> list[int]:
    """Return the places of at most `most` of so many, the first and the last among them."""
    if how_many <= most:
        return [*range(how_many)]
    return [round(i * (how_many - 1) / (most - 1)) for i in range(most)]


def on_devices(at: Mark, device: str) -> str:
    """Return `2 GPUs`, and whether they are shared."""
    return plural(at.x, device) + (" (shared)" if at.hollow else "")


def _at_headline(lines: Sequence[Line]) -> list[tuple[Mark, str]]:
    """Return the modes at the most devices that are not shared, best first; shared ones where all are."""
    marks = [(m, line.label) for line in lines if line.look in {"dp", "ddp"} for m in line.marks]
    at = max((m for m, _ in marks), key=lambda m: (m.x > 1, not m.hollow, m.x)).x
    return sorted(((m, label) for m, label in marks if m.x == at), key=lambda pair: -pair[0].value.estimate)


ByCap = dict[str, Mark]
_BESIDE = "Beside a mark: how many buckets its cap makes"
_MOST_CAPS = 12
_LONGEST_TICK = 10


def bucket_caps(workload: WorkloadCases, *, key: str) -> Figure | None:
    """Draw step time against bucket cap, a panel per device count; None where no count has two caps."""
    by_count = _step_by_cap(workload)
    caps = sorted({cap for marks in by_count.values() for cap in marks}, key=_order)
    best = {min(marks, key=lambda cap: marks[cap].value.estimate) for marks in by_count.values()}
    chosen = best | {caps[i] for i in evenly(len(caps), _MOST_CAPS)}
    drawn = [cap for cap in caps if cap in chosen]
    panels, said = {}, []
    for num_devices, marks in sorted(by_count.items()):
        if len(marks) > 1:
            devices = on_devices(next(iter(marks.values()))._replace(x=num_devices), workload.device)
            placed = tuple(marks[cap]._replace(x=float(i)) for i, cap in enumerate(drawn) if cap in marks)
            panels[f"{devices}: step time (ms)"] = [Line("DDP", "ddp", placed, joined=False)]
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
    ticks = (
        label if len(label) <= _LONGEST_TICK else f"{label[: _LONGEST_TICK - 1]}…" for label in equal.values()
    )
    return chart(
        key=f"{key}-buckets",
        title="Step time against bucket cap",
        panels=panels,
        x_label="bucket cap (MiB)",
        ticks={float(i): label for i, label in enumerate(ticks)},
        caption=". ".join(["; ".join(said), _BESIDE, *([DEFAULT_CAP] if "default" in drawn else [])]) + ".",
        how_to_read="Lower is better; the verdict says whether a difference is beyond the noise. "
        f"{''.join(notes)}Step time is global batch / throughput. {BARS} Each panel has its own scale.",
        from_zero=False,
    )


def _step_by_cap(workload: WorkloadCases) -> dict[float, ByCap]:
    """Return DDP's step at its usual settings by device count and cap; marks have no place yet."""
    by_count: dict[float, ByCap] = {}
    for case in usual_settings((c for c in workload.cases if c.mode == "ddp"), free="bucket_cap_mb"):
        marks, step = by_count.setdefault(case.num_devices, {}), step_time(case)
        if step is not None:
            note = "" if case.num_buckets is None else f"{case.num_buckets:.0f}"
            marks.setdefault(case.setting("bucket_cap_mb"), mark(0.0, step, case, "ms", note=note))
    return by_count


def _order(cap: str) -> tuple[int, float, str]:
    """The default first, then numbers by size, then lists."""
    value = finite(cap)
    return (0, 0.0, "") if cap == "default" else (2, 0.0, cap) if value is None else (1, value, cap)


def _best_cap(marks: ByCap) -> str:
    """Name the cap with the shortest step, and the default where that is another."""
    best = min(marks, key=lambda cap: marks[cap].value.estimate)
    default = None if best == "default" else marks.get("default")
    beside = f", default {with_interval(default.value, 'ms')}" if default else ""
    return f"shortest step at {cap_label(best)}, {with_interval(marks[best].value, 'ms')}{beside}"


_FEWEST_ROUNDS = 3
_MOST_TICKS = 9


def drift(workload: WorkloadCases, times: RoundTimes, *, key: str) -> Figure | None:
    """Draw throughput of each round in percent of the case's median; None before three rounds."""
    found = images_per_s_by_round(times, units_per_step(workload.cases))
    several = {case_id: by_round for case_id, by_round in found.items() if len(by_round) > 1}
    every = sorted({r for by_round in several.values() for r in by_round})
    if len(every) < _FEWEST_ROUNDS:
        return None
    overall = pace(several)
    at = headline_count(workload.cases)
    lines = []
    for mode in ("single", "dp", "ddp"):
        for case in by_mode(workload.cases, mode):
            own = several.get(case.case_id)
            if own is not None and case.num_devices == (1 if mode == "single" else at):
                label = case_label(case, with_cap=False)
                lines.append(Line(label, mode, _percent(pace({label: own})), joined=False))
    lines.append(Line(f"median of {plural(len(several), 'case')}", "other", _percent(overall)))
    low, high = (
        f"{quantity(100 * overall[r], '%')} (round {r})"
        for r in (min(overall, key=overall.__getitem__), max(overall, key=overall.__getitem__))
    )
    return chart(
        key=f"{key}-rounds",
        title="Rounds over time",
        panels={"throughput (% of the case's median)": lines},
        x_label="round",
        ticks={float(every[i]): f"{every[i]}" for i in evenly(len(every), _MOST_TICKS)},
        caption=f"Over {plural(len(every), 'round')} the median case ran between {low} and {high} of its own "
        "median.",
        how_to_read="A level line is good. A slope shows a machine that warms up or throttles; a dip of "
        "every mode at once shows that something else ran. Cases take turns within a round, and ratios are "
        "formed inside a round, so such drift cancels in speed-up, efficiency and comparisons. A difference "
        "between modes does not cancel. A mark is one round, so it has no interval.",
        from_zero=False,
    )


def _percent(by_round: Mapping[int, float]) -> tuple[Mark, ...]:
    return tuple(Mark(float(r), bare(100 * by_round[r])) for r in sorted(by_round))
