"""Draws stacked bars: one case below the other, its label above its bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from report.draw.palette import GRID, INK, PAPER, PARTS, Fill, printable
from report.numbers import quantity

if TYPE_CHECKING:
    from report.drawings import Bar, Bars

_ROW_PT = 42
_BAR_PT = 17
_LEGEND_ROW_PT = 15
_AROUND_PT = 60
_CHARACTER_PT = 5.7


def draw_bars(figure: Bars, *, width_pt: float) -> Canvas:
    """The bars as a canvas `width_pt` points wide."""
    labels = {part.label for bar in figure.bars for part in bar.parts}
    shown = [label for label in PARTS if label in labels]
    legend_pt = _LEGEND_ROW_PT * -(-len(shown) // 3)
    height_pt = _AROUND_PT + legend_pt + _ROW_PT * len(figure.bars)
    canvas = Canvas(figsize=(width_pt / 72, height_pt / 72), layout="constrained")
    axes = canvas.subplots()
    longest = max(sum(part.ms for part in bar.parts) for bar in figure.bars)
    for row, bar in enumerate(figure.bars):
        _draw_bar(axes, bar, row, per_pt=longest / (0.9 * width_pt))
    axes.set_xlim(0, longest)
    axes.set_ylim(len(figure.bars) - 0.3, -0.65)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.set_xlabel("time per step (ms)")
    handles = [Patch(label=printable(label), **_look(PARTS[label])) for label in shown]
    canvas.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=1.6, columnspacing=1.2)
    return canvas


def _draw_bar(axes: Any, bar: Bar, row: int, *, per_pt: float) -> None:
    above = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom", "ha": "left"}
    half = _BAR_PT / _ROW_PT / 2
    axes.annotate(printable(bar.label), (0, row - half), fontsize=11, annotation_clip=False, **above)
    left = 0.0
    for part in bar.parts:
        place = {"y": row, "width": part.ms, "left": left, "height": 2 * half}
        axes.barh(**place, **_look(PARTS[part.label]))
        axes.barh(**place, color="none", edgecolor=INK, linewidth=0.7)
        number = quantity(part.ms, "ms")
        if part.ms > per_pt * (_CHARACTER_PT * len(number) + 6):
            box = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"}
            middle = {"ha": "center", "va": "center_baseline", "fontsize": 10}
            axes.text(left + part.ms / 2, row, number, bbox=box, **middle)
        left += part.ms


def _look(fill: Fill) -> dict[str, Any]:
    # A hatch takes the colour of the edge; the outline is drawn by itself.
    return {"facecolor": fill.colour, "hatch": fill.hatch, "edgecolor": PAPER, "linewidth": 0}
