"""Draws durations along a time axis: parts of a step, one step's all-reduces."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddp_bench.bench.findings.numbers import quantity
from ddp_bench.report.draw.palette import (
    COMMUNICATION,
    EXPOSED,
    GRID,
    INK,
    MUTED,
    PAPER,
    PARTS,
    WIDTH_PT,
    Fill,
    canvas_of,
    printable,
)
from ddp_bench.report.drawings import Bar, Bars, Bucket, Timeline, Track

_BAR_ROW_PT = 42
_BAR_PT = 17
_LEGEND_ROW_PT = 15
_AROUND_BARS_PT = 60
_CHARACTER_PT = 5.7
_AROUND_TRACKS_PT = 100
_TITLE_PT = 34
_LABELLED_ROW_PT = 13
_MOST_ROWS_PT = 170
_READY: dict[str, Any] = {
    "marker": "d",
    "markersize": 7,
    "markeredgecolor": PAPER,
    "markeredgewidth": 0.7,
    "color": INK,
    "linestyle": "",
    "zorder": 4,
    "clip_on": False,
}
_QUEUED: dict[str, Any] = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (1, 1.5))}
_COMPUTE_END: dict[str, Any] = {"color": INK, "linewidth": 1.3, "linestyle": (0, (5, 2)), "zorder": 3}
_COMMUNICATION: dict[str, Any] = {"facecolor": COMMUNICATION.colour, "edgecolor": "none"}
_EXPOSED: dict[str, Any] = {
    "facecolor": "none",
    "hatch": EXPOSED.hatch,
    "edgecolor": EXPOSED.colour,
    "linewidth": 0,
}


def draw_bars(figure: Bars) -> Canvas:
    """Draw the bars."""
    labels = {part.label for bar in figure.bars for part in bar.parts}
    shown = [label for label in PARTS if label in labels]
    legend_pt = _LEGEND_ROW_PT * -(-len(shown) // 3)
    height_pt = _AROUND_BARS_PT + legend_pt + _BAR_ROW_PT * len(figure.bars)
    canvas = canvas_of(height_pt)
    axes = canvas.subplots()
    longest = max(sum(part.ms for part in bar.parts) for bar in figure.bars)
    for row, bar in enumerate(figure.bars):
        _draw_bar(axes, bar, row, per_pt=longest / (0.9 * WIDTH_PT))
    axes.set_xlim(0, longest)
    axes.set_ylim(len(figure.bars) - 0.3, -0.65)
    axes.set_yticks([])
    _grid_along_time(axes)
    _time_axis(axes, "time per step (ms)")
    handles = [Patch(label=printable(label), **_look(PARTS[label])) for label in shown]
    canvas.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=1.6, columnspacing=1.2)
    return canvas


def _draw_bar(axes: Any, bar: Bar, row: int, *, per_pt: float) -> None:
    above = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom", "ha": "left"}
    half = _BAR_PT / _BAR_ROW_PT / 2
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


def draw_timeline(figure: Timeline) -> Canvas:
    """Draw the tracks, on one time axis."""
    rows_pt = [min(_MOST_ROWS_PT, _LABELLED_ROW_PT * (len(track.buckets) + 0.6)) for track in figure.tracks]
    height_pt = _AROUND_TRACKS_PT + sum(rows_pt) + _TITLE_PT * len(rows_pt)
    canvas = canvas_of(height_pt)
    ratios = {"height_ratios": rows_pt}
    rows = canvas.subplots(len(rows_pt), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for axes, track in zip(rows, figure.tracks, strict=True):
        _draw_track(axes, track)
    last = rows[-1]
    last.set_xlim(0, 1.02 * max(moment for track in figure.tracks for moment in _moments(track)))
    _time_axis(last, "time since the start of the backward (ms)")
    canvas.legend(handles=_timeline_legend(figure), loc="outside upper left", ncols=3, columnspacing=1.2)
    return canvas


def _draw_track(axes: Any, track: Track) -> None:
    count = len(track.buckets)
    axes.set_title(printable(track.title), loc="left", pad=6)
    axes.set_ylim(count - 0.2, -0.8)
    _grid_along_time(axes)
    if track.compute_end_ms is not None:
        axes.axvline(track.compute_end_ms, **_COMPUTE_END)
        if _is_exposed(track):
            axes.axvspan(track.compute_end_ms, track.end_ms, **_EXPOSED, zorder=0.6)
    for row, bucket in enumerate(track.buckets):
        _draw_bucket(axes, bucket, row)
    every = -(-count * _LABELLED_ROW_PT // _MOST_ROWS_PT)
    axes.set_yticks(range(0, count, every), [printable(b.label) for b in track.buckets[::every]])


def _is_exposed(track: Track) -> bool:
    compute_end_ms, end_ms = track.compute_end_ms, track.end_ms
    return compute_end_ms is not None and end_ms is not None and end_ms > compute_end_ms


def _draw_bucket(axes: Any, bucket: Bucket, row: int) -> None:
    started = bucket.start_ms if bucket.start_ms is not None else bucket.launch_ms
    if bucket.launch_ms is not None and started is not None and started > bucket.launch_ms:
        axes.plot([bucket.launch_ms, started], [row, row], **_QUEUED)
    if started is not None and bucket.done_ms is not None:
        axes.barh(row, bucket.done_ms - started, left=started, height=0.62, zorder=2, **_COMMUNICATION)
    if bucket.ready_ms is not None:
        axes.plot([bucket.ready_ms], [row], **_READY)


def _moments(track: Track) -> list[float]:
    every = [m for b in track.buckets for m in (b.ready_ms, b.launch_ms, b.start_ms, b.done_ms)]
    return [moment for moment in every if moment is not None]


def _timeline_legend(figure: Timeline) -> list[Any]:
    buckets = [bucket for track in figure.tracks for bucket in track.buckets]
    handles: list[Any] = []
    if any(b.ready_ms is not None for b in buckets):
        handles.append(Line2D([], [], label="gradients ready", **_READY))
    if any(b.start_ms is not None and b.launch_ms is not None and b.start_ms > b.launch_ms for b in buckets):
        handles.append(Line2D([], [], label="launched, waiting", **_QUEUED))
    if any(b.done_ms is not None for b in buckets):
        handles.append(Patch(label="all-reduce", **_COMMUNICATION))
    if any(t.compute_end_ms is not None for t in figure.tracks):
        handles.append(Line2D([], [], label="last gradient ready", **_COMPUTE_END))
    if any(_is_exposed(t) for t in figure.tracks):
        handles.append(Patch(label="exposed", **_EXPOSED))
    return handles


def _grid_along_time(axes: Any) -> None:
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.set_axisbelow(True)


def _time_axis(axes: Any, label: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.set_xlabel(label)
