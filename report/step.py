"""Shows where a step goes: the parts of each case, and the all-reduces of one step over time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ddp_bench.bench.findings.numbers import finite, mib, number, plural, quantity, with_interval
from ddp_bench.bench.findings.wording import Row, cap_label, case_label, estimate, ranged, text, truth
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.results.schema import EXPOSED_COMM, records
from ddp_bench.bench.stats import Interval
from ddp_bench.report.cases import (
    WorkloadCases,
    by_mode,
    caps_at_headline,
    headline_count,
    step_time,
    unshared,
)
from ddp_bench.report.drawing import COLOURS, INK, MUTED, PAPER, WIDTH_PT, Figure, printable, time_axis

BACKWARD, EXPOSED, MIXED = "backward", "exposed communication", "backward with communication"
REST = "rest: loss, optimizer, batch"
"""Of a step of DataParallel, beside its own stages."""

_DP_STAGES = {
    "scatter": "dp_scatter_ms",
    "replicate": "dp_replicate_ms",
    "apply (forward)": "dp_apply_ms",
    "gather": "dp_gather_ms",
    "backward": "dp_backward_ms",
    "reduce": "dp_reduce_ms",
}
_PHASES = {"data": "data_ms", "forward": "forward_ms", BACKWARD: "backward_ms", "optimizer": "optimizer_ms"}

LOOKS: dict[str, tuple[str, str]] = {
    "data": ("data", ""),
    "scatter": ("move", "||||"),
    "replicate": ("move", "----"),
    "forward": ("forward", ""),
    "apply (forward)": ("forward", "--"),
    "gather": ("move", "++++"),
    BACKWARD: ("backward", "////"),
    MIXED: ("backward", "xxxx"),
    EXPOSED: ("exposed", "\\\\\\\\"),
    "reduce": ("move", ""),
    "optimizer": ("optimizer", "||||"),
    REST: ("rest", ""),
}
"""Colour and hatch of each part of a step, so that neither has to be told alone; in the legend's order."""

_MANY = 10
_FASTEST_CAPS = 8
_LEAST_VISIBLE = 0.004
"""Of the longest bar; a narrower part is thinner than the outline."""

_BAR_PT, _BAR_ROW_PT, _CHARACTER_PT = 17, 42, 5.7


class Bar(NamedTuple):
    """A case and its step's parts in milliseconds, in the order of the step."""

    row: Row
    parts: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.parts.values())


def breakdown(workload: WorkloadCases, *, key: str) -> Figure | None:
    """Draw a stacked bar per case, of the usual cases where there are many; None without an anatomy pass."""
    own, chosen = unshared(workload.cases), _chosen(workload.cases)
    bars = step_bars(chosen)
    if not bars:
        return None
    longest = max(bar.total_ms for bar in bars)
    seen = {name for bar in bars for name, ms in bar.parts.items() if ms >= _LEAST_VISIBLE * longest}
    labels = [label for label in LOOKS if label in seen]

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for place, bar in enumerate(bars):
            name = printable(f"{case_label(bar.row, workload.device)}: {_step(bar)}")
            above: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom"}
            axes.annotate(name, (0, place - _BAR_PT / _BAR_ROW_PT / 2), annotation_clip=False, **above)
            _draw_bar(axes, bar, place, labels, per_pt=longest / (0.9 * WIDTH_PT))
        axes.set_xlim(0, longest)
        axes.set_ylim(len(bars) - 0.3, -0.65)
        axes.set_yticks([])
        time_axis(axes, "time per step (ms)")
        handles = [Patch(label=label, **_fill(label)) for label in labels]
        canvas.legend(handles=handles, loc="outside upper left", ncols=_columns(labels), handlelength=1.6)

    how = [
        "Each bar is a timed step: its parts stand in the order of the legend. What is not exposed "
        "communication has the shares of the anatomy pass, whose own values and intervals are in the tables; "
        "what differs between DDP's settings by chance alone is drawn alike."
    ]
    if EXPOSED in seen:
        how.append("Exposed communication is what synchronising adds to the step; backward is without it.")
    if MIXED in seen:
        how.append(f"“{MIXED}”: what communication adds was not measured there.")
    if REST in seen:
        how.append("Outside apply and backward only device 0 works under DataParallel.")
    if len(chosen) < len(own):
        how.append(
            "Of many cases the usual are drawn: default settings at every device count, and the fastest "
            "bucket caps at the most devices. Steps of several micro-batches are in the tables only."
        )
    if len(own) < len(workload.cases):
        how.append("Cases that share devices are in the tables only.")
    return Figure(
        key=f"{key}-anatomy",
        title="Where a step goes",
        caption=_caption(bars, workload),
        how_to_read=" ".join(how),
        height_pt=60 + 15 * -(-len(labels) // _columns(labels)) + _BAR_ROW_PT * len(bars),
        draw=draw,
    )


def step_bars(cases: pd.DataFrame) -> list[Bar]:
    """Divide the steps of cases into parts; those of DDP's settings alike where chance explains a difference.

    A bar is as long as the timed step: other steps, fewer of them, tell the shares of what is not exposed.
    """
    bars = [Bar(row, made) for row in records(cases) if (made := _parts(row))]
    groups: dict[Any, list[Bar]] = {}
    for bar in bars:
        groups.setdefault((text(bar.row["mode"]), bar.row["num_devices"]), []).append(bar)
    for (mode, _), group in groups.items():
        if mode == "ddp" and len(group) > 1:
            _alike(group)
    return bars


def _parts(row: Row) -> dict[str, float]:
    """Return a step's parts; none where the anatomy pass did not measure the case."""
    stages = {name: finite(row[column]) for name, column in _DP_STAGES.items()}
    phases = {name: finite(row[column]) for name, column in _PHASES.items()}
    whole_backward = phases[BACKWARD]
    exposed = max(finite(row[EXPOSED_COMM]) or 0.0, 0.0)
    if any(ms is not None for ms in stages.values()):
        known = [ms for ms in phases.values() if ms is not None]
        whole = sum(known) if len(known) == len(phases) else finite(row["step_ms_p50"])
        measured = sum(ms for ms in stages.values() if ms is not None)
        parts, exposed = stages | {REST: None if whole is None else whole - measured}, 0.0
    elif phases["forward"] is None or whole_backward is None:
        return {}
    else:
        several = text(row["mode"]) == "ddp" and finite(row["num_devices"]) != 1
        unknown = several and finite(row[EXPOSED_COMM]) is None
        parts = {
            "data": phases["data"],
            "forward": phases["forward"],
            MIXED if unknown else BACKWARD: max(whole_backward - exposed, 0.0),
            EXPOSED: exposed,
            "optimizer": phases["optimizer"],
        }
    step, found = step_time(row), {name: ms for name, ms in parts.items() if ms is not None and ms > 0}
    others = sum(found.values()) - exposed
    if step is None or not others > 0 or not step.estimate > exposed:
        return found
    factor = (step.estimate - exposed) / others
    return {name: ms if name == EXPOSED else ms * factor for name, ms in found.items()}


def _alike(group: Sequence[Bar]) -> None:
    """Draw compute alike where it differs by chance: DDP's buckets do not change the work of a device.

    What the pass measured once, or within overlapping intervals, is not known to differ. The backward is what
    is left, and is alike where the intervals of exposed communication hold the differences.
    """
    lengths = [bar.total_ms for bar in group]
    left = MIXED if all(MIXED in bar.parts for bar in group) else BACKWARD
    for name in ("data", "forward", "optimizer"):
        if not all({name, left} <= bar.parts.keys() for bar in group):
            continue
        found = [estimate(bar.row, _PHASES[name]) for bar in group]
        lows, highs = ([getattr(one, end) for one in found if one] for end in ("low", "high"))
        shared = median(bar.parts[name] for bar in group)
        if not max(lows) > min(highs) and all(bar.parts[name] + bar.parts[left] > shared for bar in group):
            for bar in group:
                bar.parts[left] += bar.parts[name] - shared
                bar.parts[name] = shared
    if not all({BACKWARD, EXPOSED} <= bar.parts.keys() for bar in group):
        return
    shared = median(bar.parts[BACKWARD] for bar in group)
    exposed = [estimate(bar.row, EXPOSED_COMM) for bar in group]
    if all(
        one is not None and abs(bar.parts[BACKWARD] - shared) <= min((one.high - one.low) / 2, one.estimate)
        for bar, one in zip(group, exposed, strict=True)
    ):
        for bar, length in zip(group, lengths, strict=True):
            bar.parts.update({BACKWARD: shared, EXPOSED: 0.0})
            bar.parts[EXPOSED] = length - bar.total_ms


def _chosen(cases: pd.DataFrame) -> pd.DataFrame:
    # A step of several micro-batches is as many times as long, and would flatten all others.
    once = cases[cases["accumulate"].fillna(1) == 1]
    cases = unshared(cases if once.empty else once)
    if len(cases) <= _MANY:
        return cases
    caps = caps_at_headline(cases).sort_values("images_per_s", ascending=False)
    usual = pd.concat([*(by_mode(cases, mode) for mode in ("single", "dp", "ddp")), caps[:_FASTEST_CAPS]])
    return usual[~usual.index.duplicated()].sort_index()


def _draw_bar(axes: Any, bar: Bar, place: int, labels: Iterable[str], *, per_pt: float) -> None:
    left = 0.0
    for name, ms in bar.parts.items():
        if name not in labels:
            continue
        where = {"y": place, "width": ms, "left": left, "height": _BAR_PT / _BAR_ROW_PT}
        axes.barh(**where, **_fill(name))
        axes.barh(**where, color="none", edgecolor=INK, linewidth=0.7)
        # What is drawn of exposed communication is within its interval; the number is that of the table.
        written = _whole(bar.row[EXPOSED_COMM] if name == EXPOSED else ms)
        if ms > per_pt * (_CHARACTER_PT * len(written) + 6):
            box = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"}
            middle = {"ha": "center", "va": "center_baseline", "fontsize": 10}
            axes.text(left + ms / 2, place, written, bbox=box, **middle)
        left += ms


def _fill(label: str) -> dict[str, Any]:
    # A hatch takes the colour of the edge; the outline is drawn by itself.
    colour, hatch = LOOKS[label]
    return {"facecolor": COLOURS[colour], "hatch": hatch, "edgecolor": PAPER, "linewidth": 0}


def _columns(labels: Sequence[str]) -> int:
    return 2 if any(len(label) > 24 for label in labels) else 3


def _step(bar: Bar) -> str:
    step = step_time(bar.row)
    return _whole(bar.total_ms) if step is None else with_interval(step, "ms")


def _whole(ms: float) -> str:
    """Write whole milliseconds, of short times two digits."""
    return f"{ms:,.0f} ms" if ms >= 10 else f"{number(ms, 2)} ms"


def _caption(bars: Sequence[Bar], workload: WorkloadCases) -> str:
    """Describe the first DDP case at the most devices; without DDP what there is."""
    ddp = workload.cases[workload.cases["mode"] == "ddp"]
    at = headline_count(ddp) or headline_count(workload.cases)
    there = [bar for bar in bars if finite(bar.row["num_devices"]) == at] or list(bars)
    firsts = {text(bar.row["mode"]): bar for bar in reversed(there)}
    bar = next(firsts[mode] for mode in ("ddp", "dp", "single") if mode in firsts)
    largest = max(bar.parts, key=lambda name: bar.parts[name])
    exposed, alone = estimate(bar.row, EXPOSED_COMM), ranged(bar.row, "dp_device0_pct", "%")
    said = f"{largest} takes most, {_share(bar.parts[largest], bar)}"
    if exposed is not None:
        added = f"{with_interval(exposed, 'ms')}, {_share(max(exposed.estimate, 0.0), bar)}"
        if not exposed.low > 0:
            said += f"; {EXPOSED}, {with_interval(exposed, 'ms')}, is below the noise"
        elif largest == EXPOSED:
            said = f"{EXPOSED} takes most, {added}"
        else:
            said += f"; {EXPOSED} adds {added}"
    said += f"; only device 0 works during {alone} of it" if alone else ""
    return f"{case_label(bar.row, workload.device)}: {said}."


def _share(ms: float, bar: Bar) -> str:
    return f"{quantity(100 * ms / bar.total_ms, '%', 2)} of the step"


# One step, drawn --------------------------------------------------------------------------------------------

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


def one_step(workload: WorkloadCases, blocks: pd.DataFrame, *, key: str) -> Figure | None:
    """Draw one step of up to three DDP cases: default buckets, the best cap, one bucket; None without any."""
    rank, found, count = steps_of(workload.cases, blocks)
    if not found:
        return None
    tracks, left_out = agreeing(found)
    ready, done = (any(getattr(track, name) for track in tracks) for name in ("ready", "done"))
    rows_pt = [min(_MOST_ROWS_PT, _LABELLED_ROW_PT * (len(track.sizes) + 0.6)) for track in tracks]

    def draw(canvas: Canvas) -> None:
        ratios = {"height_ratios": rows_pt}
        rows = canvas.subplots(len(tracks), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
        for axes, track in zip(rows, tracks, strict=True):
            _draw_track(axes, track)
        rows[-1].set_xlim(0, 1.02 * max(max(track.ready + track.done) for track in tracks))
        rows[-1].set_xlabel("time since the start of the backward (ms)")
        handles = [
            *([Line2D([], [], label="gradients ready", **_READY)] if ready else []),
            *([Line2D([], [], label="launched, waiting", **_QUEUED)] if ready and done else []),
            *([Patch(label="all-reduce", **_ALL_REDUCE)] if done else []),
            *([Line2D([], [], label="last gradient ready", **_COMPUTE_END)] if ready else []),
            *([Patch(label="exposed", linewidth=0, **_WAITED)] if ready and done else []),
        ]
        canvas.legend(handles=handles, loc="outside upper left", ncols=3)

    how = [
        "Time runs to the right from the start of the backward; a row is a bucket, in the order of "
        f"all-reduce, with its size. All steps are of rank {rank}, each the nearest to the median of those "
        "that the profiler traced, or of those of the anatomy pass."
    ]
    if done:
        how.append("The profiler slows all-reduces a little.")
    if ready:
        how.append(
            "DDP launches a bucket once it and all before it are ready. Right of the dashed line all "
            "gradients are computed, so the step waits for what is hatched. Readiness is of the anatomy pass."
        )
    return Figure(
        key=f"{key}-timeline",
        title="One step, drawn",
        caption=f"DDP on {count}, rank {rank}: with {tracks[0].title} {_ends(tracks[0])}."
        + (f" {left_out}" if left_out else ""),
        how_to_read=" ".join(how),
        height_pt=100 + sum(rows_pt) + 34 * len(rows_pt),
        draw=draw,
    )


def agreeing(tracks: Sequence[Track]) -> tuple[list[Track], str]:
    """Leave readiness out of all steps where it contradicts in any of them, and say why; else empty.

    Readiness and all-reduces come from different steps, which took different times.
    """
    bare = [replace(track, ready=()) for track in tracks]
    wrong = next((track for track in tracks if not track.agrees), None)
    if any(track.done for track in tracks):
        if any(track.ready for track in tracks) and not all(track.ready for track in tracks):
            return bare, "When gradients were ready is not drawn: it was not measured in all of these cases."
        if not all(track.is_causal for track in tracks):
            why = "measured in other steps, it contradicts the all-reduces"
            return bare, f"When gradients were ready is not drawn: {why}."
    if wrong is not None and wrong.waited_ms is not None:
        why = f"{wrong.title} waits {_whole(wrong.waited_ms)} in these few steps"
        table = f"the table has {with_interval(wrong.exposed, 'ms')} of exposed communication"
        return bare, f"The exposed part, and when gradients were ready, are not drawn: {why}, {table}."
    return list(tracks), ""


def steps_of(cases: pd.DataFrame, blocks: pd.DataFrame) -> tuple[int, list[Track], str]:
    """Return a rank, its steps to draw, and the devices in words: those that most have for themselves.

    All steps are of one rank, the one that is done last, and each the nearest to the median of its kind.
    """
    measured = blocks[blocks["phase"].isin(["trace", "anatomy"]) & blocks["detail"].notna()]
    chosen = _chosen_roles(cases[cases["case_id"].isin(_with_moments(measured))])
    if not chosen:
        return 0, [], ""
    kept = measured[measured["case_id"].isin([row["case_id"] for row, _ in chosen])]
    details: dict[tuple[Any, ...], list[Any]] = {}
    for row in records(kept[["case_id", "rank", "detail"]]):
        for name, moments in json.loads(row["detail"]).items():
            if name in ("ready_ms", "start_ms", "done_ms") and isinstance(moments, list) and moments:
                details.setdefault((row["case_id"], int(row["rank"]), name), []).append(tuple(moments))
    rank = _last_rank(details)
    tracks = [_track(row, role, details, rank) for row, role in chosen]
    first = chosen[0][0]
    shared = " (shared)" if truth(first["oversubscribed"]) else ""
    count = f"{plural(first['num_devices'], 'CPU core' if first['device_type'] == 'cpu' else 'GPU')}{shared}"
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


def _track(row: Row, role: str, details: Mapping[tuple[Any, ...], Sequence[Moments]], rank: int) -> Track:
    def nearest(name: str, ends: str) -> Moments:
        """Return the moments of the step whose `ends` are the nearest to the median."""
        steps, last = (details.get((row["case_id"], rank, each), ()) for each in (name, ends))
        if not steps or len(steps) != len(last):
            return ()
        usual = median(map(max, last))
        return min(zip(steps, last, strict=True), key=lambda pair: abs(max(pair[1]) - usual))[0]

    found = [nearest("ready_ms", "ready_ms"), nearest("start_ms", "done_ms"), nearest("done_ms", "done_ms")]
    layout = BucketLayout.of_cell(row["bucket_bytes"])
    sizes = layout.num_bytes if layout is not None else (0,) * max(map(len, found))
    ready, start, done = (moments if len(moments) == len(sizes) else () for moments in found)
    return Track(role, tuple(sizes), estimate(row, EXPOSED_COMM), ready, start, done)


def _chosen_roles(cases: pd.DataFrame) -> list[tuple[Row, str]]:
    """Choose cases at the most devices that are not shared, each with its role."""
    rows = records(caps_at_headline(cases))
    if not rows:
        return []
    best = max(rows, key=lambda row: finite(row["images_per_s"]) or 0.0)
    default = next((row for row in rows if text(row["bucket_cap_mb"]) == "default"), rows[0])
    single = next((row for row in rows if finite(row["num_buckets"]) == 1), None)
    chosen: dict[str, tuple[Row, list[str]]] = {}
    for row, what in (
        (default, ""),
        (best, "shortest step" if len(rows) > 1 else ""),
        (single, "one bucket"),
    ):
        if row is not None:
            chosen.setdefault(text(row["case_id"]), (row, []))[1].append(what)
    return [
        (row, ", ".join(filter(None, (f"cap {cap_label(text(row['bucket_cap_mb']))}", *words))))
        for row, words in chosen.values()
    ]


def _draw_track(axes: Any, track: Track) -> None:
    count = len(track.sizes)
    axes.set_title(printable(track.title), pad=6)
    axes.set_ylim(count - 0.2, -0.8)
    time_axis(axes, "")
    if track.ready:
        axes.axvline(max(track.ready), **_COMPUTE_END)
        if track.done:
            axes.axvspan(max(track.ready), max(track.done), linewidth=0, zorder=0.6, **_WAITED)
        axes.plot(track.ready, range(count), **_READY)
    started = track.start or track.launch
    for place, (begin, end) in enumerate(zip(started, track.done, strict=False)):
        axes.barh(place, end - begin, left=begin, height=0.62, zorder=2, **_ALL_REDUCE)
    for place, (launched, begin) in enumerate(zip(track.launch, track.start, strict=False)):
        axes.plot([launched, begin], [place, place], **_QUEUED)
    every = -(-count * _LABELLED_ROW_PT // _MOST_ROWS_PT)
    labels = [mib(size) if size else f"{i}" for i, size in enumerate(track.sizes)]
    axes.set_yticks(range(0, count, every), labels[::every])


def _ends(track: Track) -> str:
    said = []
    if track.ready:
        said.append(f"the last gradient is ready after {_whole(max(track.ready))}")
    if track.done:
        count = len(track.sizes)
        which = "its all-reduce" if count == 1 else f"the last of {plural(count, 'all-reduce')}"
        said.append(f"{which} is done after {_whole(max(track.done))}")
    return ", ".join(said)
