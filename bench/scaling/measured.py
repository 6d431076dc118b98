"""What a calibration and its checks take from the tables of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from bench.errors import UsageError
from bench.layout import BucketLayout
from bench.results.aggregate import step_ms_by_round
from bench.results.store import RunData
from bench.scaling.calibration import AllReduceTimes, Identity, Samples
from bench.scaling.reconcile import reconciled
from bench.scaling.scenario import wire_share


def ddp_cases(run: RunData) -> list[dict[str, Any]]:
    """Measured DDP cases of 2 devices or more, those whose layout is known."""
    cases = run.cases
    chosen = cases[(cases["mode"] == "ddp") & (cases["status"] == "ok") & (cases["num_devices"] > 1)]
    rows = chosen[chosen["bucket_bytes"].notna()].astype(object).to_dict("records")
    return [{str(key): value for key, value in row.items()} for row in rows]


def single_steps(run: RunData, batch_per_device: int) -> Samples:
    """Step time of `single` with that batch, ms, one per round; empty where it was not measured."""
    cases = run.cases[(run.cases["mode"] == "single") & (run.cases["status"] == "ok")]
    same = cases.loc[cases["batch_per_device"] == batch_per_device, "case_id"]
    return tuple(
        step_ms_by_round(run.blocks, "timed").get(str(same.iloc[0]), {}).values() if len(same) else ()
    )


def identity(run: RunData, case: Mapping[str, Any]) -> Identity:
    """Workload and machine of a run's case."""
    environment = run.manifest.get("environment", {})
    return Identity(
        arch=str(case["arch"]),
        image_size=None if pd.isna(case["image_size"]) else int(case["image_size"]),
        batch_per_device=int(case["batch_per_device"]),
        precision=str(case["precision"]),
        device_type=str(case["device_type"]),
        device_name=str(case["device_name"]),
        torch=str(run.manifest.get("versions", {}).get("torch", "")),
        host=host_fingerprint(environment),
        link=None if pd.isna(case["link"]) else str(case["link"]),
    )


def host_fingerprint(environment: Mapping[str, Any]) -> str:
    """What tells a machine from another kind of machine, from a manifest's `environment`."""
    gpus = environment.get("gpus") or []
    return f"{environment.get('cpu_model', '')} x {environment.get('num_cores', '')}, {len(gpus)} GPUs"


def rank_steps(blocks: pd.DataFrame, *phases: str) -> dict[int, dict[int, list[float]]]:
    """Every step's ms of these phases, by round and rank."""
    found: dict[int, dict[int, list[float]]] = {}
    chosen = blocks[blocks["phase"].isin(phases)]
    for r, rank, text in zip(chosen["round"], chosen["rank"], chosen["steps_ms"], strict=True):
        steps_ms = found.setdefault(int(r), {}).setdefault(int(rank), [])
        steps_ms += [float(ms) for ms in str(text).split()]
    return found


def allreduce_of_run(run: RunData) -> AllReduceTimes:
    """The all-reduce curve of a run's plainest DDP case: most buckets, then fewest devices.

    Raises UsageError where the run has none.
    """
    cases = [case for case in ddp_cases(run) if case["comm_hook"] == "none"]
    if not cases:
        raise UsageError(f"{run.path} has no measured DDP case over 2 devices or more; name another run")
    return allreduce_times(run, max(cases, key=lambda case: (case["num_buckets"], -case["num_devices"])))


def allreduce_times(run: RunData, case: Mapping[str, Any]) -> AllReduceTimes:
    """The measured curve, in line with what the case's own buckets took; else a rate from those alone.

    The curve is taken once and in one go, the buckets in every round: what held the network up just then
    is no part of any step. Raises UsageError where the run has neither.
    """
    replay = step_ms_by_round(run.blocks, "comm").get(str(case["case_id"]), {})
    sizes = BucketLayout.parse(str(case["bucket_bytes"])).num_bytes
    sent = [size * wire_share(str(case["comm_hook"])) for size in sizes]
    num_ranks, backend = int(case["num_devices"]), str(case["backend"])
    rows = run.allreduce[(run.allreduce["num_devices"] == num_ranks) & (run.allreduce["backend"] == backend)]
    if len(rows):
        points = tuple(
            (int(size), tuple(x for x in (low, ms, high) if not math.isnan(x)))
            for size, ms, low, high in zip(
                rows["bytes"], rows["time_ms"], rows["time_ms_low"], rows["time_ms_high"], strict=True
            )
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
