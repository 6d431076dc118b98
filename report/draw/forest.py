"""Draws a forest plot: ratios to one reference, one below the other on a logarithmic axis."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ddp_bench.bench.findings.numbers import between, times
from ddp_bench.report.draw.palette import BAND, GRID, INK, MUTED, PAPER, SERIES, canvas_of, printable, tipped
from ddp_bench.report.drawings import Forest, Ratio

_ROW_PT = 34
_AROUND_PT = 62
_MOST_TICKS = 7
_LEAST_SPAN = math.log(1.25)
"""Half the axis at least, so that a band of a few percent does not fill it."""

_STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5)


def draw_forest(figure: Forest) -> Canvas:
    """Draw the rows, fastest first."""
    canvas = canvas_of(_AROUND_PT + _ROW_PT * len(figure.rows))
    axes = canvas.subplots()
    low, high = _limits(figure)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(figure.rows) - 0.4, -0.75)
    axes.axvspan(1 / (1 + figure.margin), 1 + figure.margin, **BAND, zorder=0.5)
    axes.axvline(1.0, color=INK, linewidth=1.2, zorder=1)
    for place, row in enumerate(figure.rows):
        _draw_row(axes, row, place)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(FixedLocator(ratio_ticks(low, high)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.4g}"))
    axes.set_xlabel(printable(f"{figure.x_label}; shaded: within {100 * figure.margin:g}%"))
    return canvas


def _draw_row(axes: Any, row: Ratio, place: int) -> None:
    style, found = SERIES[row.style], row.interval
    written = times(found.estimate) + ("" if math.isnan(found.low) else f" {between(found)}")
    tip = tipped(f"{row.label} · {written}")
    at = {"textcoords": "offset points", "va": "bottom", "annotation_clip": False}
    above = place - 0.2
    axes.annotate(
        printable(row.label), (0, above), xycoords=("axes fraction", "data"), xytext=(0, 2), ha="left",
        fontsize=11, **at,
    )  # fmt: skip
    axes.annotate(
        written, (1, above), xycoords=("axes fraction", "data"), xytext=(0, 2), ha="right", fontsize=11,
        color=MUTED, **at,
    )  # fmt: skip
    if not math.isnan(found.low):
        bar = {"color": style["color"], "linewidth": 1.6, "marker": "|", "markersize": 8}
        axes.plot([found.low, found.high], [place, place], gid=tip, **bar)
    axes.plot(
        [found.estimate],
        [place],
        linestyle="",
        marker=style["marker"],
        markersize=style["markersize"] + 1,
        markeredgecolor=style["color"],
        markeredgewidth=1.5,
        markerfacecolor=PAPER if row.hollow else style["color"],
        gid=tip,
        zorder=3,
    )


def _limits(figure: Forest) -> tuple[float, float]:
    """Reach as far left as right of 1 where that wastes little, and past every interval."""
    ends = [
        abs(math.log(end))
        for row in figure.rows
        for end in (row.interval.low, row.interval.estimate, row.interval.high)
        if math.isfinite(end) and end > 0
    ]
    reach = 1.08 * max([_LEAST_SPAN, *ends])
    return math.exp(-reach), math.exp(reach)


def ratio_ticks(low: float, high: float) -> list[float]:
    """Choose ticks of a ratio between `low` and `high`: powers of two, or even steps around 1."""
    if high >= 1.9:
        every = max(1, math.ceil(2 * math.log2(high) / _MOST_TICKS))
        most = int(math.log2(high) + 1e-9) // every
        return [2.0 ** (every * power) for power in range(-most, most + 1)]
    step = next(s for s in _STEPS if (high - low) / s <= _MOST_TICKS)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * i, 6) for i in range(first, last + 1)]
