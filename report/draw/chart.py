"""Draws charts: marks with their intervals over one or several panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from ddp_bench.report.draw.palette import MUTED, PAPER, SERIES, canvas_of, printable, tipped
from ddp_bench.report.drawings import Chart, Panel, Point, Series

_CHARACTERS_OF_THREE = 42
_AREA_ALPHA = 0.18
_LEAST_GAP = 0.065
"""Between the names of two lines, of the height of the axes: a line of text."""


def draw_chart(figure: Chart) -> Canvas:
    """Draw the chart."""
    height_pt = 285 if len(figure.panels) == 1 else 50 + 125 * len(figure.panels)
    canvas = canvas_of(height_pt)
    rows = canvas.subplots(len(figure.panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, figure.panels, strict=True):
        _draw_panel(axes, panel, figure)
    rows[-1].set_xlabel(printable(figure.x_label))
    if figure.direct and len(figure.panels) == 1:
        _name_lines(rows[0], figure.panels[0].series)
        return canvas
    handles = _legend([s for panel in figure.panels for s in panel.series])
    if len(handles) > 1:
        longest = sorted((len(str(handle.get_label())) for handle in handles), reverse=True)[:3]
        columns = 3 if sum(longest) <= _CHARACTERS_OF_THREE and len(handles) != 4 else 2
        canvas.legend(
            handles=handles, loc="outside upper left", ncols=columns, handlelength=2.4, columnspacing=1.4
        )
    return canvas


def _draw_panel(axes: Any, panel: Panel, figure: Chart) -> None:
    quantity = panel.y_label or figure.y_label
    title = f"{panel.title}: {quantity}" if panel.title else quantity
    axes.set_title(printable(title), loc="left", pad=8)
    _scale_x(axes, figure)
    _scale_y(axes, panel, figure)
    measured = [s for s in panel.series if s.style not in {"ideal", "break"} and not s.area]
    for series in panel.series:
        # Marks of different modes at one device count stand side by side, not on top of each other.
        place = measured.index(series) - (len(measured) - 1) / 2 if series in measured else 0.0
        _draw_series(axes, series, dodge_pt=5 * place)


def _draw_series(axes: Any, series: Series, *, dodge_pt: float) -> None:
    style = SERIES[series.style]
    shift = ScaledTranslation(dodge_pt / 72, 0, axes.figure.dpi_scale_trans)
    where = axes.transData + shift
    if series.joined:
        line = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.5}
        axes.plot([p.x for p in series.points], [p.y for p in series.points], transform=where, **line)
    if series.area:
        known = [(p.x, p.low, p.high) for p in series.points if p.low is not None and p.high is not None]
        axes.fill_between(*zip(*known, strict=True), color=style["color"], alpha=_AREA_ALPHA, linewidth=0)
    for point in series.points:
        gid = {"gid": tipped(point.tip)} if point.tip else {}
        if not series.area and point.low is not None and point.high is not None:
            bar = {"color": style["color"], "transform": where, "markersize": 7, "linewidth": 1.3}
            axes.plot([point.x] * 2, [point.low, point.high], marker="_", **bar, **gid)
        axes.plot([point.x], [point.y], transform=where, **_mark(style, hollow=point.hollow), **gid)
        if point.note:
            beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(printable(point.note), (point.x, point.y), color=MUTED, fontsize=11, **beside)


def _name_lines(axes: Any, drawn: Sequence[Series]) -> None:
    """Write the name of each line beside its end, or above the end of one that ends early."""
    last = max(p.x for s in drawn for p in s.points)
    ends = [(s, s.points[-1]) for s in drawn]
    to_axes = axes.transData + axes.transAxes.inverted()
    at_edge = [(float(to_axes.transform((p.x, p.y))[1]), s) for s, p in ends if p.x == last]
    at_edge.sort(key=lambda pair: pair[0])
    for (_, series), height in zip(at_edge, _spread([height for height, _ in at_edge]), strict=True):
        axes.text(
            1.02, height, printable(series.label), transform=axes.transAxes, va="center", ha="left",
            fontsize=11, color=SERIES[series.style]["color"],
        )  # fmt: skip
    for series, point in ends:
        if point.x != last:
            axes.annotate(
                printable(series.label), (point.x, point.high or point.y), xytext=(0, 8),
                textcoords="offset points", ha="center", va="bottom", fontsize=11,
                color=SERIES[series.style]["color"],
            )  # fmt: skip


def _spread(heights: Sequence[float]) -> list[float]:
    """Push ascending heights apart by the height of a line of text, around their places."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + _LEAST_GAP) if placed else height)
    over = sum(after - before for after, before in zip(placed, heights, strict=True)) / max(len(placed), 1)
    return [height - over for height in placed]


def _mark(style: dict[str, Any], *, hollow: bool) -> dict[str, Any]:
    return {
        "linestyle": "",
        "marker": style["marker"],
        "markersize": style["markersize"],
        "markeredgecolor": style["color"],
        "markeredgewidth": 1.5,
        "markerfacecolor": PAPER if hollow else style["color"],
        "zorder": 3,
    }


def _scale_x(axes: Any, figure: Chart) -> None:
    places = [tick.x for tick in figure.ticks]
    low, high = min(places), max(places)
    if figure.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.35, high * 1.35)
    else:
        pad = 0.1 * (high - low) or 0.5
        axes.set_xlim(low - pad, high + pad)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    labels = {tick.x: "\n".join(map(printable, tick.label.split("\n"))) for tick in figure.ticks}
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.get(x, "")))


def _scale_y(axes: Any, panel: Panel, figure: Chart) -> None:
    low, high = figure.y_limits(panel)
    if figure.log_y:
        axes.set_yscale("log")
    axes.set_ylim(low, high)
    if figure.log_y:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 85 * low else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(
            MaxNLocator(nbins=5 if figure.from_zero else 4, steps=[1, 2, 2.5, 5, 10])
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def _legend(series: Sequence[Series]) -> list[Line2D]:
    kinds = {s.label: s for s in series}
    handles = [_handle(s.label, s.style, joined=s.joined) for s in kinds.values()]
    if any(p.hollow for p in _points(series)):
        handles.append(
            Line2D([], [], label="hollow: shared", **_mark(SERIES["ddp"] | {"color": MUTED}, hollow=True))
        )
    return handles


def _handle(label: str, style: str, *, joined: bool) -> Line2D:
    look = SERIES[style]
    line = {"linestyle": look["linestyle"] if joined else "", "color": look["color"], "linewidth": 1.5}
    return Line2D(
        [], [], label=printable(label), marker=look["marker"], markersize=look["markersize"], **line
    )


def _points(series: Sequence[Series]) -> list[Point]:
    return [point for s in series for point in s.points]
