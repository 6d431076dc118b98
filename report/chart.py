"""Draws marks with intervals over places: lines, panels, axes, a legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from ..bench.stats.interval import Interval
from .drawing import LOOKS, MUTED, Figure, legend, mark_look
from .svg import printable, tag

MOST_RUNS = 8
"""Lines of one kind that one drawing can tell apart by mark, line and colour."""

_CHARACTERS_OF_THREE = 42
"""Of three names that fit into one row of a legend."""


class Mark(NamedTuple):
    """A value at a place, hollow on shared devices; `tip` is shown to who points at it, `note` beside it."""

    x: float
    value: Interval
    hollow: bool = False
    tip: str = ""
    note: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether it is a value and nothing else."""
        return not (self.hollow or self.tip or self.note or math.isfinite(self.value.low))


class Line(NamedTuple):
    """Marks of one kind, in one of `LOOKS`; `band` draws their intervals as an area along the line."""

    label: str
    look: str
    marks: tuple[Mark, ...]
    joined: bool = True
    band: bool = False


def ideal(label: str, places: Mapping[float, float]) -> Line:
    """Make a dotted line to compare with."""
    return Line(label, "ideal", tuple(Mark(x, bare(y)) for x, y in sorted(places.items())))


def bare(value: float) -> Interval:
    """Take a number whose interval is not known."""
    return Interval(value, math.nan, math.nan)


def chart(  # noqa: PLR0913 - by name, as matplotlib's
    *,
    key: str,
    title: str,
    panels: Mapping[str, Sequence[Line]],
    x_label: str,
    ticks: Mapping[float, str],
    caption: str,
    how_to_read: str,
    from_zero: bool = True,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Draw lines over the places of `ticks`, in panels one below the other by the name of what they show."""
    ranges = [_limits(lines, from_zero=from_zero, log=log_y) for lines in panels.values()]
    marks = [mark for lines in panels.values() for line in lines for mark in line.marks]

    def draw(canvas: Canvas) -> None:
        rows = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, lines), limits in zip(rows, panels.items(), ranges, strict=True):
            axes.set_title(printable(name), pad=8)
            _place_axis(axes, ticks, log=log_x)
            _value_axis(axes, *limits, log=log_y, nbins=5 if from_zero else 4)
            _draw_lines(axes, lines)
        rows[-1].set_xlabel(printable(x_label))
        _legend(canvas, [line for lines in panels.values() for line in lines])

    return Figure(
        key=key,
        title=title,
        caption=caption,
        how_to_read=how_to_read
        + (" Hollow marks: shared cores or GPUs." if any(m.hollow for m in marks) else "")
        + ("" if log_y else _not_from_zero(ranges)),
        height_pt=285 if len(panels) == 1 else 50 + 125 * len(panels),
        draw=draw,
        axes=f"{next(iter(panels))} against {x_label}",
    )


def _limits(lines: Sequence[Line], *, from_zero: bool, log: bool) -> tuple[float, float]:
    """Find the ends of a vertical axis; never below zero where nothing drawn is."""
    values = [mark.value for line in lines for mark in line.marks]
    seen = [end for v in values for end in (v.estimate, v.low, v.high) if math.isfinite(end)]
    low, high = min(seen), max(seen)
    if log:
        return low / 1.3, high * 1.3
    if from_zero:
        return 0.0, 1.08 * high
    pad = 0.2 * (high - low) or 0.05 * high
    return (max(low - pad, 0.0) if low >= 0 else low - pad), high + pad


def _not_from_zero(ranges: Sequence[tuple[float, float]]) -> str:
    """Warn of vertical axes that leave out zero, as they are drawn."""
    without = [low > 0 or high < 0 for low, high in ranges]
    if not any(without):
        return ""
    axes = "The vertical axis does" if len(without) == 1 else "Vertical axes do"
    return f" {axes} not start at zero{'' if all(without) else ' in every panel'}."


def _draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw marks with their intervals; those of several lines at one place stand side by side."""
    beside = [line for line in lines if line.look != "ideal" and not line.band]
    for line in lines:
        look = LOOKS[line.look]
        dodge = beside.index(line) - (len(beside) - 1) / 2 if line in beside else 0.0
        where = axes.transData + ScaledTranslation(5 * dodge / 72, 0, axes.figure.dpi_scale_trans)
        stroke = {"color": look["color"], "transform": where}
        if line.joined:
            # Shared devices tell nothing of scaling: no line leads to them, unless there are no others.
            own = [mark for mark in line.marks if not mark.hollow] or line.marks
            at, values = [mark.x for mark in own], [mark.value.estimate for mark in own]
            drawn = {"linestyle": look["linestyle"], "linewidth": 1.5, "label": line.label}
            axes.plot(at, values, gid=tag(series=line.label), **drawn, **stroke)
        if line.band:
            areas = [(mark.x, mark.value.low, mark.value.high) for mark in line.marks]
            how = {"color": look["color"], "alpha": 0.18, "linewidth": 0, "gid": tag(series=line.label)}
            axes.fill_between(*zip(*areas, strict=True), **how)
        if not look["marker"]:
            continue
        # Those without words and interval, of which there may be hundreds, are drawn at once.
        plain = [mark for mark in line.marks if mark.is_plain]
        at, values = [mark.x for mark in plain], [mark.value.estimate for mark in plain]
        drawn = mark_look(line.look, hollow=False)
        axes.plot(at, values, label=line.label, transform=where, gid=tag(series=line.label), **drawn)
        for mark in (mark for mark in line.marks if not mark.is_plain):
            named = {"gid": tag(mark.tip, line.label)}
            if not line.band and math.isfinite(mark.value.low):
                bar = {"marker": "_", "markersize": 7, "linewidth": 1.3, **stroke, **named}
                axes.plot([mark.x] * 2, [mark.value.low, mark.value.high], **bar)
            drawn = mark_look(line.look, hollow=mark.hollow)
            axes.plot([mark.x], [mark.value.estimate], label=line.label, transform=where, **drawn, **named)
            if mark.note:
                beside_it = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
                where_it_is = (mark.x, mark.value.estimate)
                axes.annotate(printable(mark.note), where_it_is, color=MUTED, **named, **beside_it)


def _place_axis(axes: Any, ticks: Mapping[float, str], *, log: bool) -> None:
    low, high = min(ticks), max(ticks)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.35, high * 1.35)
    else:
        pad = 0.1 * (high - low) or 0.5
        axes.set_xlim(low - pad, high + pad)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    labels = {x: "\n".join(map(printable, label.split("\n"))) for x, label in ticks.items()}
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.get(x, "")))


def _value_axis(axes: Any, low: float, high: float, *, log: bool, nbins: int) -> None:
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 85 * low else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=nbins, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def _legend(canvas: Canvas, lines: Sequence[Line]) -> None:
    handles = []
    for line in {line.label: line for line in lines}.values():
        look = LOOKS[line.look] | ({} if line.joined else {"linestyle": ""})
        handles.append(Line2D([], [], label=printable(line.label), linewidth=1.5, **look))
    if any(mark.hollow for line in lines for mark in line.marks):
        hollow = mark_look("ddp", hollow=True) | {"markeredgecolor": MUTED}
        handles.append(Line2D([], [], label="hollow: shared", **hollow))
    if len(handles) < 2:
        return
    longest = sorted((len(str(handle.get_label())) for handle in handles), reverse=True)[:3]
    columns = 3 if sum(longest) <= _CHARACTERS_OF_THREE and len(handles) != 4 else 2
    legend(canvas, handles, columns, handlelength=2.4)
