"""Draws steps over time: a row per bucket, the end of compute, and what is exposed after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from report.draw.palette import COMMUNICATION, EXPOSED, GRID, INK, MUTED, PAPER, printable

if TYPE_CHECKING:
    from report.drawings import Bucket, Timeline, Track

_AROUND_PT = 100
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


def draw_timeline(figure: Timeline, *, width_pt: float) -> Canvas:
    """The tracks as a canvas `width_pt` points wide, on one time axis."""
    rows_pt = [min(_MOST_ROWS_PT, _LABELLED_ROW_PT * (len(track.buckets) + 0.6)) for track in figure.tracks]
    height_pt = _AROUND_PT + sum(rows_pt) + _TITLE_PT * len(rows_pt)
    canvas = Canvas(figsize=(width_pt / 72, height_pt / 72), layout="constrained")
    ratios = {"height_ratios": rows_pt}
    rows = canvas.subplots(len(rows_pt), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for axes, track in zip(rows, figure.tracks, strict=True):
        _draw_track(axes, track)
    last = rows[-1]
    last.set_xlim(0, 1.02 * max(moment for track in figure.tracks for moment in _moments(track)))
    last.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    last.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    last.set_xlabel("time since the start of the backward (ms)")
    canvas.legend(handles=_legend(figure), loc="outside upper left", ncols=3, columnspacing=1.2)
    return canvas


def _draw_track(axes: Any, track: Track) -> None:
    count = len(track.buckets)
    axes.set_title(printable(track.title), loc="left", pad=6)
    axes.set_ylim(count - 0.2, -0.8)
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.set_axisbelow(True)
    if track.compute_end_ms is not None:
        axes.axvline(track.compute_end_ms, **_COMPUTE_END)
        if track.end_ms is not None and track.end_ms > track.compute_end_ms:
            axes.axvspan(track.compute_end_ms, track.end_ms, **_EXPOSED, zorder=0.6)
    for row, bucket in enumerate(track.buckets):
        _draw_bucket(axes, bucket, row)
    every = -(-count * _LABELLED_ROW_PT // _MOST_ROWS_PT)
    axes.set_yticks(range(0, count, every), [printable(b.label) for b in track.buckets[::every]])


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


def _legend(figure: Timeline) -> list[Any]:
    buckets = [bucket for track in figure.tracks for bucket in track.buckets]
    handles: list[Any] = [Line2D([], [], label="gradients ready", **_READY)]
    if any(b.start_ms is not None and b.launch_ms is not None and b.start_ms > b.launch_ms for b in buckets):
        handles.append(Line2D([], [], label="launched, waiting", **_QUEUED))
    if any(b.done_ms is not None for b in buckets):
        handles.append(Patch(label="all-reduce", **_COMMUNICATION))
    handles.append(Line2D([], [], label="last gradient ready", **_COMPUTE_END))
    if any(t.end_ms is not None for t in figure.tracks):
        handles.append(Patch(label="exposed", **_EXPOSED))
    return handles
