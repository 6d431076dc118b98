"""From blocks to the rows of cases.csv."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from bench.layout import BucketLayout
from bench.plan import Planned
from bench.results.round_times import ByRound, RoundTimes
from bench.results.schema import BUCKETS, CASES, typed_frame
from bench.settings import DDP_AXES
from bench.stats import Interval, median_interval, paired_ratio

SHARES = ("hidden_pct", "overlap_trace_pct", "overlap_window_pct", "dp_device0_pct")
"""Columns that cannot leave 0-100, nor can their intervals."""


@dataclass(frozen=True)
class Outcome:
    """What became of a planned case, beside its blocks; `facts` are columns of cases.csv."""

    planned: Planned
    status: str = "ok"
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def step_ms_by_round(blocks: pd.DataFrame | RoundTimes, phase: str) -> dict[str, ByRound]:
    """Milliseconds per step of every case and round: the longest rank's block time over its steps."""
    if isinstance(blocks, RoundTimes):
        return blocks.step_ms(phase)
    chosen = blocks[blocks["phase"] == phase]
    per_step = chosen["block_ms"] / chosen["num_steps"].astype("float64")
    longest = per_step.groupby([chosen["case_id"], chosen["round"]], sort=True).max()
    result: dict[str, ByRound] = {}
    for case_id, round_index, ms in longest.reset_index(name="ms").itertuples(index=False):
        result.setdefault(str(case_id), {})[int(round_index)] = float(ms)
    return result


def images_per_s_by_round(
    blocks: pd.DataFrame | RoundTimes, global_batch: Mapping[str, int]
) -> dict[str, ByRound]:
    """Throughput of every case and round: global batch x steps / longest rank's block time."""
    return {
        case_id: {r: global_batch[case_id] * 1000 / ms for r, ms in rounds.items()}
        for case_id, rounds in step_ms_by_round(blocks, "timed").items()
        if case_id in global_batch
    }


def case_rows(outcomes: Sequence[Outcome], blocks: pd.DataFrame | RoundTimes) -> pd.DataFrame:
    """cases.csv: one row per planned case, measured or not."""
    times = blocks if isinstance(blocks, RoundTimes) else RoundTimes.of(blocks)
    global_batch = {o.planned.case.case_id: o.planned.case.global_batch for o in outcomes}
    throughput = images_per_s_by_round(times, global_batch)
    single = next((throughput.get(c, {}) for c, o in _by_id(outcomes) if o.planned.case.mode == "single"), {})
    rows = []
    for case_id, outcome in _by_id(outcomes):
        row = _identity(outcome)
        if case_id in throughput:
            found = times.of_case(case_id)
            timed = found.step_ms["timed"]
            speedup = paired_ratio(throughput[case_id], single)
            n = outcome.planned.case.num_devices
            row |= _columns("images_per_s", median_interval(list(throughput[case_id].values())))
            row |= _columns("speedup", speedup)
            row |= _columns("efficiency", Interval(speedup.estimate / n, speedup.low / n, speedup.high / n))
            row |= {
                "step_ms_p50": float(np.median(list(timed.values()))),
                "step_ms_p75": found.percentile_ms(75),
                "step_ms_p95": found.percentile_ms(95),
                "num_rounds": len(timed),
            }
            row |= _communication(timed, found.step_ms.get("no_sync", {}), found.step_ms.get("comm", {}))
            row |= _slowdown(timed, found.step_ms.get("anatomy", {}))
            row |= _columns("rank_skew_ms", median_interval(list(found.skew_ms.values())))
            row["slowest_rank"] = found.slowest_rank()
            for name, by_round in found.details.items():
                row |= _columns(name, median_interval(list(by_round.values())))
        rows.append(row)
    return typed_frame(rows, CASES)


def _communication(timed: ByRound, no_sync: ByRound, comm: ByRound) -> dict[str, Any]:
    both = sorted(timed.keys() & no_sync.keys())
    exposed = {r: timed[r] - no_sync[r] for r in both}
    hidden = [100 * min(max(1 - exposed[r] / comm[r], 0.0), 1.0) for r in both if comm.get(r, 0.0) > 0]
    row: dict[str, Any] = {}
    if exposed:
        row |= _columns("no_sync_step_ms", median_interval([no_sync[r] for r in both]))
        row |= _columns("exposed_comm_ms", median_interval(list(exposed.values())))
    if comm:
        row |= _columns("comm_ms", median_interval(list(comm.values())))
    if hidden:
        row |= _columns("hidden_pct", median_interval(hidden))
    return row


def _slowdown(timed: ByRound, anatomy: ByRound) -> dict[str, float]:
    ratio = paired_ratio(anatomy, timed)
    low, estimate, high = (100 * (value - 1) for value in (ratio.low, ratio.estimate, ratio.high))
    return _columns("anatomy_slowdown_pct", Interval(estimate, low, high))


def bucket_rows(layouts: Mapping[str, BucketLayout], blocks: pd.DataFrame | RoundTimes) -> pd.DataFrame:
    """buckets.csv: every bucket of every DDP case and rank, its moments as medians over rounds."""
    times = blocks if isinstance(blocks, RoundTimes) else RoundTimes.of(blocks)
    rows = []
    for case_id, layout in sorted(layouts.items()):
        for rank, medians in sorted(times.of_case(case_id).bucket_moments().items()):
            rows += _buckets(case_id, rank, layout, medians)
    return typed_frame(rows, BUCKETS)


def _buckets(
    case_id: str, rank: int, layout: BucketLayout, medians: Mapping[str, Any]
) -> list[dict[str, Any]]:
    moments = dict(medians)
    if "ready_ms" in moments:
        # DDP launches a bucket once it and every bucket before it is ready (reducer.cpp).
        moments["launch_ms"] = np.maximum.accumulate(moments["ready_ms"])
    return [
        {
            "case_id": case_id,
            "rank": rank,
            "bucket": index,
            "bytes": num_bytes,
            "num_params": len(layout.parameters[index]) if layout.parameters else None,
            **{name: round(float(values[index]), 4) for name, values in moments.items()},
        }
        for index, num_bytes in enumerate(layout.num_bytes)
    ]


def allreduce_rows(
    num_ranks: int, backend: str, times_ms: Mapping[int, Sequence[float]]
) -> list[dict[str, Any]]:
    """allreduce.csv: time of one message by size, with nccl-tests' bus bandwidth.

    busbw = bytes / time x 2 (n - 1) / n: the rate that each link must carry, comparable over rank counts.
    """
    return [
        {
            "num_devices": num_ranks,
            "backend": backend,
            "bytes": num_bytes,
            **_columns("time_ms", median_interval(samples)),
            "busbw_gb_per_s": num_bytes / float(np.median(samples)) / 1e6 * 2 * (num_ranks - 1) / num_ranks,
            "num_samples": len(samples),
        }
        for num_bytes, samples in sorted(times_ms.items())
    ]


def _identity(outcome: Outcome) -> dict[str, Any]:
    planned, case = outcome.planned, outcome.planned.case
    row = {
        **case.stored(),
        "case_id": case.case_id,
        "impl": case.impl,
        "global_batch": case.global_batch,
        "num_nodes": planned.num_nodes,
        "oversubscribed": planned.oversubscribed,
        "status": outcome.status,
        "reason": outcome.reason,
        **outcome.facts,
    }
    if case.mode != "ddp":
        for ddp_only in ("backend", *(axis for axis in DDP_AXES if axis != "accumulate")):
            row[ddp_only] = None
    return {key: None if value == "" else value for key, value in row.items()}


def _by_id(outcomes: Iterable[Outcome]) -> list[tuple[str, Outcome]]:
    return [(o.planned.case.case_id, o) for o in outcomes]


def _columns(name: str, interval: Interval) -> dict[str, float]:
    low, high = interval.low, interval.high
    if name in SHARES:
        low, high = max(low, 0.0), min(high, 100.0)
    return {name: interval.estimate, f"{name}_low": low, f"{name}_high": high}


def worst_half_width(rows: pd.DataFrame) -> float:
    """The widest throughput interval of any measured case, as a fraction; NaN before two rounds."""
    measured = rows[rows["status"] == "ok"]
    if measured.empty or measured["images_per_s_low"].isna().any():
        return math.nan
    widths = (measured["images_per_s_high"] - measured["images_per_s_low"]) / (2 * measured["images_per_s"])
    return float(widths.max())
