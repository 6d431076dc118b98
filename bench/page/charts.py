"""Charts that know no run: lines over places, and ratios with the band of what is equal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .drawing import (
    GRID,
    INK,
    LOOKS,
    MUTED,
    draw_legend,
    drop_unprintable,
    make_mark_look,
    make_tag,
    read_across,
)
from .page import Figure

_MIN_LOG_DEVICES = 16
"""Devices: more are drawn on a logarithmic axis, where counts double from tick to tick."""

_MAX_ROWS = 24
_NAME_WIDTH = 26
"""Characters of a line of a name that leave room for the marks and the number beside them."""

_MIN_REACH = 0.2
"""The axis has at least so much to both sides of 1, so that a band of a few percent does not fill it."""

_MAX_REACH = 0.6
"""The axis has so much at most for an interval that is wider than its estimate, which tells nothing."""


class Mark(NamedTuple):
    """A value at a place, as number and text, with its interval if known; `tip` is shown to who points."""

    x: float
    estimate: float
    low: float = math.nan
    high: float = math.nan
    written: str = ""
    tip: str = ""


class Line(NamedTuple):
    """Marks of one kind in one of `LOOKS`; `band` draws their intervals as an area along the line."""

    label: str
    look: Mapping[str, Any]
    marks: tuple[Mark, ...]
    band: bool = False


def make_bare_marks(places: Mapping[float, float]) -> tuple[Mark, ...]:
    """Make marks of numbers whose intervals are not known."""
    return tuple(Mark(x, y) for x, y in sorted(places.items()))


def list_places(lines: Iterable[Line]) -> list[float]:
    """Return the places of all marks, in order."""
    return sorted({found.x for line in lines for found in line.marks})


def draw_over_devices(
    lines: Sequence[Line], *, ideal: Mapping[float, float], log: str, **words: Any
) -> Figure:
    """Draw lines over device counts and an ideal one; of many counts the axes in `log` are logarithmic."""
    drawn = [*lines, Line("ideal", LOOKS["ideal"], make_bare_marks(ideal))]
    ticks = list_places(drawn)
    return draw_chart(drawn, ticks=ticks, log=log if ticks[-1] > _MIN_LOG_DEVICES else "", **words)


def draw_chart(
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

    def draw(canvas: Any) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator

        axes = canvas.subplots()
        axes.set_title(drop_unprintable(y_label), pad=8)
        axes.margins(x=0.1)
        if "x" in log:
            axes.set_xscale("log", base=2)
        if "y" in log:
            axes.set_yscale("log", base=2)
        _draw_lines(axes, lines)
        axes.set_xlabel(drop_unprintable(x_label))
        if ticks:
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
        if "y" not in log:
            axes.set_ylim(bottom=0)
            axes.locator_params(axis="y", nbins=5)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        handles = [
            Line2D([], [], label=drop_unprintable(line.label), linewidth=1.5, **line.look) for line in lines
        ]
        draw_legend(canvas, handles, handlelength=2.4)

    return Figure(height_pt=285, draw=draw, **words)


def _draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw lines, and marks with their intervals."""
    for line in lines:
        look, series, colour = line.look, {"gid": make_tag(series=line.label)}, line.look["color"]
        at, values = [found.x for found in line.marks], [found.estimate for found in line.marks]
        how = {"linestyle": look["linestyle"], "linewidth": 1.5, "color": colour, "label": line.label}
        axes.plot(at, values, **how, **series)
        if line.band:
            areas = [(found.x, found.low, found.high) for found in line.marks]
            axes.fill_between(*zip(*areas, strict=True), color=colour, alpha=0.18, linewidth=0, **series)
        for x, y, low, high, _, tip in line.marks if look["marker"] else ():
            named = {"gid": make_tag(tip, line.label)}
            if not line.band and low < high:
                bar = {"marker": "_", "markersize": 7, "linewidth": 1.3, "color": colour}
                axes.plot([x, x], [low, high], **bar, **named)
            axes.plot([x], [y], label=line.label, **make_mark_look(look), **named)


class Ratio(NamedTuple):
    """A case's ratio: `name` stands beside it, `case` is its whole name, `written` the number."""

    name: str
    case: str
    estimate: float
    low: float
    high: float
    written: str
    look: str
    hollow: bool = False


def draw_forest(
    ratios: Sequence[Ratio],
    band: tuple[float, float],
    *,
    x_label: str,
    ticks: Callable[[float], str] = "{:g}".format,
    note: str,
    **words: Any,
) -> Figure:
    """Draw ratios, a row each, over the `band` of what is equal; `words` are those of a figure."""
    shown = ratios[:_MAX_ROWS]
    of_many = f" Of {len(ratios)} cases the first {len(shown)} are drawn." if shown != ratios else ""
    names = [_break_name(drop_unprintable(one.name)) for one in shown]
    ends = [
        min(max(end, 1 - _MAX_REACH), 1 + _MAX_REACH) if one.high - one.low > one.estimate else end
        for one in shown
        for end in (one.estimate, one.low, one.high)
        if math.isfinite(end)
    ]
    low, high = min([1 - _MIN_REACH, *ends]), max([1 + _MIN_REACH, *ends])

    def draw(canvas: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = canvas.subplots()
        axes.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.axvspan(*band, facecolor=GRID, edgecolor="none", zorder=0.5)
        axes.axvline(1.0, color=INK, linewidth=1.2, zorder=1)
        axes.set_yticks(range(len(shown)), ["\n".join(lines) for lines in names])
        for place, (one, label) in enumerate(zip(shown, axes.get_yticklabels(), strict=True)):
            label.set_gid(make_tag(one.case))
            _draw_ratio(axes, one, place, low, high)
        read_across(axes, x_label)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(lambda x, _: ticks(x))

    rows_pt = 34 if any(len(lines) > 1 for lines in names) else 24
    height_pt = 62 + 14 * x_label.count("\n") + rows_pt * len(shown)
    return Figure(note=f"{note}{of_many}", height_pt=height_pt, draw=draw, **words)


def _break_name(name: str) -> list[str]:
    """Break a name into at most two lines, after commas where it can."""
    parts = name.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
    return textwrap.wrap(parts, _NAME_WIDTH, max_lines=2, placeholder=" …")


def _draw_ratio(axes: Any, one: Ratio, place: int, least: float, most: float) -> None:
    """Draw a row; an end beyond the axis is an arrow."""
    named, look = {"gid": make_tag(f"{one.case} · {one.written}")}, LOOKS[one.look]
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    beside |= {"xytext": (6, 0), "va": "center", "annotation_clip": False}
    axes.annotate(one.written, (1, place), color=MUTED, **named, **beside)
    if math.isfinite(one.low):
        ends = [max(one.low, least), min(one.high, most)]
        how = {"color": look["color"], "markersize": 8}
        axes.plot(ends, [place] * 2, linewidth=1.6, marker="|", **how, **named)
        for end, own, arrow in zip(ends, (one.low, one.high), "<>", strict=True):
            if end != own:
                axes.plot([end], [place], marker=arrow, **how)
    if least <= one.estimate <= most:
        axes.plot([one.estimate], [place], label=one.name, **named, **make_mark_look(look, hollow=one.hollow))
