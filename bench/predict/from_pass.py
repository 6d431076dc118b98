"""Makes a calibration from a run's calibration pass (`--calibrate`).

The pass gives every parameter's ready time, the cost of copies and both slow-downs; the lengths of a step
come from its bursts alone and from the `no_sync` blocks, which nothing instrumented; what then is missing to
the measured steps of the calibrated case is a residual, which may be negative.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from ..buckets import BucketCaps, BucketLayout, assign_cap, bucket_bytes
from ..cli import speaker
from ..errors import UsageError
from ..findings.numbers import plural
from ..manifest import MANIFEST
from ..results.round_times import ByRound
from ..results.store import RunData, load_run
from .allreduce import CostCurve, Samples, measured_curve
from .calibration import (
    Calibration,
    Identity,
    Parameter,
    check_same,
    load_calibration,
    save_calibration,
)
from .from_rate import BESIDE, ERROR_PCT, FITTED
from .held_out import held_out, model_error_pct
from .tables import (
    allreduce_times,
    bucket_ms_by_round,
    ddp_cases,
    identity,
    most_like,
    rank_steps,
    single_case,
    single_steps,
)
from .timeline import Slowdown, make_work, simulate

PHASE = "calibration"

LEAST_ROUNDS = 3
"""Rounds of the pass: fewer say nothing of their own scatter, and intervals would be none."""

AS_PUBLISHED = {
    "compute_slowdown": (BESIDE.compute,),
    "comm_slowdown": (BESIDE.comm,),
    "model_error_pct": ERROR_PCT,
}
"""What a single device cannot tell."""

Trainable: TypeAlias = tuple[str, int, str]
"""A trainable parameter: name, bytes, kind."""


@dataclass(frozen=True)
class Source:
    """A calibration, and the case that its residual was fitted to, if any."""

    calibration: Calibration
    fitted: str | None = None


def read_source(folder: Path, *, accept: bool = False) -> Source:
    """Read the calibration of a results folder.

    Raises UsageError where there is none, or where it is of another machine, torch or workload than the
    folder's run, unless `accept`.
    """
    calibration = load_calibration(folder)
    if not (folder / MANIFEST).exists():
        return Source(calibration)
    run = load_run(folder)
    if found := most_like(run, calibration.identity):
        check_same(calibration.identity, found, accept=accept)
    for case in _looked_into(run):
        check_own_devices(case, run)
    fitted = _residual_case(run, calibration.num_ranks)
    return Source(calibration, str(fitted["case_id"]) if fitted else None)


def write_calibration(folder: Path, trainable: Sequence[Trainable]) -> str | None:
    """Put `calibration.json` beside a run's tables, or return why its pass does not allow it."""
    try:
        save_calibration(folder, calibration_of(load_run(folder), trainable))
    except UsageError as missing:
        return f"no calibration: {missing}"
    return None


def slowdowns(detail: Mapping[str, Any]) -> Slowdown:
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


class _Pass:
    """The calibration blocks of a case: details by round, one per rank."""

    def __init__(self, blocks: pd.DataFrame) -> None:
        self.by_round: dict[int, list[Mapping[str, Any]]] = {}
        chosen = blocks[(blocks["phase"] == PHASE) & blocks["detail"].notna()]
        for r, text in zip(chosen["round"], chosen["detail"], strict=True):
            self.by_round.setdefault(int(r), []).append(json.loads(text)["calibration"])
        self.all = [d for details in self.by_round.values() for d in details]

    def by_median(self, figure: Callable[[Mapping[str, Any]], float]) -> Samples:
        """One figure per round: the median over the ranks."""
        return tuple(median(map(figure, details)) for _, details in sorted(self.by_round.items()))


def calibration_of(run: RunData, trainable: Sequence[Trainable]) -> Calibration:
    """Calibrate from a run's pass, and measure the model's error on the run's other cases.

    `trainable` are the model's parameters as registered. Raises UsageError where the run has no such pass, or
    blocks of it are missing.
    """
    case = next(iter(_looked_into(run)), None)
    if case is None:
        raise UsageError(
            f"{run.path} has no calibration blocks: {speaker('run')} --calibrate looks into a DDP case, and "
            "takes time (--max-time)"
        )
    check_own_devices(case, run)
    blocks = run.blocks[run.blocks["case_id"] == case["case_id"]]
    where = f"{run.path}: {case['case_id']}"
    looked = _Pass(blocks)
    if (num_rounds := len(looked.by_round)) < LEAST_ROUNDS:
        raise UsageError(
            f"{where} was calibrated in {plural(num_rounds, 'round')}, and an interval takes {LEAST_ROUNDS}; "
            "measure longer: --max-time, or --rounds"
        )
    num_ranks, own = int(case["num_devices"]), identity(run, case)
    typical, slowest = _alone(run, case) if num_ranks > 1 else (_single(run, own), ())
    if not typical:
        raise UsageError(f"{where} has no steps without communication beside it; measure it again")
    accumulate = int(case["accumulate"])
    parts = ("data", "forward", "backward", "optimizer")
    split = {part: median(float(d[f"{part}_ms"]) for d in looked.all) for part in parts}
    total = sum(split.values())

    def lengths(part: str, times: int = accumulate) -> Samples:
        return tuple(typical[r] * split[part] / total / times for r in sorted(typical))

    backward_ms = lengths("backward")
    measured = f"measured by the calibration pass on {case['case_id']}"
    found = Calibration(
        identity=own,
        num_ranks=num_ranks,
        num_nodes=int(case["num_nodes"]),
        parameters=_parameters(looked, trainable, accumulate, median(backward_ms), where),
        data_ms=lengths("data"),
        forward_ms=lengths("forward"),
        backward_ms=backward_ms,
        optimizer_ms=lengths("optimizer", 1),
        copy_ms=looked.by_median(lambda d: d.get("copy_ms", 0.0)),
        **(_beside_communication(run, case, looked) if num_ranks > 1 else AS_PUBLISHED),
        slowest_spread=slowest,
        single_step_ms=single_steps(run, own) if num_ranks > 1 else (),
        notes=(measured, FITTED) if num_ranks == 1 else (measured,),
        scaling="strong" if case["scaling"] == "strong" else "weak",
    )
    return _with_residual(found, run)


def _alone(run: RunData, case: Mapping[str, Any]) -> tuple[ByRound, Samples]:
    """Steps without communication of several ranks: a typical one by round, ms, and how they differ."""
    blocks = run.blocks[run.blocks["case_id"] == case["case_id"]]
    if not (blocks["phase"] == "no_sync").any():
        raise UsageError(f"{run.path}: {case['case_id']} has no no_sync blocks; measure it again")
    local = rank_steps(blocks, "no_sync", PHASE)
    typical = {r: float(np.median(np.concatenate(list(ranks.values())))) for r, ranks in local.items()}
    # As throughput is measured: the mean of a round's steps, each of the slowest rank.
    longest = {r: mean(map(max, zip(*ranks.values(), strict=False))) for r, ranks in local.items()}
    return typical, tuple(longest[r] / typical[r] for r in local)


def _single(run: RunData, own: Identity) -> ByRound:
    """On one device the plain module is the step without communication, and measured most often."""
    return run.times.step_ms("timed").get(single_case(run, own), {})


def _beside_communication(run: RunData, case: Mapping[str, Any], looked: _Pass) -> dict[str, Any]:
    """What several ranks tell of: the all-reduce, and what it and compute do to each other."""
    return {
        "allreduce": (allreduce_times(run, case),),
        "comm_core_share": looked.by_median(lambda d: d.get("comm_core_ms", 0.0) / d["comm_alone_ms"]),
        "compute_slowdown": looked.by_median(lambda d: slowdowns(d).compute),
        "comm_slowdown": looked.by_median(lambda d: slowdowns(d).comm),
    }


def check_own_devices(case: Mapping[str, Any], run: RunData) -> None:
    """Raise UsageError where ranks of a case shared a device: what they took says nothing of others."""
    if case["oversubscribed"] is True:
        raise UsageError(
            f"{run.path}: the ranks of {case['case_id']} shared devices, and nothing follows for ranks with "
            "one each; calibrate with fewer: --gpus 1"
        )


def _parameters(
    looked: _Pass, trainable: Sequence[Trainable], accumulate: int, backward_ms: float, where: str
) -> tuple[Parameter, ...]:
    order = looked.all[0]["order"]
    if sorted(order) != list(range(len(trainable))):
        raise UsageError(
            f"{where} has {len(order)} parameters, the workload {len(trainable)}; calibrate again"
        )
    shares = np.median([np.divide(d["ready_ms"], d["backward_ms"] / accumulate) for d in looked.all], axis=0)
    return tuple(
        Parameter(name=name, num_bytes=num_bytes, kind=kind, ready_ms=min(float(share), 1.0) * backward_ms)
        for (name, num_bytes, kind), share in zip((trainable[i] for i in order), shares, strict=True)
    )


def _looked_into(run: RunData) -> list[dict[str, Any]]:
    """List the cases that the calibration pass measured."""
    seen = set(run.blocks.loc[run.blocks["phase"] == PHASE, "case_id"])
    return [case for case in ddp_cases(run, least=1) if case["case_id"] in seen]


def _residual_case(run: RunData, num_ranks: int) -> dict[str, Any] | None:
    """Find the case whose step gives the residual: the calibrated one, where a scenario describes it."""
    described = (num_ranks, "none", 1)
    cases = _looked_into(run)
    return next((c for c in cases if (c["num_devices"], c["comm_hook"], c["accumulate"]) == described), None)


def _with_residual(found: Calibration, run: RunData) -> Calibration:
    """Add the residual, and the error on the other cases."""
    case = _residual_case(run, found.num_ranks)
    if case is None:
        return found
    samples = _residual_ms(found, run, case)
    if samples:
        note = f"its residual is the step of {case['case_id']}, less the simulated one"
        found = replace(found, residual_ms=samples, notes=(*found.notes, note))
    if found.num_ranks == 1:
        return found
    others = held_out(found, run, fitted=str(case["case_id"]))
    return replace(found, model_error_pct=model_error_pct(others))


def _residual_ms(found: Calibration, run: RunData, case: Mapping[str, Any]) -> Samples:
    """Measure by round what a case's step takes beyond the simulated one."""
    case_id = str(case["case_id"])
    timed = run.times.step_ms("timed").get(case_id, {})
    one = found.num_ranks == 1
    local = _single(run, found.identity) if one else run.times.step_ms("no_sync").get(case_id, {})
    comm = bucket_ms_by_round(run, case_id) if found.allreduce else dict.fromkeys(timed, 0.0)
    sizes = [p.num_bytes for p in found.parameters]
    caps = BucketCaps.parse(str(case["bucket_cap_mb"]))
    layout = assign_cap(sizes, caps, kinds=[p.kind for p in found.parameters])
    in_layout = bucket_bytes(sizes, layout)
    if BucketLayout(in_layout) != BucketLayout.of_cell(case["bucket_bytes"]):
        return ()
    curve = measured_curve(found.allreduce[0].points) if found.allreduce else CostCurve()
    alone_ms = sum(curve(size) for size in in_layout) or 1.0
    compute, slow = found.compute(), found.slowdown()
    samples = []
    for r in sorted(timed.keys() & comm.keys() & local.keys()):
        # The longest rank's own step in this round, and what its buckets took by themselves.
        factor = local[r] / compute.total_ms
        cost = curve.scaled(comm[r] / alone_ms)
        work = make_work(sizes, [p.ready_ms * factor for p in found.parameters], layout, cost)
        copy_ms = factor * median(found.copy_ms)
        step = simulate(work, compute.scaled(factor), slowdown=slow, copy_ms=copy_ms)
        samples.append(timed[r] - step.step_ms)
    return tuple(samples)
