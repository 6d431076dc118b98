"""The tables of a run, made of its log: its blocks become the rows of cases.csv."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..machine.manifest import Manifest
from ..plan.buckets import BucketLayout, compute_ring_factor, parse_caps_mib
from ..plan.case import Case
from ..plan.case_settings import MODE_SETTINGS, SETTINGS_OF
from ..plan.modes import RANK_PER_DEVICE
from ..plan.settings import IMAGES, PARAMETER_PRECISIONS
from ..plan.sweep import Planned
from ..stats.fit import FittedSteps
from ..stats.interval import Estimate, Interval, compute_median_interval, compute_median_intervals
from .blocks import Block
from .case_columns import CASES, METRICS
from .case_result import CaseResult, add_singles
from .columns import ALLREDUCE, BUCKETS, BY_PLAN, COMPARISONS, NOT_REACHED, Column, Metric, make_frame
from .comparisons import UNIT_RATIO, Comparison, compare_pairs, compute_speedup_over_default, list_pairs
from .journal import Curve, Settled, State
from .metrics import SINGLE
from .round_times import ByRound, CaseTimes, RoundTimes
from .run_folder import write_blocks, write_table


def compute_images_per_s(times: RoundTimes, cases: Iterable[CaseResult | Case]) -> dict[str, ByRound]:
    """Throughput of every measured case and round: units per step x steps / longest rank's block time."""
    units, timed = {case.case_id: case.units_per_step for case in cases}, times.collect_step_ms("timed")
    return {
        case_id: {r: units[case_id] * 1000 / ms for r, ms in rounds.items()}
        for case_id, rounds in timed.items()
        if units.get(case_id)
    }


def compute_metrics_by_round(cases: Iterable[CaseResult], times: RoundTimes) -> dict[str, dict[str, ByRound]]:
    """Return by case and metric the value of each round; without rounds, as of memory, the only one."""

    def compute_by_round(metric: Metric, case: CaseResult) -> ByRound:
        if metric.formula:
            return metric.formula.compute_by_round(case, times)
        value = case.get_number(metric.name)
        return {} if value is None else {0: value}

    return {
        case.case_id: {name: compute_by_round(metric, case) for name, metric in METRICS.items()}
        for case in add_singles(cases)
    }


def estimate_cases(cases: Iterable[CaseResult], typical: FittedSteps) -> dict[str, dict[str, Estimate]]:
    """Return by case and metric what their run's fit gives; all but ms are logarithms."""
    formulas = {name: metric.formula for name, metric in METRICS.items() if metric.formula}
    return {
        case.case_id: {name: formula.estimate(case, typical) for name, formula in formulas.items()}
        for case in add_singles(cases)
    }


def make_case_rows(
    planned: Iterable[Mapping[str, Any]],
    times: RoundTimes,
    comparisons: Sequence[Comparison] = (),
    *,
    typical: FittedSteps | None = None,
) -> pd.DataFrame:
    """cases.csv: one row per planned case, measured or not.

    `planned` has the row of each before it is measured; `typical` is the fit of the blocks, if already known.
    """
    typical = typical or times.fit_steps()
    rows = [dict(row) for row in planned]
    cases = add_singles(map(CaseResult.from_row, rows))
    vs_default = compute_speedup_over_default(comparisons, cases)
    for case, row in zip(cases, rows, strict=True):
        found = times.get_case(case.case_id)
        if found.get_steps():
            for column in _OF_BLOCKS:
                row.update(_make_cells(column, case, found, typical))
        if case.case_id in vs_default:
            row.update(vs_default[case.case_id].to_columns("vs_ddp_default"))
    return make_frame(rows, CASES)


_OF_BLOCKS = [column for column in CASES if column.formula or column.value or column.has_interval]


def _make_cells(column: Column, case: CaseResult, times: CaseTimes, typical: FittedSteps) -> dict[str, Any]:
    """Return the cells of a column of a measured case, with its ends."""
    if not column.formula and not column.has_interval:
        return {column.name: column.value(case, times)} if column.value else {}
    if column.formula and SINGLE in column.formula.phases and case.mode == "single":
        return UNIT_RATIO.to_columns(column.name)
    if column.formula:
        found = column.formula.estimate(case, typical).compute_interval()
        found = found.exponentiate() if column.formula.is_log else found
    else:
        by_round = column.value(case, times) if column.value else times.get_values(column.name)
        if not by_round:
            return {}
        found = compute_median_interval([*by_round.values()])
    low, high = column.ends
    return Interval(found.estimate, max(found.low, low), min(found.high, high)).to_columns(column.name)


def make_bucket_rows(layouts: Mapping[str, BucketLayout], times: RoundTimes) -> pd.DataFrame:
    """buckets.csv: every bucket of every DDP case and rank, its moments as medians over blocks."""
    rows = []
    for case_id, layout in sorted(layouts.items()):
        for rank, moments in sorted(
            times.get_case(case_id).collect_bucket_moments(len(layout.num_bytes)).items()
        ):
            if "ready_ms" in moments:
                # DDP launches a bucket once it and every bucket before it is ready (reducer.cpp).
                moments["launch_ms"] = np.maximum.accumulate(moments["ready_ms"], axis=1)
            intervals = {name: compute_median_intervals(values) for name, values in moments.items()}
            for index, num_bytes in enumerate(layout.num_bytes):
                num_params = len(layout.parameters[index]) if layout.parameters else None
                row = {"case_id": case_id, "rank": rank, "bucket": index, "bytes": num_bytes}
                cells = [found[index].to_columns(name).items() for name, found in intervals.items()]
                rounded = {column: round(value, 4) for pairs in cells for column, value in pairs}
                rows.append({**row, "num_params": num_params, **rounded})
    return make_frame(rows, BUCKETS)


def compute_bus_gb(num_bytes: float, num_ranks: int) -> float:
    """10^9 bytes that each link must carry for an all-reduce.

    Over the time this is nccl-tests' bus bandwidth, comparable over rank counts.
    """
    return compute_ring_factor(num_ranks) * num_bytes / 1e9


def make_allreduce_rows(curves: Iterable[Curve]) -> pd.DataFrame:
    """allreduce.csv: time of one message by size, with its bus bandwidth."""
    rows = [
        {
            "num_devices": curve.num_ranks,
            "backend": curve.backend,
            "bytes": num_bytes,
            **compute_median_interval(samples).to_columns("time_ms"),
            "busbw_gb_per_s": compute_bus_gb(num_bytes, curve.num_ranks) * 1000 / float(np.median(samples)),
            "num_samples": len(samples),
        }
        for curve in curves
        for num_bytes, samples in sorted(curve.times_ms)
    ]
    return make_frame(rows, ALLREDUCE)


def describe_planned_case(planned: Planned, **facts: Any) -> dict[str, Any]:
    """Return the row of cases.csv of a case before it is measured; `facts` are further columns."""
    case = planned.case
    row = {
        **case.to_row(),
        "case_id": case.case_id,
        "impl": case.impl,
        "global_batch": case.global_batch,
        "num_nodes": planned.num_nodes,
        "oversubscribed": planned.oversubscribed,
        "status": "ok",
        **facts,
    }
    caps = parse_caps_mib(case.bucket_cap_mb)
    row["cap_mib"] = caps[0] if case.mode == "ddp" and len(caps) == 1 else None
    of_others = {
        "backend": RANK_PER_DEVICE,
        **{s.name: [mode for mode, own in SETTINGS_OF.items() if s in own] for s in MODE_SETTINGS},
    }
    del of_others["accumulate"]  # it multiplies the batch of every mode
    row |= {name: None for name, modes in of_others.items() if case.mode not in modes}
    return {key: None if value == "" else value for key, value in row.items()}


def compute_rate_half_widths(rows: pd.DataFrame, *, with_single: bool = False) -> dict[str, float]:
    """Half the interval of each measured case's throughput over it; `single` is what others refer to."""
    measured = rows[(rows["status"] == "ok") & (with_single | (rows["mode"] != "single"))]
    widths = (measured["images_per_s_high"] - measured["images_per_s_low"]) / (2 * measured["images_per_s"])
    return dict(zip(measured["case_id"], widths.astype(float), strict=True))


NOT_REACHED_REASON = "not measured: the run ended before this case's first block"
"""Reason of a case that is shown as skipped because its turn never came."""


@dataclass(frozen=True)
class LogTables:
    """The tables that follow from a run's log; a case without a block yet counts as not reached."""

    manifest: Manifest
    state: State
    pairs: Sequence[tuple[str, str]] | None = None
    """Cases to compare, where they are others than `list_pairs` would have."""

    @property
    def _times(self) -> RoundTimes:
        assert self.state.times is not None  # who makes tables has asked for them
        return self.state.times

    def list_pairs(self) -> Sequence[tuple[str, str]]:
        """List the pairs to compare; a case whose bucket layout another has stands for nothing."""
        if self.pairs is not None:
            return self.pairs
        skipped = {index for index, known in self.state.settled.items() if known.status == "skipped"}
        plan = [p for i, p in enumerate(self.state.plan) if p.skip_reason is None and i not in skipped]
        return list_pairs(CaseResult.from_row(describe_planned_case(p)) for p in plan)

    @cached_property
    def _typical(self) -> FittedSteps:
        return self._times.fit_steps()

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Return the comparisons that the run answers."""
        units = {p.case.case_id: p.case.units_per_step for p in self.state.plan}
        return compare_pairs(self.list_pairs(), self._typical, units=units, margin=self.manifest.margin)

    @cached_property
    def cases(self) -> pd.DataFrame:
        """cases.csv."""
        rows = self._describe_cases()
        return make_case_rows(rows, self._times, self.comparisons, typical=self._typical)

    def _describe_cases(self) -> Iterator[dict[str, Any]]:
        """Yield what is known of each case beside its blocks."""
        run = {
            "run_id": self.manifest.run_id,
            "started_at": self.manifest.created_utc,
            "torch_version": self.manifest.versions.get("torch"),
        }
        own = PARAMETER_PRECISIONS.get(self.manifest.model.dtype or "")
        if own and self.manifest.settings.precision in ("fp32", "tf32"):
            run["precision"] = own
        measured = self._times.collect_step_ms("timed")
        for index, planned in enumerate(self.state.plan):
            known = self.state.settled.get(index) or Settled(index=index, status="ok")
            told = {**known.facts, "status": known.status, "reason": known.reason}
            if planned.skip_reason:
                told = {"status": "skipped", "reason": planned.skip_reason, "reason_code": BY_PLAN}
            elif known.status == "ok" and planned.case.case_id not in measured:
                told |= {"status": "skipped", "reason": NOT_REACHED_REASON, "reason_code": NOT_REACHED}
            yield describe_planned_case(planned, **told | run)

    def write(self, folder: Path, blocks: Iterable[Block]) -> None:
        """Write all tables of a run with these blocks. Raises OSError."""
        unit = next((p.case.unit for p in self.state.plan), IMAGES)
        compared = make_frame((one.to_row(unit) for one in self.comparisons), COMPARISONS)
        write_blocks(folder, blocks)
        write_table(folder, "buckets.csv", make_bucket_rows(self.state.layouts, self._times))
        write_table(folder, "allreduce.csv", make_allreduce_rows(self.state.curves.values()))
        write_table(folder, "comparisons.csv", compared)
        write_table(folder, "cases.csv", self.cases)
