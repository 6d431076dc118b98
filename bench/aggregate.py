"""From blocks to the rows of cases.csv. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from bench.plan import DDP_AXES, BucketLayout, Planned
from bench.schema import BUCKETS, CASES, typed_frame
from bench.stats import Interval, median_interval, paired_ratio

ByRound = dict[int, float]

SHARES = ("hidden_pct", "overlap_trace_pct", "overlap_window_pct", "dp_device0_pct")
"""Columns that cannot leave 0-100, nor can their intervals."""


@dataclass(frozen=True)
class Outcome:
    """What became of a planned case, beside its blocks; `facts` are columns of cases.csv."""

    planned: Planned
    status: str = "ok"
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def step_ms_by_round(blocks: pd.DataFrame, phase: str) -> dict[str, ByRound]:
    """Milliseconds per step of every case and round: the longest rank's block time over its steps."""
    return _by_round(blocks, phase, lambda ranks: ranks.max())


def skew_ms_by_round(blocks: pd.DataFrame) -> dict[str, ByRound]:
    """Slowest minus fastest rank's step under `no_sync`, where no rank waits for another, by round."""
    return _by_round(blocks, "no_sync", lambda ranks: ranks.max() - ranks.min())


def _slowest_rank(blocks: pd.DataFrame) -> dict[str, int]:
    chosen = blocks[blocks["phase"] == "no_sync"]
    longest = chosen.loc[chosen.groupby(["case_id", "round"])["block_ms"].idxmax()]
    return {str(case_id): int(ranks.mode().iloc[0]) for case_id, ranks in longest.groupby("case_id")["rank"]}


def _by_round(
    blocks: pd.DataFrame, phase: str, over_ranks: Callable[[Any], pd.Series[float]]
) -> dict[str, ByRound]:
    chosen = blocks[blocks["phase"] == phase]
    per_step = chosen["block_ms"] / chosen["num_steps"].astype("float64")
    grouped = over_ranks(per_step.groupby([chosen["case_id"], chosen["round"]], sort=True))
    result: dict[str, ByRound] = {}
    for case_id, round_index, ms in grouped.reset_index(name="ms").itertuples(index=False):
        result.setdefault(str(case_id), {})[int(round_index)] = float(ms)
    return result


def images_per_s_by_round(blocks: pd.DataFrame, global_batch: Mapping[str, int]) -> dict[str, ByRound]:
    """Throughput of every case and round: global batch x steps / longest rank's block time."""
    return {
        case_id: {r: global_batch[case_id] * 1000 / ms for r, ms in rounds.items()}
        for case_id, rounds in step_ms_by_round(blocks, "timed").items()
        if case_id in global_batch
    }


def case_rows(outcomes: Sequence[Outcome], blocks: pd.DataFrame) -> pd.DataFrame:
    """cases.csv: one row per planned case, measured or not."""
    global_batch = {o.planned.case.case_id: o.planned.case.global_batch for o in outcomes}
    throughput = images_per_s_by_round(blocks, global_batch)
    timed = step_ms_by_round(blocks, "timed")
    no_sync = step_ms_by_round(blocks, "no_sync")
    comm = step_ms_by_round(blocks, "comm")
    anatomy = step_ms_by_round(blocks, "anatomy")
    skew = skew_ms_by_round(blocks)
    slowest = _slowest_rank(blocks)
    single = next((throughput.get(c, {}) for c, o in _by_id(outcomes) if o.planned.case.mode == "single"), {})
    details = _details(blocks)
    steps = _single_steps(blocks)
    rows = []
    for case_id, outcome in _by_id(outcomes):
        row = _identity(outcome)
        if case_id in throughput:
            speedup = paired_ratio(throughput[case_id], single)
            n = outcome.planned.case.num_devices
            row |= _columns("images_per_s", median_interval(list(throughput[case_id].values())))
            row |= _columns("speedup", speedup)
            row |= _columns("efficiency", Interval(speedup.estimate / n, speedup.low / n, speedup.high / n))
            row |= {
                "step_ms_p50": float(np.median(list(timed[case_id].values()))),
                "step_ms_p75": float(np.percentile(steps[case_id], 75)),
                "step_ms_p95": float(np.percentile(steps[case_id], 95)),
                "num_rounds": len(timed[case_id]),
            }
            row |= _communication(timed[case_id], no_sync.get(case_id, {}), comm.get(case_id, {}))
            row |= _slowdown(timed[case_id], anatomy.get(case_id, {}))
            row |= _columns("rank_skew_ms", median_interval(list(skew.get(case_id, {}).values())))
            row["slowest_rank"] = slowest.get(case_id)
            for name, by_round in details.get(case_id, {}).items():
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


def _details(blocks: pd.DataFrame) -> dict[str, dict[str, ByRound]]:
    """Columns that blocks carry in their detail: by case, column and round, the median over ranks."""
    samples: dict[str, dict[str, dict[int, list[float]]]] = {}
    known = {column.name for column in CASES}
    for block in _with_detail(blocks):
        detail = block.content
        if "local_last_ready_ms" in detail:
            detail["compute_slowdown"] = detail["last_ready_ms"] / detail["local_last_ready_ms"]
        for name, value in detail.items():
            if name in known:
                by_round = samples.setdefault(block.case_id, {}).setdefault(name, {})
                by_round.setdefault(block.round, []).append(float(value))
    return {
        case_id: {
            name: {r: float(np.median(values)) for r, values in by_round.items()}
            for name, by_round in columns.items()
        }
        for case_id, columns in samples.items()
    }


@dataclass(frozen=True)
class _Detail:
    case_id: str
    rank: int
    round: int
    content: dict[str, Any]


def _with_detail(blocks: pd.DataFrame) -> list[_Detail]:
    chosen = blocks[blocks["detail"].notna()]
    columns = (chosen[name] for name in ("case_id", "rank", "round", "detail"))
    return [_Detail(str(c), int(k), int(r), json.loads(d)) for c, k, r, d in zip(*columns, strict=True)]


def bucket_rows(layouts: Mapping[str, BucketLayout], blocks: pd.DataFrame) -> pd.DataFrame:
    """buckets.csv: every bucket of every DDP case and rank, its moments as medians over rounds."""
    moments: dict[tuple[str, int], dict[str, list[list[float]]]] = {}
    for block in _with_detail(blocks):
        for name in ("ready_ms", "start_ms", "done_ms"):
            if name in block.content:
                found = moments.setdefault((block.case_id, block.rank), {}).setdefault(name, [])
                found.append(block.content[name])
    rows = []
    for (case_id, rank), found_by_name in sorted(moments.items()):
        layout = layouts.get(case_id)
        if layout is None:
            continue
        medians = {name: np.median(np.array(found), axis=0) for name, found in found_by_name.items()}
        if "ready_ms" in medians:
            # DDP launches a bucket once it and every bucket before it is ready (reducer.cpp).
            medians["launch_ms"] = np.maximum.accumulate(medians["ready_ms"])
        for index, num_bytes in enumerate(layout.num_bytes):
            rows.append(
                {
                    "case_id": case_id,
                    "rank": rank,
                    "bucket": index,
                    "bytes": num_bytes,
                    "num_params": len(layout.parameters[index]) if layout.parameters else None,
                    **{name: round(float(values[index]), 4) for name, values in medians.items()},
                }
            )
    return typed_frame(rows, BUCKETS)


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


def _single_steps(blocks: pd.DataFrame) -> dict[str, list[float]]:
    timed = blocks[blocks["phase"] == "timed"]
    steps: dict[str, list[float]] = {}
    for case_id, text in zip(timed["case_id"], timed["steps_ms"], strict=True):
        if isinstance(text, str):
            steps.setdefault(str(case_id), []).extend(float(part) for part in text.split())
    return steps


def _identity(outcome: Outcome) -> dict[str, Any]:
    planned, case = outcome.planned, outcome.planned.case
    row = {
        **asdict(case),
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
