"""From blocks to the rows of cases.csv. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from bench.plan import Planned
from bench.schema import CASES
from bench.stats import Interval, median_interval, paired_ratio
from bench.store import typed_frame

ByRound = dict[int, float]


@dataclass(frozen=True)
class Outcome:
    """What became of a planned case, beside its blocks; `facts` are columns of cases.csv."""

    planned: Planned
    status: str = "ok"
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def step_ms_by_round(blocks: pd.DataFrame, phase: str) -> dict[str, ByRound]:
    """Milliseconds per step of every case and round: the longest rank's block time over its steps."""
    chosen = blocks[blocks["phase"] == phase]
    if chosen.empty:
        return {}
    per_step = (chosen["block_ms"] / chosen["num_steps"].astype("float64")).groupby(
        [chosen["case_id"], chosen["round"]], sort=True
    )
    result: dict[str, ByRound] = {}
    longest = per_step.max().reset_index(name="ms")
    for case_id, round_index, ms in longest.itertuples(index=False):
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
    single = next((throughput.get(c, {}) for c, o in _by_id(outcomes) if o.planned.case.mode == "single"), {})
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
        rows.append(row)
    return typed_frame(rows, CASES)


def _communication(timed: ByRound, no_sync: ByRound, comm: ByRound) -> dict[str, Any]:
    both = sorted(timed.keys() & no_sync.keys())
    exposed = {r: timed[r] - no_sync[r] for r in both}
    hidden = [100 * min(max(1 - exposed[r] / comm[r], 0.0), 1.0) for r in both if comm.get(r, 0.0) > 0]
    row: dict[str, Any] = {}
    if exposed:
        row["no_sync_step_ms"] = float(np.median([no_sync[r] for r in both]))
        row |= _columns("exposed_comm_ms", median_interval(list(exposed.values())))
    if comm:
        row |= _columns("comm_ms", median_interval(list(comm.values())))
    if hidden:
        row |= _columns("hidden_pct", median_interval(hidden))
    return row


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
        for ddp_only in (
            "backend",
            "bucket_cap_mb",
            "gradient_as_bucket_view",
            "static_graph",
            "find_unused_parameters",
            "sync_buffers",
            "sync_batchnorm",
            "comm_hook",
        ):
            row[ddp_only] = None
    return {key: None if value == "" else value for key, value in row.items()}


def _by_id(outcomes: Iterable[Outcome]) -> list[tuple[str, Outcome]]:
    return [(o.planned.case.case_id, o) for o in outcomes]


def _columns(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


def worst_half_width(rows: pd.DataFrame) -> float:
    """The widest throughput interval of any measured case, as a fraction; NaN before two rounds."""
    measured = rows[rows["status"] == "ok"]
    if measured.empty or measured["images_per_s_low"].isna().any():
        return math.nan
    widths = (measured["images_per_s_high"] - measured["images_per_s_low"]) / (2 * measured["images_per_s"])
    return float(widths.max())
