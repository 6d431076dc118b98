"""Reads of a run what calibrations need, and predicts its cases that nothing was fitted to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import pandas as pd
from msgspec import Meta

from ..buckets import BucketLayout, bucket_caps
from ..case import HALF_HOOKS, wire_share
from ..conditions import machine_name
from ..errors import UsageError
from ..findings.wording import step_labels
from ..results.case_result import CaseResult, text
from ..results.round_times import ByRound, RoundTimes
from ..results.schema import records
from ..results.store import RunData
from ..stats.interval import Interval
from .allreduce import AllReduceTimes, measured_curve
from .calibration import Calibration, Identity, differences
from .networks import NetworkModel
from .prediction import predict
from .scenario import Scenario


def ddp_cases(run: RunData, *, least: int = 2) -> list[dict[str, Any]]:
    """List the measured DDP cases of `least` devices or more whose layout is known."""
    cases = run.cases
    chosen = cases[(cases["mode"] == "ddp") & (cases["status"] == "ok") & (cases["num_devices"] >= least)]
    return records(chosen[chosen["bucket_bytes"].notna()])


def single_steps(run: RunData, wanted: Identity) -> ByRound:
    """Give the step of `single` with that batch and step by round, ms; empty where it was not measured."""
    cases = run.cases[(run.cases["mode"] == "single") & (run.cases["status"] == "ok")]
    rows = records(cases[cases["batch_per_device"] == wanted.batch_per_device])
    case_id = next((str(row["case_id"]) for row in rows if _step(row) == wanted.step), "")
    return run.times.step_ms("timed").get(case_id, {})


def _step(case: Mapping[Any, Any]) -> str:
    return ", ".join(step_labels(CaseResult.of(case))[1:])


def identity(run: RunData, case: Mapping[str, Any]) -> Identity:
    """Identify the workload and machine of a run's case."""
    counted = CaseResult.of(case)
    return Identity(
        arch=str(case["arch"]),
        image_size=None if pd.isna(case["image_size"]) else int(case["image_size"]),
        batch_per_device=int(case["batch_per_device"]),
        precision=str(case["precision"]),
        device_type=str(case["device_type"]),
        device_name=str(case["device_name"]),
        torch=run.manifest.versions.get("torch", ""),
        host=machine_name(run.manifest.environment),
        link=None if pd.isna(case["link"]) else str(case["link"]),
        step=_step(case),
        unit=counted.unit,
        units_per_sample=counted.units_per_sample,
    )


def most_like(run: RunData, wanted: Identity) -> Identity | None:
    """Identify the DDP case of a run that differs least from `wanted`; None without one.

    Under strong scaling the batch per device is another at every count.
    """
    found = [identity(run, case) for case in ddp_cases(run, least=1)]
    return min(found, key=lambda one: len(differences(one, wanted)), default=None)


def local_steps(blocks: pd.DataFrame, *phases: str) -> tuple[ByRound, float]:
    """Give a typical rank's step by round, ms, and how many times as long the slowest takes."""
    steps: dict[int, dict[int, list[float]]] = {}
    chosen = blocks[blocks["phase"].isin(phases)]
    for r, rank, ms in zip(chosen["round"], chosen["rank"], chosen["steps_ms"], strict=True):
        steps.setdefault(int(r), {}).setdefault(int(rank), []).extend(map(float, str(ms).split()))
    typical = {r: float(np.median(np.concatenate(list(ranks.values())))) for r, ranks in steps.items()}
    # As throughput is measured: the mean of a round's steps, each of the slowest rank.
    longest = {r: mean(map(max, zip(*ranks.values(), strict=False))) for r, ranks in steps.items()}
    return typical, median(longest[r] / typical[r] for r in steps) if steps else 1.0


def allreduce_times(run: RunData, case: Mapping[str, Any]) -> AllReduceTimes:
    """Bring the measured curve in line with what the case's buckets took.

    The curve is taken once and in one go, the buckets in every round: what held the network up just then
    is no part of any step. Raises UsageError where there is no curve.
    """
    replay = list(bucket_ms_by_round(run, str(case["case_id"])).values())
    share = wire_share(str(case["comm_hook"]))
    sent = [size * share for size in BucketLayout.parse(str(case["bucket_bytes"])).num_bytes]
    num_ranks, backend = int(case["num_devices"]), str(case["backend"])
    rows = run.allreduce[(run.allreduce["num_devices"] == num_ranks) & (run.allreduce["backend"] == backend)]
    columns = ["bytes", "time_ms_low", "time_ms", "time_ms_high"]
    points = tuple(
        (int(size), tuple(ms for ms in times if not math.isnan(ms)))
        for size, *times in rows[columns].itertuples(index=False)
    )
    if not points:
        raise UsageError(
            f"{run.path}: {case['case_id']} has no communication measured by itself; measure it again"
        )
    by_curve_ms = sum(map(measured_curve(points), sent))
    factor = median(replay) / by_curve_ms if replay and by_curve_ms else 0.0
    # One factor; what took no time tells none.
    points = tuple((size, tuple(ms * (factor or 1.0) for ms in times)) for size, times in points)
    return AllReduceTimes(num_ranks=num_ranks, backend=backend, points=points)


def bucket_ms_by_round(run: RunData, case_id: str) -> ByRound:
    """Give what the all-reduces of a case's buckets took by themselves: the replay less DDP's buffers."""
    blocks = run.blocks[(run.blocks["case_id"] == case_id) & (run.blocks["phase"] == "comm")]
    details = [json.loads(text) if isinstance(text, str) else {} for text in blocks["detail"]]
    buffers_ms = [float(detail.get("buffers_ms", 0.0)) for detail in details]
    of_buckets = blocks.assign(block_ms=blocks["block_ms"] - buffers_ms, detail=None)
    return RoundTimes.of(of_buckets).step_ms("comm").get(case_id, {})


@dataclass(frozen=True)
class HeldOut:
    """One measured case and its prediction."""

    case_id: str
    num_devices: int
    measured_ms: Annotated[float, Meta(gt=0, le=1e15)]
    """A step: global batch over throughput."""
    predicted_ms: Interval
    network: str = ""
    """Rate of the link that joined a lab's hosts; empty on a real network."""

    @property
    def error_pct(self) -> float:
        """Predicted over measured, less 1, percent."""
        return 100 * (self.predicted_ms.estimate / self.measured_ms - 1)


def held_out(
    calibration: Calibration, run: RunData, *, fitted: str, network: NetworkModel | None = None
) -> list[HeldOut]:
    """Predict every measured DDP case of `run` but `fitted` that a scenario can describe.

    `network` joins the nodes of `run` where it is another than the calibration's.
    """
    found = []
    for row in ddp_cases(run):
        described = row["comm_hook"] in ("none", *HALF_HOOKS) and not row["sync_batchnorm"]
        if row["case_id"] == fitted or not described or pd.isna(row["images_per_s"]):
            continue
        scenario = Scenario(
            num_devices=int(row["num_devices"]),
            network=network,
            bucket_cap_mb=bucket_caps(str(row["bucket_cap_mb"])),
            batch_size=int(row["batch_per_device"]),
            comm_hook=str(row["comm_hook"]),
            accumulate=int(row["accumulate"]),
        )
        each = CaseResult.of(row).units_per_sample
        found.append(
            HeldOut(
                str(row["case_id"]),
                scenario.num_devices,
                float(row["global_batch"]) * each * 1000 / float(row["images_per_s"]),
                predict(calibration, scenario).step_ms,
                text(row["link"]),
            )
        )
    return found


def error_sizes(cases: Sequence[HeldOut]) -> list[float]:
    """The errors of the cases, percent, without signs; the largest widens intervals."""
    return [abs(case.error_pct) for case in cases]
