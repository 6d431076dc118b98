"""From blocks to the rows of cases.csv."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from ..machine.gpus import ClockReason
from ..plan.buckets import BucketLayout, caps_mib
from ..plan.case_settings import MODE_SETTINGS, SETTINGS_OF
from ..plan.modes import RANK_PER_DEVICE
from ..plan.sweep import Planned
from ..stats.fit import MIN_ROUNDS, Typical
from ..stats.interval import Estimate, Interval, median_interval, median_intervals, median_of_ratios
from .block_times import DEVICE_ALLOCS
from .case_columns import CASES, METRICS
from .case_result import CaseResult
from .columns import BUCKETS, EXPOSED_COMM, NO_SYNC, typed_frame
from .comparisons import ONE, Comparison, over_default
from .round_times import ByRound, RoundTimes

SHARES = ("overlap_trace_pct", "overlap_window_pct", "dp_device0_pct")
"""Columns that cannot leave 0-100, nor can their intervals."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a planned case, beside its blocks; `facts` are columns of cases.csv."""

    planned: Planned
    status: str = "ok"
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def units_per_step(cases: Iterable[CaseResult]) -> dict[str, int]:
    """Return the units that an optimizer step of each case trains over all devices, as in its rates."""
    return {
        case.case_id: int(case.global_batch) * case.units_per_sample
        for case in cases
        if case.global_batch is not None
    }


def images_per_s_by_round(times: RoundTimes, units: Mapping[str, int]) -> dict[str, ByRound]:
    """Throughput of every case and round: units per step x steps / longest rank's block time."""
    return {
        case_id: {r: units[case_id] * 1000 / ms for r, ms in rounds.items()}
        for case_id, rounds in times.step_ms("timed").items()
        if case_id in units
    }


def metrics_by_round(cases: Sequence[CaseResult], times: RoundTimes) -> dict[str, dict[str, ByRound]]:
    """Return by case and metric the value of each round; without rounds, as of memory, the only one.

    Ratios to `single` are formed within a round; `single` itself has none.
    """
    timed, local = (times.step_ms(phase) for phase in ("timed", "no_sync"))
    rates = images_per_s_by_round(times, units_per_step(cases))
    singles = {case.variant: case.case_id for case in cases if case.mode == "single"}
    found = {}
    for case in cases:
        case_id = case.case_id
        steps, alone, rate = (by_case.get(case_id, {}) for by_case in (timed, local, rates))
        single = {} if case.mode == "single" else rates.get(singles.get(case.variant, ""), {})
        speedup = {r: rate[r] / single[r] for r in rate if r in single}
        once = {name: case.number(name) for name, metric in METRICS.items() if not metric.repeated}
        found[case_id] = {
            "step_ms": steps,
            "images_per_s": rate,
            "speedup": speedup,
            "efficiency": {r: ratio / case.num_devices for r, ratio in speedup.items()}
            if case.has_efficiency
            else {},
            EXPOSED_COMM: {r: ms - alone[r] for r, ms in steps.items() if r in alone},
            **{name: {} if value is None else {0: value} for name, value in once.items()},
        }
    return found


def case_rows(
    outcomes: Sequence[Outcome],
    times: RoundTimes,
    comparisons: Sequence[Comparison] = (),
    *,
    run: Mapping[str, Any] = MappingProxyType({}),
    typical: Typical | None = None,
) -> pd.DataFrame:
    """cases.csv: one row per planned case, measured or not.

    `run` are columns that are the same for every case; `typical` is the fit of the blocks, if already known.
    """
    typical = typical or times.fitted()
    identities = [identity(outcome) for outcome in outcomes]
    cases = [*map(CaseResult.of, identities)]
    estimates, vs_default = estimates_of_cases(cases, typical), over_default(comparisons, cases)
    units = units_per_step(cases)
    rows = []
    for case, known in zip(cases, identities, strict=True):
        row, case_id = {**known, **run}, case.case_id
        found = times.of_case(case_id)
        if timed := found.step_ms.get("timed"):
            slowdown = median_of_ratios(found.step_ms.get("anatomy", {}), timed)
            watts = found.details.get("power_w", {})
            joules = {r: w * timed[r] / 1000 / units[case_id] for r, w in watts.items() if r in timed}
            medians = found.details | {"joules_per_image": joules}
            degrees, throttled = (medians.pop(name, {}) for name in ("temperature_c", "throttled_pct"))
            causes = found.throttled_by
            reasons = sorted((why for why in ClockReason if why in causes), key=lambda why: -causes[why])
            intervals = {
                **dict.fromkeys(("speedup", "efficiency") if case.mode == "single" else (), ONE),
                **{
                    name: one.interval() if METRICS[name].in_parts_of else one.interval().exp()
                    for name, one in estimates.get(case_id, {}).items()
                },
                "step_ms": typical.step_ms(case_id),
                "no_sync_step_ms": typical.step_ms(case_id, "no_sync"),
                "comm_ms": typical.step_ms(case_id, "comm"),
                "anatomy_slowdown_pct": slowdown.plus(-1).scaled(100),
                **{name: median_interval([*by_round.values()]) for name, by_round in medians.items()},
            }
            # Few rounds tell nothing of what is hidden. SyncBatchNorm's messages are exposed, and not among
            # the buckets that `comm_ms` is of.
            if len(timed) >= MIN_ROUNDS and not known["sync_batchnorm"]:
                intervals["hidden_pct"] = typical.hidden_pct(case_id)
            for name, interval in intervals.items():
                row |= _columns(name, interval)
            if pd.notna(row.get(EXPOSED_COMM)):
                row.setdefault("exposed_by", NO_SYNC)
            row |= {
                "images_per_s_sustained": units[case_id] * 1000 * found.num_steps / found.timed_ms,
                **{f"step_ms_p{percent}": found.percentile_ms(percent) for percent in (50, 75, 95, 99)},
                "ranked": case.is_ranked,
                "num_rounds": len(timed),
                "num_blocks": sum(map(len, found.step_ms.values())),
                "slowest_rank": found.slowest_rank(),
                DEVICE_ALLOCS: sum(found.device_allocs) if found.device_allocs else None,
                "temperature_c": max(degrees.values(), default=None),
                "throttled_pct": fmean(throttled.values()) if throttled else None,
                "throttle_reasons": ", ".join(reasons) or None,
            }
        if case_id in vs_default:
            row |= _columns("vs_ddp_default", vs_default[case_id])
        rows.append(row)
    return typed_frame(rows, CASES)


def estimates_of_cases(cases: Sequence[CaseResult], typical: Typical) -> dict[str, dict[str, Estimate]]:
    """The repeated metrics of measured cases as their run's fit gives them; all but ms are logarithms.

    Speed-up and efficiency are over the case of `single` with as large a batch that is compiled alike, which
    itself has none. That takes an optimizer step for each batch: a case that accumulates has no efficiency.
    """
    units, singles = units_per_step(cases), {c.variant: c.case_id for c in cases if c.mode == "single"}
    found: dict[str, dict[str, Estimate]] = {}
    for case in cases:
        case_id, single = case.case_id, singles.get(case.variant)
        if not typical.has((case_id, "timed")):
            continue
        step = typical.log_step(case_id)
        rate = replace(step, value=math.log(units[case_id] * 1000) - step.value)
        found[case_id] = {"images_per_s": rate, EXPOSED_COMM: typical.exposed(case_id)}
        if single and single != case_id:
            speedup = typical.log_ratio(single, case_id).plus(math.log(units[case_id] / units[single]))
            found[case_id]["speedup"] = speedup
            if case.has_efficiency:
                found[case_id]["efficiency"] = speedup.plus(-math.log(case.num_devices))
    return found


def bucket_rows(layouts: Mapping[str, BucketLayout], times: RoundTimes) -> pd.DataFrame:
    """buckets.csv: every bucket of every DDP case and rank, its moments as medians over blocks."""
    rows = []
    for case_id, layout in sorted(layouts.items()):
        for rank, moments in sorted(times.of_case(case_id).bucket_moments(len(layout.num_bytes)).items()):
            if "ready_ms" in moments:
                # DDP launches a bucket once it and every bucket before it is ready (reducer.cpp).
                moments["launch_ms"] = np.maximum.accumulate(moments["ready_ms"], axis=1)
            intervals = {name: median_intervals(values) for name, values in moments.items()}
            for index, num_bytes in enumerate(layout.num_bytes):
                num_params = len(layout.parameters[index]) if layout.parameters else None
                row = {"case_id": case_id, "rank": rank, "bucket": index, "bytes": num_bytes}
                cells = [found[index].columns(name).items() for name, found in intervals.items()]
                rounded = {column: round(value, 4) for pairs in cells for column, value in pairs}
                rows.append({**row, "num_params": num_params, **rounded})
    return typed_frame(rows, BUCKETS)


def bus_gb(num_bytes: float, num_ranks: int) -> float:
    """10^9 bytes that each link must carry for an all-reduce, 2 (n - 1) / n of them.

    Over the time this is nccl-tests' bus bandwidth, comparable over rank counts.
    """
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / 1e9


def allreduce_rows(
    num_ranks: int, backend: str, times_ms: Mapping[int, Sequence[float]]
) -> list[dict[str, Any]]:
    """allreduce.csv: time of one message by size, with its bus bandwidth."""
    return [
        {
            "num_devices": num_ranks,
            "backend": backend,
            "bytes": num_bytes,
            **median_interval(samples).columns("time_ms"),
            "busbw_gb_per_s": bus_gb(num_bytes, num_ranks) * 1000 / float(np.median(samples)),
            "num_samples": len(samples),
        }
        for num_bytes, samples in sorted(times_ms.items())
    ]


def identity(outcome: Outcome) -> dict[str, Any]:
    """Return the row of cases.csv of a case before it is measured."""
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
    caps = caps_mib(case.bucket_cap_mb)
    row["cap_mib"] = caps[0] if case.mode == "ddp" and len(caps) == 1 else None
    of_others = {
        "backend": RANK_PER_DEVICE,
        **{s.name: [mode for mode, own in SETTINGS_OF.items() if s in own] for s in MODE_SETTINGS},
    }
    del of_others["accumulate"]  # it multiplies the batch of every mode
    row |= {name: None for name, modes in of_others.items() if case.mode not in modes}
    return {key: None if value == "" else value for key, value in row.items()}


def _columns(name: str, interval: Interval) -> dict[str, float]:
    if name in SHARES:
        interval = Interval(interval.estimate, max(interval.low, 0.0), min(interval.high, 100.0))
    return interval.columns(name)


def rate_half_widths(rows: pd.DataFrame, *, with_single: bool = False) -> dict[str, float]:
    """Half the interval of each measured case's throughput over it; `single` is what others refer to."""
    measured = rows[(rows["status"] == "ok") & (with_single | (rows["mode"] != "single"))]
    widths = (measured["images_per_s_high"] - measured["images_per_s_low"]) / (2 * measured["images_per_s"])
    return dict(zip(measured["case_id"], widths.astype(float), strict=True))
