"""Charts of lines over places: speed-up over devices, and rounds over time.

A chart of a run's cases is None where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..bench.common.numbers import TIMES, plural, quantity, ratio
from ..bench.findings.stability import pace
from ..bench.findings.wording import case_label, settings_label, short_mode
from ..bench.results.aggregate import images_per_s_by_round, units_per_step
from ..bench.results.case_result import CaseResult
from ..bench.results.round_times import RoundTimes
from ..bench.stats.interval import Interval
from .cases import WorkloadCases, by_mode, headline_count
from .drawing import LOOKS, Figure, legend, mark_look, printable, tag

_LOG_FROM = 16
"""Devices: more are drawn on a logarithmic axis, where counts double from tick to tick."""

_FEWEST_ROUNDS = 3

_SCALING = {
    "weak": "Weak scaling: every device has a batch of its own",
    "strong": "Strong scaling: the devices share one batch",
}


class Mark(NamedTuple):
    """A value at a place; `tip` is shown to who points at it."""

    x: float
    value: Interval
    tip: str = ""


class Line(NamedTuple):
    """Marks of one kind in one of `LOOKS`; `band` draws their intervals as an area along the line."""

    label: str
    look: Mapping[str, Any]
    marks: tuple[Mark, ...]
    band: bool = False


def bare(places: Mapping[float, float]) -> tuple[Mark, ...]:
    """Make marks of numbers whose intervals are not known."""
    return tuple(Mark(x, Interval(y, math.nan, math.nan)) for x, y in sorted(places.items()))


def mark(case: CaseResult, value: Interval, written: str) -> Mark:
    """Make a mark at the case's number of devices, over which case, value and rounds are shown."""
    rounds = plural(case.num_rounds, "round") if case.num_rounds else ""
    return Mark(case.num_devices, value, " · ".join(filter(None, (case_label(case), written, rounds))))


def scaling(workload: WorkloadCases, *, key: str) -> Figure | None:
    """Draw the speed-up of DP, and of DDP at its usual settings, over device counts."""
    ranked = [case for case in workload.cases if case.is_ranked]
    lines = []
    for mode in ("single", "dp", "ddp"):
        cases = by_mode(ranked, mode)
        marks = tuple(mark(case, case.speedup, ratio(case.speedup)) for case in cases if case.speedup)
        if marks:
            lines.append(Line(_line_name(cases[0]), LOOKS[mode], marks))
    counts = _counts(lines)
    if len(counts) < 2:
        return None
    most, how = counts[-1], workload.cases[0].scaling
    ends = [(line.label, found.value) for line in lines for found in line.marks if found.x == most]
    ends.sort(key=lambda end: -end[1].estimate)
    said = "; ".join(f"{label} {ratio(value)}" for label, value in ends)
    not_drawn = "DP's stand-in is not drawn: its speed says nothing of DP."
    stands_in = any(case.is_stand_in for case in workload.cases)
    return over_devices(
        lines,
        ideal={float(n): float(n) for n in counts},
        log="xy",
        x_label=f"devices ({workload.device}s), {how} scaling",
        y_label=f"speed-up ({TIMES})",
        key=f"{key}-speedup",
        title="Speed-up over one device",
        caption=f"On {plural(most, workload.device)}: {said}; ideal {most:g}{TIMES}.",
        note=f"{_SCALING.get(how, '')}. {not_drawn if stands_in else ''}",
        terms=("Speed-up",),
    )


def _line_name(case: CaseResult) -> str:
    """Name the line of a mode, with what of its settings is not usual."""
    unusual = settings_label(case, with_cap=case.setting("bucket_cap_mb") != "default")
    return ", ".join(filter(None, (short_mode(case), unusual)))


def _counts(lines: Iterable[Line]) -> list[float]:
    return sorted({found.x for line in lines for found in line.marks})


def over_devices(lines: Sequence[Line], *, ideal: Mapping[float, float], log: str, **words: Any) -> Figure:
    """Draw lines over device counts and an ideal one; of many counts the axes in `log` are logarithmic."""
    drawn = [*lines, Line("ideal", LOOKS["ideal"], bare(ideal))]
    counts = _counts(drawn)
    return chart(drawn, ticks=counts, log=log if counts[-1] > _LOG_FROM else "", **words)


def drift(workload: WorkloadCases, times: RoundTimes, *, key: str) -> Figure | None:
    """Draw throughput of each round in percent of the case's median; None before three rounds."""
    found = images_per_s_by_round(times, units_per_step(workload.cases))
    several = {case_id: by_round for case_id, by_round in found.items() if len(by_round) > 1}
    every = {r for by_round in several.values() for r in by_round}
    if len(every) < _FEWEST_ROUNDS:
        return None
    overall = pace(several)
    at = headline_count(workload.cases)
    paces = {f"median of {plural(len(several), 'case')}": (LOOKS["other"], overall)}
    for mode in ("single", "dp", "ddp"):
        for case in by_mode(workload.cases, mode):
            if case.case_id in several and case.num_devices == (1 if mode == "single" else at):
                label = case_label(case, with_cap=False)
                paces[label] = LOOKS[mode], pace({label: several[case.case_id]})
    low, high = (
        f"{quantity(100 * overall[r], '%')} (round {r})"
        for r in (min(overall, key=overall.__getitem__), max(overall, key=overall.__getitem__))
    )
    return chart(
        [
            Line(label, look | {"marker": ""}, bare({float(r): 100 * share for r, share in by_round.items()}))
            for label, (look, by_round) in paces.items()
        ],
        x_label="round",
        y_label="throughput (% of the case's median)",
        key=f"{key}-rounds",
        title="Rounds over time",
        caption=f"Over {plural(len(every), 'round')} the median case ran between {low} and {high} of its own "
        "median.",
        note="A level line is good. A slope is a machine that warms up or throttles, a dip of all modes "
        "another program. Ratios are formed within rounds, so what all modes share cancels in them.",
    )


def chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    ticks: Sequence[float] = (),
    log: str = "",
    **words: Any,
) -> Figure:
    """Draw lines, at `ticks` if any; axes in `log` are logarithmic, all others begin at zero.

    `words` are those of a figure.
    """

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.set_title(printable(y_label), pad=8)
        axes.margins(x=0.1)
        if "x" in log:
            axes.set_xscale("log", base=2)
        if "y" in log:
            axes.set_yscale("log", base=2)
        _draw_lines(axes, lines)
        axes.set_xlabel(printable(x_label))
        if ticks:
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
        if "y" not in log:
            axes.set_ylim(bottom=0)
            axes.locator_params(axis="y", nbins=5)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        handles = [Line2D([], [], label=printable(line.label), linewidth=1.5, **line.look) for line in lines]
        legend(canvas, handles, handlelength=2.4)

    return Figure(height_pt=285, draw=draw, **words)


def _draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw lines, and marks with their intervals."""
    for line in lines:
        look, series, colour = line.look, {"gid": tag(series=line.label)}, line.look["color"]
        at, values = [found.x for found in line.marks], [found.value.estimate for found in line.marks]
        how = {"linestyle": look["linestyle"], "linewidth": 1.5, "color": colour, "label": line.label}
        axes.plot(at, values, **how, **series)
        if line.band:
            areas = [(found.x, found.value.low, found.value.high) for found in line.marks]
            axes.fill_between(*zip(*areas, strict=True), color=colour, alpha=0.18, linewidth=0, **series)
        for x, value, tip in line.marks if look["marker"] else ():
            named = {"gid": tag(tip, line.label)}
            if not line.band and value.low < value.high:
                bar = {"marker": "_", "markersize": 7, "linewidth": 1.3, "color": colour}
                axes.plot([x, x], [value.low, value.high], **bar, **named)
            axes.plot([x], [value.estimate], label=line.label, **mark_look(look), **named)
