"""Reads of a run what calibrations need, and predicts its cases that nothing was fitted to."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Annotated

import numpy as np
import pandas as pd
from msgspec import Meta

from ..common.errors import UsageError
from ..findings.wording import label_step
from ..machine.conditions import name_machine
from ..plan.buckets import BucketLayout, parse_bucket_caps
from ..plan.case import HALF_HOOKS, get_wire_share
from ..results.case_result import CaseResult
from ..results.round_times import ByRound, RoundTimes, group_blocks
from ..results.store import RunData
from ..stats.interval import Interval
from .allreduce import AllReduceTimes, make_curve
from .calibration import Calibration, Identity, list_differences
from .networks import NetworkModel
from .prediction import Scenario, predict


def list_ddp_cases(run: RunData, *, least: int = 2) -> list[CaseResult]:
    """List the measured DDP cases of `least` devices or more whose layout is known."""
    ok = (case for case in run.results if case.is_ok and case.mode == "ddp" and case.bucket_bytes)
    return [case for case in ok if case.num_devices >= least]


def get_single_steps(run: RunData, wanted: Identity) -> ByRound:
    """Give the step of `single` with that batch and step by round, ms; empty where it was not measured."""
    singles = (case for case in run.results if case.is_ok and case.mode == "single")
    alike = (case for case in singles if case.batch_per_device == wanted.batch_per_device)
    case_id = next((case.case_id for case in alike if _label_step(case) == wanted.step), "")
    return run.times.collect_step_ms("timed").get(case_id, {})


def _label_step(case: CaseResult) -> str:
    return ", ".join(label_step(case)[1:])


def describe_identity(run: RunData, case: CaseResult) -> Identity:
    """Identify the workload and machine of a run's case."""
    return Identity(
        arch=case.arch,
        image_size=None if case.image_size is None else int(case.image_size),
        batch_per_device=int(case.batch_per_device or 0),
        precision=case.precision,
        device_type=case.device_type,
        device_name=case.device_name,
        torch=run.manifest.versions.get("torch", ""),
        host=name_machine(run.manifest.environment),
        link=case.link or None,
        step=_label_step(case),
        unit=case.unit,
        units_per_sample=case.units_per_sample,
    )


def find_closest_identity(run: RunData, wanted: Identity) -> Identity | None:
    """Identify the DDP case of a run that differs least from `wanted`; None without one.

    Under strong scaling the batch per device is another at every count.
    """
    found = [describe_identity(run, case) for case in list_ddp_cases(run, least=1)]
    return min(found, key=lambda one: len(list_differences(one, wanted)), default=None)


def collect_local_steps(blocks: pd.DataFrame, *phases: str) -> tuple[ByRound, float]:
    """Give a typical rank's step by round, ms, and how many times as long the slowest takes."""
    steps: dict[int, dict[int, list[float]]] = {}
    chosen = blocks[blocks["phase"].isin(phases)]
    for r, rank, ms in zip(chosen["round"], chosen["rank"], chosen["steps_ms"], strict=True):
        steps.setdefault(int(r), {}).setdefault(int(rank), []).extend(map(float, str(ms).split()))
    typical = {r: float(np.median(np.concatenate(list(ranks.values())))) for r, ranks in steps.items()}
    # As throughput is measured: the mean of a round's steps, each of the slowest rank.
    longest = {r: mean(map(max, zip(*ranks.values(), strict=False))) for r, ranks in steps.items()}
    return typical, median(longest[r] / typical[r] for r in steps) if steps else 1.0


def fit_allreduce_times(run: RunData, case: CaseResult) -> AllReduceTimes:
    """Bring the measured curve in line with what the case's buckets took.

    The curve is taken once and in one go, the buckets in every round: what held the network up just then
    is no part of any step. Raises UsageError where there is no curve.
    """
    replay = list(collect_bucket_ms(run, case.case_id).values())
    share = get_wire_share(case.get_setting("comm_hook"))
    sent = [size * share for size in BucketLayout.parse(case.bucket_bytes).num_bytes]
    num_ranks, backend = case.num_devices, case.backend
    rows = run.allreduce[(run.allreduce["num_devices"] == num_ranks) & (run.allreduce["backend"] == backend)]
    columns = ["bytes", "time_ms_low", "time_ms", "time_ms_high"]
    points = tuple(
        (int(size), tuple(ms for ms in times if not math.isnan(ms)))
        for size, *times in rows[columns].itertuples(index=False)
    )
    if not points:
        raise UsageError(
            f"{run.path}: {case.case_id} has no communication measured by itself; measure it again"
        )
    by_curve_ms = sum(map(make_curve(points), sent))
    factor = median(replay) / by_curve_ms if replay and by_curve_ms else 0.0
    # One factor; what took no time tells none.
    points = tuple((size, tuple(ms * (factor or 1.0) for ms in times)) for size, times in points)
    return AllReduceTimes(num_ranks=num_ranks, backend=backend, points=points)


def collect_bucket_ms(run: RunData, case_id: str) -> ByRound:
    """Give what the all-reduces of a case's buckets took by themselves: the replay less DDP's buffers."""
    blocks = run.blocks[(run.blocks["case_id"] == case_id) & (run.blocks["phase"] == "comm")]
    details = [json.loads(text) if isinstance(text, str) else {} for text in blocks["detail"]]
    buffers_ms = [float(detail.get("buffers_ms", 0.0)) for detail in details]
    of_buckets = blocks.assign(block_ms=blocks["block_ms"] - buffers_ms)
    return RoundTimes(group_blocks(of_buckets)).collect_step_ms("comm").get(case_id, {})


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


def predict_held_out(
    calibration: Calibration, run: RunData, *, fitted: str, network: NetworkModel | None = None
) -> list[HeldOut]:
    """Predict every measured DDP case of `run` but `fitted` that a scenario can describe, at its batch size.

    `network` joins the nodes of `run` where it is another than the calibration's.
    """
    found = []
    own = {case.batch for case in run.results if case.case_id == fitted}
    for case in list_ddp_cases(run):
        hook, rate = case.get_setting("comm_hook"), case.images_per_s
        described = hook in ("none", *HALF_HOOKS) and case.get_setting("sync_batchnorm") == "False"
        is_other = case.case_id == fitted or (own and case.batch not in own)
        if is_other or not described or rate is None:
            continue
        scenario = Scenario(
            num_devices=case.num_devices,
            network=network,
            bucket_cap_mb=parse_bucket_caps(case.get_setting("bucket_cap_mb")),
            batch_size=int(case.batch_per_device or 0),
            comm_hook=hook,
            accumulate=int(case.get_setting("accumulate")),
        )
        measured_ms = 1000 * (case.global_batch or 0.0) * case.units_per_sample / rate.estimate
        predicted_ms = predict(calibration, scenario).step_ms
        found.append(HeldOut(case.case_id, case.num_devices, measured_ms, predicted_ms, case.link))
    return found


def list_error_sizes(cases: Sequence[HeldOut]) -> list[float]:
    """List the errors of the cases, percent, without signs; the largest widens intervals."""
    return [abs(case.error_pct) for case in cases]
