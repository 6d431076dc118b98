"""Makes a calibration of a watched training on GPUs, from its probes.

They tell a step without communication and when each bucket is ready. What an all-reduce costs is that of the
network that is named, and what it and compute do to each other is fitted, as where a rate is known.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from ..common.errors import UsageError
from ..results.case_result import list_records
from ..results.store import load_run
from .calibration import Calibration, Parameter
from .from_pass import MIN_ROUNDS
from .from_rate import FITTED_NOTE, PUBLISHED
from .runs import describe_identity, list_ddp_cases

PHASES = ("data", "forward", "optimizer")


def calibrate_watched(folder: Path) -> Calibration:
    """Calibrate from a watched training: a bucket stands for its parameters, a step for a batch of one.

    Raises UsageError where the training was on CPUs, or where too few probes tell when buckets are ready.
    """
    run = load_run(folder)
    case = next(iter(list_ddp_cases(run, least=1)), None)
    if case is not None and case.device_type == "cpu":
        raise UsageError(
            f"{folder} is a training on CPU cores, where threads that move bytes take them from compute: "
            "no probe tells how much; predict from a run with --calibrate"
        )
    buckets = run.buckets if case is None else run.buckets[run.buckets["case_id"] == case.case_id]
    local = {} if case is None else run.times.collect_step_ms("no_sync").get(case.case_id, {})
    if case is None or len(local) < MIN_ROUNDS or buckets["ready_ms"].isna().any() or buckets.empty:
        raise UsageError(
            f"{folder} has too few probes to predict from; watch DDP for longer, without --no-probes"
        )
    ready = list_records(buckets.groupby("bucket", as_index=False).agg({"bytes": "first", "ready_ms": "max"}))
    backward_ms = max(row["ready_ms"] for row in ready)
    own_ms = {part: float(getattr(case.get_interval(f"{part}_ms"), "estimate", 0.0)) for part in PHASES}
    # What is outside of all parts comes before the forward, as loading does.
    others_ms = max(median(local.values()) - backward_ms - sum(own_ms.values()), 0.0)
    total_ms = backward_ms + sum(own_ms.values()) + others_ms

    def compute_lengths(part_ms: float) -> tuple[float, ...]:
        return tuple(step_ms * part_ms / total_ms for step_ms in local.values())

    pace = median(local.values()) / total_ms
    return Calibration(
        identity=replace(describe_identity(run, case), batch_per_device=1),
        num_ranks=1,
        parameters=tuple(
            Parameter(name=f"bucket {row['bucket']}", num_bytes=row["bytes"], ready_ms=pace * row["ready_ms"])
            for row in ready
        ),
        data_ms=compute_lengths(own_ms["data"] + others_ms),
        forward_ms=compute_lengths(own_ms["forward"]),
        backward_ms=compute_lengths(backward_ms),
        optimizer_ms=compute_lengths(own_ms["optimizer"]),
        notes=(
            "the probes of a watched training; a batch is one of the script's own on one GPU",
            "buckets are never smaller than the watched ones, whatever cap is asked for",
            FITTED_NOTE,
        ),
        **PUBLISHED,
    )
