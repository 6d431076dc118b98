"""Makes a calibration from a run's calibration pass (`--calibrate`).

The pass gives every parameter's ready time, the cost of copies and both slow-downs; the length of a step
comes from the blocks that nothing instrumented; what then is missing to the measured steps of the calibrated
case is a residual, which may be negative.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from ..common.cli import get_message_prefix
from ..common.errors import UsageError
from ..common.numbers import format_count
from ..plan.buckets import BucketLayout, fill_buckets, parse_bucket_caps
from ..results.case_result import CaseResult
from ..results.store import RunData, load_run
from .allreduce import Samples
from .calibration import Calibration, Parameter, save_calibration
from .from_rate import FITTED_NOTE, PUBLISHED
from .runs import (
    collect_bucket_ms,
    collect_local_steps,
    describe_identity,
    fit_allreduce_times,
    get_single_steps,
    list_ddp_cases,
    list_error_sizes,
    predict_held_out,
)
from .timeline import Compute, Slowdown, simulate_ms

PHASE = "calibration"

MIN_ROUNDS = 3
"""Rounds of the pass: fewer say nothing of their own scatter, and intervals would be none."""

Trainable: TypeAlias = tuple[str, int, str]
"""A trainable parameter: name, bytes, kind."""

Detail: TypeAlias = Mapping[str, Any]
"""Detail of a calibration block of one rank."""


def write_calibration(folder: Path, trainable: Sequence[Trainable]) -> str | None:
    """Put `calibration.json` beside a run's tables, or return why its pass does not allow it."""
    try:
        save_calibration(folder, calibrate_run(load_run(folder), trainable))
    except UsageError as missing:
        return f"no calibration: {missing}"
    return None


def compute_slowdowns(detail: Detail) -> Slowdown:
    """Derive both slow-downs from a block's bursts of compute and communication that began together.

    In each both run until the first ends; what the other still has to do then goes at full speed, so the
    shared time over the work that each got done in it is its slow-down. Never below 1.
    """
    together = compute_done = comm_done = 0.0
    bursts = (detail[name] for name in ("compute_alone_ms", "compute_end_ms", "comm_end_ms"))
    for alone_ms, compute_ms, comm_ms in zip(*bursts, strict=True):
        shared_ms = min(compute_ms, comm_ms)
        together += shared_ms
        compute_done += alone_ms - (compute_ms - shared_ms)
        comm_done += detail["comm_alone_ms"] - (comm_ms - shared_ms)
    return Slowdown(
        compute=max(together / compute_done, 1.0) if compute_done > 0 else 1.0,
        comm=max(together / comm_done, 1.0) if comm_done > 0 else 1.0,
    )


def calibrate_run(run: RunData, trainable: Sequence[Trainable]) -> Calibration:
    """Calibrate from a run's pass, and measure the model's error on the run's other cases.

    `trainable` are the model's parameters as registered. Raises UsageError where the run has no such pass, or
    blocks of it are missing.
    """
    case = next(iter(_list_calibrated(run)), None)
    if case is None:
        raise UsageError(
            f"{run.path} has no calibration blocks: {get_message_prefix('run')} --calibrate looks into a DDP "
            "case, and takes time (--max-time)"
        )
    blocks, where = run.blocks[run.blocks["case_id"] == case.case_id], f"{run.path}: {case.case_id}"
    looked = _read_details(blocks, where)

    def collect_by_round(figure: Callable[[Detail], float]) -> Samples:
        """One figure per round: the median over the ranks."""
        return tuple(median(map(figure, details)) for details in looked.values())

    every = [detail for details in looked.values() for detail in details]
    case_id, num_ranks, accumulate = case.case_id, case.num_devices, int(case.get_setting("accumulate"))
    own = describe_identity(run, case)
    single = get_single_steps(run, own)
    # On one device the plain module is the step without communication, and measured most often.
    typical, slowest = (single, 1.0) if num_ranks == 1 else collect_local_steps(blocks, "no_sync", PHASE)
    if not typical or (num_ranks > 1 and not (blocks["phase"] == "no_sync").any()):
        raise UsageError(f"{where} has no steps without communication beside it; measure it again")
    split = {
        part: median(float(d[f"{part}_ms"]) for d in every)
        for part in ("data", "forward", "backward", "optimizer")
    }

    def compute_lengths(part: str, times: int = accumulate) -> Samples:
        return tuple(slowest * ms * split[part] / sum(split.values()) / times for ms in typical.values())

    backward_ms, notes = compute_lengths("backward"), (f"measured by the calibration pass on {case_id}",)
    more: dict[str, Any] = (
        {
            "compute_slowdown": collect_by_round(lambda d: compute_slowdowns(d).compute),
            "comm_slowdown": collect_by_round(lambda d: compute_slowdowns(d).comm),
            "comm_core_share": collect_by_round(lambda d: d.get("comm_core_ms", 0.0) / d["comm_alone_ms"]),
            "allreduce": (fit_allreduce_times(run, case),),
            "single_step_ms": tuple(single.values()),
        }
        if num_ranks > 1
        else PUBLISHED
    )
    found = Calibration(
        identity=own,
        num_ranks=num_ranks,
        parameters=_make_parameters(every, trainable, accumulate, median(backward_ms), where),
        data_ms=compute_lengths("data"),
        forward_ms=compute_lengths("forward"),
        backward_ms=backward_ms,
        optimizer_ms=compute_lengths("optimizer", 1),
        copy_ms=collect_by_round(lambda d: d.get("copy_ms", 0.0)),
        notes=notes if num_ranks > 1 else (*notes, FITTED_NOTE),
        scaling="strong" if case.scaling == "strong" else "weak",
        **more,
    )
    # The calibrated case gives the residual, where a scenario describes it.
    if case.get_setting("comm_hook") != "none" or accumulate > 1:
        return found
    if samples := _measure_residual_ms(found, run, case):
        note = f"its residual is the step of {case_id}, less the simulated one"
        found = replace(found, residual_ms=samples, fitted=case_id, notes=(*found.notes, note))
    sizes = list_error_sizes(predict_held_out(found, run, fitted=found.fitted)) if num_ranks > 1 else []
    return replace(found, model_error_pct=max(sizes, default=found.model_error_pct))


def _read_details(blocks: pd.DataFrame, where: str) -> dict[int, list[Detail]]:
    """Read what a case's calibration blocks hold, by round."""
    found: dict[int, list[Detail]] = {}
    chosen = blocks[(blocks["phase"] == PHASE) & blocks["detail"].notna()].sort_values("round")
    for r, text in zip(chosen["round"], chosen["detail"], strict=True):
        found.setdefault(int(r), []).append(json.loads(text)["calibration"])
    if len(found) < MIN_ROUNDS:
        raise UsageError(
            f"{where} was calibrated in {format_count(len(found), 'round')}, and an interval takes "
            f"{MIN_ROUNDS}; measure longer: --max-time, or --rounds"
        )
    return found


def _make_parameters(
    looked: Sequence[Detail], trainable: Sequence[Trainable], accumulate: int, backward_ms: float, where: str
) -> tuple[Parameter, ...]:
    order = looked[0]["order"]
    if sorted(order) != list(range(len(trainable))):
        raise UsageError(
            f"{where} has {len(order)} parameters, the workload {len(trainable)}; calibrate again"
        )
    shares = np.median([np.divide(d["ready_ms"], d["backward_ms"] / accumulate) for d in looked], axis=0)
    return tuple(
        Parameter(name=name, num_bytes=num_bytes, kind=kind, ready_ms=min(float(share), 1.0) * backward_ms)
        for (name, num_bytes, kind), share in zip((trainable[i] for i in order), shares, strict=True)
    )


def _list_calibrated(run: RunData) -> list[CaseResult]:
    """List the cases that the calibration pass measured.

    Raises UsageError where ranks of one shared a device: what they took says nothing of others.
    """
    seen = set(run.blocks.loc[run.blocks["phase"] == PHASE, "case_id"])
    cases = [case for case in list_ddp_cases(run, least=1) if case.case_id in seen]
    if shared := next((case.case_id for case in cases if case.oversubscribed), None):
        raise UsageError(
            f"{run.path}: the ranks of {shared} shared devices, and nothing follows for ranks with one each; "
            "calibrate with fewer: --gpus 1"
        )
    return cases


def _measure_residual_ms(found: Calibration, run: RunData, case: CaseResult) -> Samples:
    """Measure by round what a case's step takes beyond the simulated one; nothing of an unknown layout."""
    case_id = case.case_id
    timed = run.times.collect_step_ms("timed").get(case_id, {})
    local = run.times.collect_step_ms("no_sync").get(case_id, {})
    local = get_single_steps(run, found.identity) if found.num_ranks == 1 else local
    curve = found.make_curve()
    comm = collect_bucket_ms(run, case_id) if curve.points else dict.fromkeys(timed, 0.0)
    sizes = [p.num_bytes for p in found.parameters]
    caps = parse_bucket_caps(case.get_setting("bucket_cap_mb"))
    layout = fill_buckets(sizes, caps, kinds=[p.kind for p in found.parameters])
    if BucketLayout(layout.num_bytes) != BucketLayout.from_cell(case.bucket_bytes):
        return ()
    compute, alone_ms = found.compute(), sum(map(curve, layout.num_bytes)) or 1.0
    samples = []
    for r in sorted(timed.keys() & comm.keys() & local.keys()):
        # The longest rank's own step in this round, and what its buckets took by themselves.
        pace = local[r] / compute.total_ms
        step_ms = simulate_ms(
            [p.ready_ms * pace for p in found.parameters],
            layout,
            curve.scale(comm[r] / alone_ms),
            Compute(
                before_ms=compute.before_ms * pace,
                backward_ms=compute.backward_ms * pace,
                after_ms=compute.after_ms * pace,
            ),
            slowdown=found.get_slowdown(),
            copy_ms=pace * median(found.copy_ms),
        )
        samples.append(timed[r] - step_ms)
    return tuple(samples)
