"""One step, drawn: when each bucket's gradients were ready and when its all-reduce ran. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from report.drawings import Bucket, Timeline, Track
from report.numbers import finite, mib, plural, quantity
from report.select import at_headline, cap_label, records, text, truth

if TYPE_CHECKING:
    import pandas as pd

    from report.select import Row, Workload

_HOW = (
    "Time runs to the right from the start of the backward; a row is a bucket, in the order of all-reduce, "
    "with its size. DDP launches a bucket once it and all before it are ready. Right of the dashed line no "
    "gradient is left to compute, so what is hatched there is waited for. Of several ranks, the one that "
    "finishes last is drawn. Medians over steps: readiness comes from the anatomy pass, the all-reduces "
    "from the trace, whose profiler slows the step a little, so marks and bars can be slightly apart. What "
    "is hatched is the wait of one rank in a few traced steps; the exposed time of verdict and tables comes "
    "from all timed steps, so the two can differ."
)


def one_step(workload: Workload, buckets: pd.DataFrame, *, key: str) -> Timeline | None:
    """The step of up to three DDP cases: default buckets, the best cap, one bucket; None without any."""
    chosen = _chosen(workload.cases, buckets)
    if not chosen:
        return None
    first = chosen[0][0]
    shared = " (shared)" if truth(first["oversubscribed"]) else ""
    tracks, said = [], []
    for row, role in chosen:
        rows = buckets[buckets["case_id"] == row["case_id"]]
        rank, track = _track(rows, role)
        tracks.append(track)
        said.append(f"with {role} (rank {rank}) {_finding(track)}")
    return Timeline(
        key=f"{key}-timeline",
        title="One step, drawn",
        caption=f"DDP on {plural(first['num_devices'], workload.device)}{shared}: {'; '.join(said)}.",
        how_to_read=_HOW,
        tracks=tuple(tracks),
    )


def _chosen(cases: pd.DataFrame, buckets: pd.DataFrame) -> list[tuple[Row, str]]:
    """Cases at the most devices that own them, each with what it is."""
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
        (best, "shortest median step" if len(rows) > 1 else ""),
        (single, "one bucket"),
    ):
        if row is not None:
            chosen.setdefault(text(row["case_id"]), (row, []))[1].append(what)
    return [
        (row, ", ".join(filter(None, (f"cap {cap_label(text(row['bucket_cap_mb']))}", *words))))
        for row, words in chosen.values()
    ]


def _track(rows: pd.DataFrame, role: str) -> tuple[str, Track]:
    """The step of the rank whose last bucket is done last, or ready last where that is not known."""
    last = rows.groupby("rank")[["done_ms", "ready_ms"]].max()
    by = "done_ms" if last["done_ms"].notna().any() else "ready_ms"
    rank = last[by].idxmax()
    buckets = tuple(
        Bucket(
            mib(finite(row["bytes"])),
            *(finite(row[name]) for name in ("ready_ms", "launch_ms", "start_ms", "done_ms")),
        )
        for row in records(rows[rows["rank"] == rank].sort_values("bucket"))
    )
    ready = [b.ready_ms for b in buckets if b.ready_ms is not None]
    done = [b.done_ms for b in buckets if b.done_ms is not None]
    compute_end, end = max(ready, default=None), max(done, default=None)
    return f"{rank}", Track(f"{role} (rank {rank})", buckets, compute_end, end)


def _finding(track: Track) -> str:
    said = []
    if track.compute_end_ms is not None:
        said.append(f"the last gradient is ready after {quantity(track.compute_end_ms, 'ms')}")
    if track.end_ms is not None:
        count = len(track.buckets)
        which = "its all-reduce" if count == 1 else f"the last of {plural(count, 'all-reduce')}"
        said.append(f"{which} done after {quantity(track.end_ms, 'ms')}")
    if track.compute_end_ms is not None and track.end_ms is not None:
        said.append(f"{quantity(max(track.end_ms - track.compute_end_ms, 0.0), 'ms')} exposed")
    return ", ".join(said)
