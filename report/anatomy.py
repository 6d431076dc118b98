"""Shows where a step goes: the parts of each case, and the all-reduces of one step over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pandas as pd

from ddp_bench.bench.findings.numbers import finite, mib, plural, quantity, with_interval
from ddp_bench.bench.findings.wording import Row, cap_label, case_label, estimate, ranged, text, truth
from ddp_bench.bench.results.schema import EXPOSED_COMM, records
from ddp_bench.bench.stats import Interval
from ddp_bench.report.drawings import Bar, Bars, Bucket, Part, Timeline, Track
from ddp_bench.report.select import WorkloadCases, at_headline, by_mode, headline_count, step_time, unshared

EXPOSED, MIXED = "exposed communication", "backward with communication"
_MANY = 10
_LEAST_VISIBLE = 0.004
"""Of the longest bar; a narrower part is thinner than the outline."""
_FASTEST_CAPS = 8
_DP_STAGES = {
    "scatter": "dp_scatter_ms",
    "replicate": "dp_replicate_ms",
    "apply (forward)": "dp_apply_ms",
    "gather": "dp_gather_ms",
    "backward": "dp_backward_ms",
    "reduce": "dp_reduce_ms",
}
_PHASES = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
_HOW = (
    "Each bar is a timed step: its parts stand in the order of the legend. The parts beside exposed "
    "communication have the shares of the anatomy pass, whose own values and intervals are in the tables."
)
_HOW_DDP = " Exposed communication is what synchronising adds to the step; backward is shown without it."
_HOW_MIXED = f" “{MIXED}”: what communication adds was not measured there."
_HOW_CHOSEN = (
    " Of many cases the usual are drawn: default settings at every device count, and the fastest bucket caps "
    "at the most devices. Steps of several micro-batches are in the tables only."
)
_HOW_UNSHARED = " Cases that share devices are in the tables only."
_HOW_DP = (
    " Outside apply and backward only device 0 works under DataParallel; its rest is the loss, the optimizer "
    "and the batch."
)
_HOW_TIMELINE = (
    "Time runs to the right from the start of the backward; a row is a bucket, in the order of all-reduce, "
    "with its size. All-reduces are medians over traced blocks, with intervals from three blocks on, of the "
    "rank that finishes last; the profiler slows them a little, so how much a step waits is said by the "
    "answer above, from timed steps."
)
_HOW_READY = (
    " DDP launches a bucket once it and all before it are ready. Right of the dashed line all gradients are "
    "computed, so the step waits for what is hatched. Readiness comes from steps of the anatomy pass."
)
_HOW_UNREADY = (
    " When gradients were ready is not drawn where it contradicts the all-reduces: it was measured in other "
    "steps, which took another time."
)


def breakdown(workload: WorkloadCases, *, key: str) -> Bars | None:
    """Make a stacked bar per case, of the usual cases where there are many; None without an anatomy pass."""
    chosen = _chosen(workload.cases)
    drawn = [(row, made) for row in records(chosen) if (made := parts(row))]
    if not drawn:
        return None
    visible = _visible([made for _, made in drawn])
    shown = {part.label for _, made in drawn for part in made}
    how = (
        (_HOW_DDP, EXPOSED in shown),
        (_HOW_MIXED, MIXED in shown),
        (_HOW_DP, "rest" in shown),
        (_HOW_CHOSEN, len(chosen) < len(unshared(workload.cases))),
        (_HOW_UNSHARED, len(unshared(workload.cases)) < len(workload.cases)),
    )
    return Bars(
        key=f"{key}-anatomy",
        title="Where a step goes",
        caption=_caption([row for row, _ in drawn], workload),
        how_to_read=_HOW + "".join(words for words, there in how if there),
        bars=tuple(
            Bar(_label(row, workload.device, made), tuple(p for p in made if p.label in visible))
            for row, made in drawn
        ),
    )


def _visible(bars: Sequence[Sequence[Part]]) -> set[str]:
    """Return the parts that are wide enough to be seen in any bar."""
    longest = max(sum(part.ms for part in made) for made in bars)
    return {part.label for made in bars for part in made if part.ms >= _LEAST_VISIBLE * longest}


def parts(row: Row) -> tuple[Part, ...]:
    """Return a step's parts in milliseconds; none where the anatomy pass did not measure the case.

    Backward is shown without exposed communication, and DataParallel by its stages. Together they are as
    long as the timed step: other steps, fewer of them, tell the shares of what is not exposed communication.
    """
    made, step = _measured_parts(row), step_time(row)
    exposed = sum(part.ms for part in made if part.label == EXPOSED)
    others = sum(part.ms for part in made) - exposed
    if step is None or not others > 0 or not step.estimate > exposed:
        return made
    factor = (step.estimate - exposed) / others
    return tuple(part if part.label == EXPOSED else replace(part, ms=part.ms * factor) for part in made)


def _measured_parts(row: Row) -> tuple[Part, ...]:
    stages = {name: finite(row[column]) for name, column in _DP_STAGES.items()}
    if any(value is not None for value in stages.values()):
        whole = _whole(row)
        measured = sum(value for value in stages.values() if value is not None)
        rest = None if whole is None else max(whole - measured, 0.0)
        return _known(stages | {"rest": rest})
    data, forward, backward, optimizer = (finite(row[name]) for name in _PHASES)
    if forward is None or backward is None:
        return ()
    exposed = finite(row[EXPOSED_COMM])
    if exposed is None:
        alone = text(row["mode"]) != "ddp" or finite(row["num_devices"]) == 1
        split: dict[str, float | None] = {"backward" if alone else MIXED: backward}
    else:
        exposed = max(exposed, 0.0)
        split = {"backward": max(backward - exposed, 0.0), EXPOSED: exposed}
    return _known({"data": data, "forward": forward, **split, "optimizer": optimizer})


def _known(values: dict[str, float | None]) -> tuple[Part, ...]:
    return tuple(Part(name, value) for name, value in values.items() if value is not None and value > 0)


def _whole(row: Row) -> float | None:
    phases = [finite(row[name]) for name in _PHASES]
    known = [value for value in phases if value is not None]
    return sum(known) if len(known) == len(phases) else finite(row["step_ms_p50"])


def _chosen(cases: pd.DataFrame) -> pd.DataFrame:
    # A step of several micro-batches is as many times as long, and would flatten all others.
    once = cases[cases["accumulate"].fillna(1) == 1]
    cases = cases if once.empty else once
    cases = unshared(cases)
    if len(cases) <= _MANY:
        return cases
    caps = at_headline(cases, free="bucket_cap_mb").sort_values("images_per_s", ascending=False)
    usual = pd.concat([*(by_mode(cases, mode) for mode in ("single", "dp", "ddp")), caps[:_FASTEST_CAPS]])
    return usual[~usual.index.duplicated()].sort_index()


def _label(row: Row, device: str, made: tuple[Part, ...]) -> str:
    return f"{case_label(row, device)}: {quantity(sum(part.ms for part in made), 'ms')}"


def _caption(rows: list[Row], workload: WorkloadCases) -> str:
    """Describe the first DDP case at the most devices; without DDP what there is."""
    ddp = workload.cases[workload.cases["mode"] == "ddp"]
    at = headline_count(ddp) or headline_count(workload.cases)
    there = [row for row in rows if finite(row["num_devices"]) == at] or rows
    firsts = {text(row["mode"]): row for row in reversed(there)}
    return next(_finding(firsts[mode], workload.device) for mode in ("ddp", "dp", "single") if mode in firsts)


def _finding(row: Row, device: str) -> str:
    made = parts(row)
    whole = sum(part.ms for part in made)
    largest = max(made, key=lambda part: part.ms)
    exposed, alone = estimate(row, EXPOSED_COMM), ranged(row, "dp_device0_pct", "%")
    said = f"{largest.label} takes most, {_share(largest.ms, whole)} of the step"
    if exposed is not None:
        added = f"{with_interval(exposed, 'ms')}, {_share(max(exposed.estimate, 0.0), whole)} of the step"
        if not exposed.low > 0:
            said += f"; {EXPOSED}, {with_interval(exposed, 'ms')}, is below the noise"
        elif largest.label == EXPOSED:
            said = f"{EXPOSED} takes most, {added}"
        else:
            said += f"; {EXPOSED} adds {added}"
    if alone:
        said += f"; only device 0 works during {alone} of it"
    return f"{case_label(row, device)}: {said}."


def _share(part_ms: float, whole_ms: float) -> str:
    return quantity(100 * part_ms / whole_ms, "%", 2)


def one_step(workload: WorkloadCases, buckets: pd.DataFrame, *, key: str) -> Timeline | None:
    """Show one step of up to three DDP cases: default buckets, the best cap, one bucket; None without any."""
    chosen = _chosen_roles(workload.cases, buckets)
    if not chosen:
        return None
    first = chosen[0][0]
    shared = " (shared)" if truth(first["oversubscribed"]) else ""
    tracks, said, left_out = [], [], False
    for row, role in chosen:
        rank, whole = _track(buckets[buckets["case_id"] == row["case_id"]], role)
        track = whole if is_causal(whole) else without_readiness(whole)
        left_out |= track != whole
        if is_causal(track) and track.is_drawable:
            tracks.append(track)
            said.append(f"with {role} (rank {rank}) {_track_finding(track)}")
    if not tracks:
        return None
    ready = any(track.compute_end_ms is not None for track in tracks)
    return Timeline(
        key=f"{key}-timeline",
        title="One step, drawn",
        caption=f"DDP on {plural(first['num_devices'], workload.device)}{shared}: {said[0]}.",
        how_to_read=_HOW_TIMELINE + (_HOW_READY if ready else "") + (_HOW_UNREADY if left_out else ""),
        tracks=tuple(tracks),
    )


def is_causal(track: Track) -> bool:
    """Tell whether every bucket is ready, launched, taken up and done in this order, and all of it last.

    Moments that were not measured are passed over.
    """
    ends = (track.compute_end_ms, track.end_ms)
    orders = [ends, *((b.ready_ms, b.launch_ms, b.start_ms, b.done_ms) for b in track.buckets)]
    return all(_ascends([moment for moment in order if moment is not None]) for order in orders)


def _ascends(moments: Sequence[float]) -> bool:
    return all(earlier <= later for earlier, later in pairwise(moments))


def without_readiness(track: Track) -> Track:
    """Return the track with its all-reduces alone, which are all of the same steps."""
    bare = tuple(replace(bucket, ready_ms=None, launch_ms=None) for bucket in track.buckets)
    return replace(track, buckets=bare, compute_end=None)


def _chosen_roles(cases: pd.DataFrame, buckets: pd.DataFrame) -> list[tuple[Row, str]]:
    """Choose cases at the most devices that are not shared, each with its role."""
    moments = buckets["rank"].notna() & buckets[["ready_ms", "done_ms"]].notna().any(axis=1)
    drawable = cases[cases["case_id"].isin(buckets.loc[moments, "case_id"])]
    rows = records(at_headline(drawable, free="bucket_cap_mb"))
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


def _track(rows: pd.DataFrame, role: str) -> tuple[str, Track]:
    """Show the rank whose last bucket is done last, or is ready last where that is not known."""
    last = rows.groupby("rank")[["done_ms", "ready_ms"]].max()
    by = "done_ms" if last["done_ms"].notna().any() else "ready_ms"
    rank = last[by].idxmax()
    own = records(rows[rows["rank"] == rank].sort_values("bucket"))
    buckets = tuple(
        Bucket(
            mib(finite(row["bytes"])),
            *(finite(row[name]) for name in ("ready_ms", "launch_ms", "start_ms", "done_ms")),
        )
        for row in own
    )
    return f"{rank}", Track(f"{role} (rank {rank})", buckets, _last(own, "ready_ms"), _last(own, "done_ms"))


def _last(buckets: Sequence[Row], moment: str) -> Interval | None:
    known = [found for row in buckets if (found := estimate(row, moment)) is not None]
    return max(known, key=lambda found: found.estimate, default=None)


def _track_finding(track: Track) -> str:
    said = []
    if track.compute_end is not None:
        said.append(f"the last gradient is ready after {with_interval(track.compute_end, 'ms')}")
    if track.end is not None:
        count = len(track.buckets)
        which = "its all-reduce" if count == 1 else f"the last of {plural(count, 'all-reduce')}"
        said.append(f"{which} is done after {with_interval(track.end, 'ms')}")
    return ", ".join(said)
