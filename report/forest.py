"""Ratios of cases with the band of what is equal: every case against DDP's default, or against a baseline."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..bench.findings.answers import headline
from ..bench.findings.numbers import plural, ratio
from ..bench.findings.wording import case_label, settings_label, short_mode
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import Comparison, band, default_of, over_default
from ..bench.stats.interval import Interval
from .cases import WorkloadCases
from .drawing import GRID, INK, LOOKS, MUTED, Figure, mark_look
from .svg import printable, tag

_MOST_ROWS = 24
_NAME_WIDTH = 26
"""Characters of a line of a name that leave room for the marks and the number beside them."""

_LEAST_REACH = math.log(1.25)
"""Half the axis at least, so that a band of a few percent does not fill it."""


class Ratio(NamedTuple):
    """A case's ratio: `name` stands beside it, `case` is its whole name, `written` the number."""

    name: str
    case: str
    interval: Interval
    written: str
    look: str
    hollow: bool = False


def against_default(workload: WorkloadCases, comparisons: Sequence[Comparison], *, key: str) -> Figure | None:
    """Draw every case of the headline count over DDP's default there, fastest first, and what is equal."""
    cases = headline(workload.cases)
    default = default_of(cases)
    rows = {case.case_id: case for case in cases}
    found = over_default(comparisons, cases)
    ratios = [_ratio(rows[i], one) for i, one in found.items() if i in rows and i != default]
    if default is None or not ratios:
        return None
    ratios.sort(key=lambda one: -one.interval.estimate)
    margin = comparisons[0].margin
    count, first = plural(rows[default].num_devices, workload.device), ratios[0]
    compared = f"{first.name} is {first.written} as fast as DDP's default."
    return forest(
        ratios,
        margin,
        key=f"{key}-forest",
        title="Against DDP's default",
        caption=f"On {count} "
        + (compared if math.isfinite(first.interval.low) else "there are too few rounds to compare."),
        how_to_read="Each mark is a case's throughput over that of DDP with its defaults on as many devices; "
        "right of the line it is faster. Bars are 95% intervals that hold for all rows at once: where a bar "
        "leaves the line to one side the case is faster or slower, where it lies inside the shaded band it "
        "differs by less than the margin, and otherwise the rounds do not tell. The axis is logarithmic. "
        f"DDP's default here: {settings_label(rows[default]) or 'defaults'}; margin {100 * margin:g}%.",
        x_label=f"throughput over DDP's default on {count}; shaded: within {100 * margin:g}%",
    )


def forest(
    ratios: Sequence[Ratio],
    margin: float,
    *,
    x_label: str,
    ticks: Callable[[float], str] = "{:.4g}".format,
    how_to_read: str,
    **words: Any,
) -> Figure:
    """Draw ratios, a row each, over a band of `margin` around 1; `words` are those of a figure."""
    shown = ratios[:_MOST_ROWS]
    of_many = f" Of {len(ratios)} cases the first {len(shown)} are drawn." if shown != ratios else ""
    names = [_lines(printable(one.name)) for one in shown]
    ends = [
        abs(math.log(end))
        for one in shown
        for end in (one.interval.low, one.interval.estimate, one.interval.high)
        if math.isfinite(end) and end > 0
    ]
    reach = math.exp(1.08 * max([_LEAST_REACH, *ends]))

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.set_xscale("log")
        axes.set_xlim(1 / reach, reach)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.axvspan(*band(margin), facecolor=GRID, edgecolor="none", zorder=0.5)
        axes.axvline(1.0, color=INK, linewidth=1.2, zorder=1)
        axes.set_yticks(range(len(shown)), ["\n".join(lines) for lines in names])
        for place, (one, label) in enumerate(zip(shown, axes.get_yticklabels(), strict=True)):
            label.set_gid(tag(one.case))
            _draw_ratio(axes, one, place)
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x", color=GRID)
        axes.xaxis.set_major_locator(FixedLocator(ratio_ticks(1 / reach, reach)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: ticks(x)))
        axes.set_xlabel(x_label)

    rows_pt = 34 if any(len(lines) > 1 for lines in names) else 24
    height_pt = 62 + rows_pt * len(shown)
    return Figure(how_to_read=how_to_read + of_many, height_pt=height_pt, draw=draw, **words)


def _lines(name: str) -> list[str]:
    """Break a name into at most two lines, after commas where it can."""
    parts = name.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
    return textwrap.wrap(parts, _NAME_WIDTH, max_lines=2, placeholder=" …")


def _ratio(case: CaseResult, interval: Interval) -> Ratio:
    name = ", ".join(filter(None, (short_mode(case), settings_label(case))))
    look = case.mode if case.mode in ("dp", "ddp") else "other"
    return Ratio(name, case_label(case), interval, ratio(interval), look, case.oversubscribed)


def _draw_ratio(axes: Any, one: Ratio, place: int) -> None:
    named = tag(f"{one.case} · {one.written}")
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(
        one.written, (1, place), xytext=(6, 0), va="center", color=MUTED, gid=named, annotation_clip=False,
        **beside,
    )  # fmt: skip
    if math.isfinite(one.interval.low):
        ends, colour = [one.interval.low, one.interval.high], LOOKS[one.look]["color"]
        axes.plot(ends, [place] * 2, color=colour, linewidth=1.6, marker="|", markersize=8, gid=named)
    look = mark_look(one.look, hollow=one.hollow)
    axes.plot([one.interval.estimate], [place], label=one.name, gid=named, **look)


def ratio_ticks(low: float, high: float) -> list[float]:
    """Choose ticks of a ratio between `low` and `high`: powers of two, or even steps around 1."""
    if high >= 1.9:
        every = max(1, math.ceil(2 * math.log2(high) / 5))
        most = int(math.log2(high) + 1e-9) // every
        return [2.0 ** (every * power) for power in range(-most, most + 1)]
    step = next(s for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5) if (high - low) / s <= 6)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * i, 6) for i in range(first, last + 1)]
