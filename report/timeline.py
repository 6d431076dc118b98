"""Draws one step over time: when its buckets were ready, and when their all-reduces ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..bench.buckets import BucketLayout
from ..bench.findings.numbers import mib, plural, quantity, with_interval
from ..bench.findings.wording import cap_label, devices
from ..bench.results.case_result import CaseResult
from ..bench.results.columns import records
from ..bench.stats.interval import Interval
from .cases import WorkloadCases, caps_at_headline
from .drawing import COLOURS, INK, MUTED, PAPER, Figure, time_axis
from .svg import printable

_LABELLED_ROW_PT, _MOST_ROWS_PT = 13, 170
_READY: dict[str, Any] = {
    "marker": "d", "markersize": 7, "markeredgecolor": PAPER, "markeredgewidth": 0.7, "color": INK,
    "linestyle": "", "zorder": 4, "clip_on": False,
}  # fmt: skip
_QUEUED: dict[str, Any] = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (1, 1.5))}
_COMPUTE_END: dict[str, Any] = {"color": INK, "linewidth": 1.3, "linestyle": (0, (5, 2)), "zorder": 3}
_ALL_REDUCE: dict[str, Any] = {"facecolor": COLOURS["ddp"], "edgecolor": "none"}
_WAITED: dict[str, Any] = {"facecolor": "none", "hatch": "////", "edgecolor": COLOURS["exposed"]}

Moments = tuple[float, ...]


@dataclass(frozen=True)
class Track:
    """One step of one case: when its buckets were ready, and when their all-reduces ran; in ms.

    The moments are those since the start of the backward, one per bucket, or none where not measured.
    """

    title: str
    sizes: tuple[int, ...]
    """Bytes."""
    exposed: Interval | None
    """Of the table, to hold what is drawn against."""
    ready: Moments = ()
    start: Moments = ()
    done: Moments = ()

    @property
    def launch(self) -> Moments:
        """DDP launches a bucket once it and every bucket before it is ready (reducer.cpp)."""
        return tuple(accumulate(self.ready, max))

    @property
    def waited_ms(self) -> float | None:
        """From the last gradient to the end of the last all-reduce: what the step waits for."""
        return max(self.done) - max(self.ready) if self.ready and self.done else None

    @property
    def is_causal(self) -> bool:
        """Whether every bucket is ready, launched, taken up and done in this order, and all of it last."""
        known = [moments for moments in (self.ready, self.launch, self.start, self.done) if moments]
        in_order = all(a <= b for bucket in zip(*known, strict=True) for a, b in pairwise(bucket))
        return in_order and not (self.waited_ms is not None and self.waited_ms < 0)

    @property
    def agrees(self) -> bool:
        """Whether what the step waits for is what the table says that communication adds."""
        known, waited = self.exposed, self.waited_ms
        return known is None or waited is None or not (waited < known.low or waited > known.high)


def one_step(workload: WorkloadCases, blocks: pd.DataFrame, *, key: str) -> tuple[Figure | None, str]:
    """Draw one step of up to three DDP cases: default buckets, the best cap, one bucket.

    Without a figure why, or nothing where no step was looked at.
    """
    rank, found, count = steps_of(workload.cases, blocks)
    tracks, why_not = whole(found)
    if not tracks:
        return None, why_not
    rows_pt = [min(_MOST_ROWS_PT, _LABELLED_ROW_PT * (len(track.sizes) + 0.6)) for track in tracks]

    def draw(canvas: Canvas) -> None:
        ratios = {"height_ratios": rows_pt}
        rows = canvas.subplots(len(tracks), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
        for axes, track in zip(rows, tracks, strict=True):
            _draw_track(axes, track)
        rows[-1].set_xlim(0, 1.02 * max(max(track.ready + track.done) for track in tracks))
        rows[-1].set_xlabel("time since the start of the backward (ms)")
        handles = [
            Line2D([], [], label="gradients ready", **_READY),
            Line2D([], [], label="launched, waiting", **_QUEUED),
            Patch(label="all-reduce", **_ALL_REDUCE),
            Line2D([], [], label="last gradient ready", **_COMPUTE_END),
            Patch(label="exposed", linewidth=0, **_WAITED),
        ]
        canvas.legend(handles=handles, loc="outside upper left", ncols=3)

    figure = Figure(
        key=f"{key}-timeline",
        title="One step, drawn",
        caption=f"DDP on {count}, rank {rank}: with {tracks[0].title} {_ends(tracks[0])}.",
        how_to_read="Time runs to the right from the start of the backward; a row is a bucket, in the order "
        f"of all-reduce, with its size. All are of rank {rank} and the nearest to the median: gradients "
        "of those of the anatomy pass, all-reduces of those that the profiler traced, which slows them a "
        "little. DDP launches a bucket once it and all before it are ready. Right of the dashed line all "
        "gradients are computed, so the step waits for what is hatched.",
        height_pt=100 + sum(rows_pt) + 34 * len(rows_pt),
        draw=draw,
    )
    return figure, ""


def whole(tracks: Sequence[Track]) -> tuple[list[Track], str]:
    """Keep the steps of which gradients and all-reduces are known; none where one contradicts, and why.

    Readiness and all-reduces come from different steps, which took different times.
    """
    known = [track for track in tracks if track.ready and track.done]
    if not known:
        why = (
            "its gradients and all-reduces were not both measured (passes anatomy and trace)"
            if tracks
            else ""
        )
    elif not all(track.is_causal for track in known):
        why = "its parts were recorded in different steps, and do not fit together"
    elif wrong := next((track for track in known if not track.agrees), None):
        waits, table = quantity(wrong.waited_ms, "ms", 2), with_interval(wrong.exposed, "ms")
        why = (
            f"{wrong.title} waits {waits} in the few steps that were looked into, the table has {table} of "
            "exposed communication"
        )
    else:
        return known, ""
    return [], why and f"No single step is drawn: {why}."


def steps_of(cases: Sequence[CaseResult], blocks: pd.DataFrame) -> tuple[int, list[Track], str]:
    """Return a rank, its steps to draw, and the devices in words: those that most have for themselves.

    All steps are of one rank, the one that is done last, and each the nearest to the median of its kind.
    """
    measured = blocks[blocks["phase"].isin(["trace", "anatomy"]) & blocks["detail"].notna()]
    timed = _with_moments(measured)
    chosen = _chosen_roles([case for case in cases if case.case_id in timed])
    if not chosen or chosen[0][0].num_devices == 1:  # nothing is sent
        return 0, [], ""
    kept = measured[measured["case_id"].isin([case.case_id for case, _ in chosen])]
    details: dict[tuple[Any, ...], list[Any]] = {}
    for row in records(kept[["case_id", "rank", "detail"]]):
        for name, moments in json.loads(row["detail"]).items():
            if name in ("ready_ms", "start_ms", "done_ms") and isinstance(moments, list) and moments:
                details.setdefault((row["case_id"], int(row["rank"]), name), []).append(tuple(moments))
    rank = _last_rank(details)
    tracks = [_track(case, role, details, rank) for case, role in chosen]
    first = chosen[0][0]
    count = f"{devices(first.num_devices, first.device_type)}{' (shared)' if first.oversubscribed else ''}"
    drawable = [t for t in tracks if (t.done or t.ready) and replace(t, ready=()).is_causal]
    return rank, drawable, count


def _with_moments(blocks: pd.DataFrame) -> set[str]:
    holds = blocks["detail"].str.contains('"(?:ready|done)_ms": \\[[0-9]', regex=True).astype(bool)
    return set(blocks.loc[holds, "case_id"])


def _last_rank(details: Mapping[tuple[Any, ...], Sequence[Moments]]) -> int:
    """Return the rank that is last over all cases: its all-reduces, or untraced, its gradients."""
    ends: dict[tuple[bool, int], float] = {}
    for (_, rank, name), steps in details.items():
        if name != "start_ms":
            place = (name == "done_ms", rank)
            ends[place] = ends.get(place, 0.0) + median(map(max, steps))
    traced = any(done for done, _ in ends)
    of_kind = {rank: end for (done, rank), end in sorted(ends.items()) if done == traced}
    return max(of_kind, key=lambda rank: of_kind[rank])


def _track(
    case: CaseResult, role: str, details: Mapping[tuple[Any, ...], Sequence[Moments]], rank: int
) -> Track:
    def nearest(name: str, ends: str) -> Moments:
        """Return the moments of the step whose `ends` are the nearest to the median."""
        steps, last = (details.get((case.case_id, rank, each), ()) for each in (name, ends))
        if not steps or len(steps) != len(last):
            return ()
        usual = median(map(max, last))
        return min(zip(steps, last, strict=True), key=lambda pair: abs(max(pair[1]) - usual))[0]

    found = [nearest("ready_ms", "ready_ms"), nearest("start_ms", "done_ms"), nearest("done_ms", "done_ms")]
    layout = BucketLayout.of_cell(case.bucket_bytes)
    sizes = layout.num_bytes if layout is not None else (0,) * max(map(len, found))
    ready, start, done = (moments if len(moments) == len(sizes) else () for moments in found)
    return Track(role, tuple(sizes), case.exposed_comm_ms, ready, start, done)


def _chosen_roles(cases: Sequence[CaseResult]) -> list[tuple[CaseResult, str]]:
    """Choose cases at the most devices that are not shared, each with its role."""
    caps = {case.setting("bucket_cap_mb"): case for case in reversed(caps_at_headline(cases))}
    if not caps:
        return []
    every = [*reversed(caps.values())]
    best = max(every, key=lambda case: case.images_per_s.estimate if case.images_per_s else 0.0)
    single = next((case for case in every if case.num_buckets == 1), None)
    roles = {"": caps.get("default", every[0]), "shortest step": best if len(every) > 1 else None}
    chosen: dict[str, list[str]] = {}
    for role, case in {**roles, "one bucket": single}.items():
        if case is not None:
            chosen.setdefault(case.setting("bucket_cap_mb"), []).append(role)
    return [
        (caps[cap], ", ".join(filter(None, (f"cap {cap_label(cap)}", *words))))
        for cap, words in chosen.items()
    ]


def _draw_track(axes: Any, track: Track) -> None:
    count = len(track.sizes)
    axes.set_title(printable(track.title), pad=6)
    axes.set_ylim(count - 0.2, -0.8)
    time_axis(axes, "")
    axes.axvline(max(track.ready), **_COMPUTE_END)
    axes.axvspan(max(track.ready), max(track.done), linewidth=0, zorder=0.6, **_WAITED)
    axes.plot(track.ready, range(count), **_READY)
    started = track.start or track.launch
    for place, (begin, end) in enumerate(zip(started, track.done, strict=True)):
        axes.barh(place, end - begin, left=begin, height=0.62, zorder=2, **_ALL_REDUCE)
    for place, (launched, begin) in enumerate(zip(track.launch, started, strict=True)):
        axes.plot([launched, begin], [place, place], **_QUEUED)
    every = -(-count * _LABELLED_ROW_PT // _MOST_ROWS_PT)
    labels = [mib(size) if size else f"{i}" for i, size in enumerate(track.sizes)]
    axes.set_yticks(range(0, count, every), labels[::every])


def _ends(track: Track) -> str:
    count = len(track.sizes)
    which = "its all-reduce" if count == 1 else f"the last of {plural(count, 'all-reduce')}"
    ready, done = (quantity(max(moments), "ms", 2) for moments in (track.ready, track.done))
    return f"the last gradient is ready after {ready}, {which} is done after {done}"
