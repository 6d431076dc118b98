"""Reads from a run's tables what calibrations and their checks need."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from ..buckets import BucketLayout
from ..case import wire_share
from ..conditions import machine_name
from ..errors import UsageError
from ..findings.wording import step_labels, unit_of, units_per_sample
from ..results.round_times import ByRound, RoundTimes
from ..results.schema import records
from ..results.store import RunData
from .allreduce import AllReduceTimes, Samples, measured_curve
from .calibration import Identity, differences

Points: TypeAlias = tuple[tuple[int, Samples], ...]


def ddp_cases(run: RunData, *, least: int = 2) -> list[dict[str, Any]]:
    """List the measured DDP cases of `least` devices or more whose layout is known."""
    cases = run.cases
    chosen = cases[(cases["mode"] == "ddp") & (cases["status"] == "ok") & (cases["num_devices"] >= least)]
    return records(chosen[chosen["bucket_bytes"].notna()])


def single_case(run: RunData, wanted: Identity) -> str:
    """Find the case of `single` with that batch and step; empty where none was measured."""
    cases = run.cases[(run.cases["mode"] == "single") & (run.cases["status"] == "ok")]
    rows = records(cases[cases["batch_per_device"] == wanted.batch_per_device])
    return next((str(row["case_id"]) for row in rows if _step(row) == wanted.step), "")


def single_steps(run: RunData, wanted: Identity) -> Samples:
    """List the step times of `single` with that batch and step, ms, one per round; empty if not measured."""
    return tuple(run.times.step_ms("timed").get(single_case(run, wanted), {}).values())


def _step(case: Mapping[Any, Any]) -> str:
    return ", ".join(step_labels(case)[1:])


def identity(run: RunData, case: Mapping[str, Any]) -> Identity:
    """Identify the workload and machine of a run's case."""
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
        unit=unit_of(case),
        units_per_sample=units_per_sample(case),
    )


def most_like(run: RunData, wanted: Identity) -> Identity | None:
    """Identify the DDP case of a run that differs least from `wanted`; None without one.

    Under strong scaling the batch per device is another at every count.
    """
    found = [identity(run, case) for case in ddp_cases(run, least=1)]
    return min(found, key=lambda one: len(differences(one, wanted)), default=None)


def rank_steps(blocks: pd.DataFrame, *phases: str) -> dict[int, dict[int, list[float]]]:
    """Collect every step's ms of these phases by round and rank."""
    found: dict[int, dict[int, list[float]]] = {}
    chosen = blocks[blocks["phase"].isin(phases)]
    for r, rank, text in zip(chosen["round"], chosen["rank"], chosen["steps_ms"], strict=True):
        steps_ms = found.setdefault(int(r), {}).setdefault(int(rank), [])
        steps_ms += [float(ms) for ms in str(text).split()]
    return found


def allreduce_of_run(run: RunData) -> AllReduceTimes:
    """Take the all-reduce curve from the DDP case of most buckets, then of fewest devices.

    Raises UsageError where the run has none.
    """
    cases = [case for case in ddp_cases(run) if case["comm_hook"] == "none"]
    if not cases:
        raise UsageError(f"{run.path} has no measured DDP case over 2 devices or more; name another run")
    return allreduce_times(run, max(cases, key=lambda case: (case["num_buckets"], -case["num_devices"])))


def allreduce_times(run: RunData, case: Mapping[str, Any]) -> AllReduceTimes:
    """Bring the measured curve in line with what the case's buckets took; without one, take their rate.

    The curve is taken once and in one go, the buckets in every round: what held the network up just then
    is no part of any step. Raises UsageError where the run has neither.
    """
    replay = bucket_ms_by_round(run, str(case["case_id"]))
    sizes = BucketLayout.parse(str(case["bucket_bytes"])).num_bytes
    sent = [size * wire_share(str(case["comm_hook"])) for size in sizes]
    num_ranks, backend = int(case["num_devices"]), str(case["backend"])
    rows = run.allreduce[(run.allreduce["num_devices"] == num_ranks) & (run.allreduce["backend"] == backend)]
    if len(rows):
        columns = ["bytes", "time_ms_low", "time_ms", "time_ms_high"]
        points = tuple(
            (int(size), tuple(ms for ms in times if not math.isnan(ms)))
            for size, *times in rows[columns].itertuples(index=False)
        )
        if replay:
            points = reconciled(points, sent, float(np.median(list(replay.values()))))
    elif replay:
        total = sum(sent)
        ends = (4096, round(total))
        points = tuple((size, tuple(ms * size / total for ms in replay.values())) for size in ends)
    else:
        raise UsageError(
            f"{run.path}: {case['case_id']} has no communication measured by itself; measure it again"
        )
    return AllReduceTimes(num_ranks=num_ranks, backend=backend, points=points)


def bucket_ms_by_round(run: RunData, case_id: str) -> ByRound:
    """Give what the all-reduces of a case's buckets took by themselves: the replay less DDP's buffers."""
    blocks = run.blocks[(run.blocks["case_id"] == case_id) & (run.blocks["phase"] == "comm")]
    details = [json.loads(text) if isinstance(text, str) else {} for text in blocks["detail"]]
    buffers_ms = [float(detail.get("buffers_ms", 0.0)) for detail in details]
    of_buckets = blocks.assign(block_ms=blocks["block_ms"] - buffers_ms, detail=None)
    return RoundTimes.of(of_buckets).step_ms("comm").get(case_id, {})


def reconciled(points: Points, sizes: Sequence[float], total_ms: float) -> Points:
    """Multiply the curve's times by one factor so that messages of `sizes` take `total_ms` together.

    Args:
        points: (message bytes, ms of each repetition, or the median and its 95% interval).
        sizes: bytes of the messages that were sent back to back.
        total_ms: what they took. Where it or the curve is no time at all, the curve stays as it is.
    """
    by_curve_ms = sum(map(measured_curve(points), sizes))
    if total_ms <= 0 or by_curve_ms <= 0:
        return points
    factor = total_ms / by_curve_ms
    return tuple((size, tuple(ms * factor for ms in times)) for size, times in points)
