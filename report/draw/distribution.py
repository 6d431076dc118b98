"""Draws distributions: a box with whiskers per rank, its label above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator

from report.draw.palette import GRID, INK, PAPER, SERIES, printable

if TYPE_CHECKING:
    from report.drawings import Spread, Spreads

_ROW_PT = 44
_AROUND_PT = 40
_HALF = 0.19


def draw_spread(figure: Spreads, *, width_pt: float) -> Canvas:
    """The boxes as a canvas `width_pt` points wide."""
    height_pt = _AROUND_PT + _ROW_PT * len(figure.rows)
    canvas = Canvas(figsize=(width_pt / 72, height_pt / 72), layout="constrained")
    axes = canvas.subplots()
    low = min(row.low_ms for row in figure.rows)
    high = max(row.longest_ms for row in figure.rows)
    pad = 0.05 * (high - low) or 0.05 * high
    axes.set_xlim(low - pad, high + pad)
    axes.set_ylim(len(figure.rows) - 0.5, -0.75)
    for place, row in enumerate(figure.rows):
        _draw_row(axes, row, place, left=low - pad)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.set_xlabel("step time (ms)")
    return canvas


def _draw_row(axes: Any, row: Spread, place: int, *, left: float) -> None:
    colour = SERIES[row.style]["color"]
    above = {"xytext": (0, 3), "textcoords": "offset points", "va": "bottom", "ha": "left"}
    axes.annotate(printable(row.label), (left, place - _HALF), fontsize=11, annotation_clip=False, **above)
    axes.plot(
        [row.low_ms, row.high_ms], [place, place], color=colour, linewidth=1.3, marker="|", markersize=8
    )
    width = row.three_quarters_ms - row.quarter_ms
    box = {"facecolor": PAPER, "edgecolor": colour, "linewidth": 1.5, "zorder": 3}
    axes.barh(place, width, left=row.quarter_ms, height=2 * _HALF, **box)
    axes.plot([row.median_ms] * 2, [place - _HALF, place + _HALF], color=INK, linewidth=2.2, zorder=4)
    dot = {"marker": "o", "markersize": 4, "color": colour, "linestyle": "", "zorder": 4}
    axes.plot([row.longest_ms], [place], **dot)
