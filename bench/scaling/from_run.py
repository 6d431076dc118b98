"""A calibration from an ordinary run, fitted on one of its cases. Pure.

It is the fallback where there is no calibration pass: buckets stand for parameters (finer where the model is
known), the split of a step comes from the anatomy blocks, its length from the `no_sync` blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bench.errors import UsageError
from bench.results.aggregate import step_ms_by_round
from bench.results.store import RunData
from bench.scaling.approximate import Shape, refined
from bench.scaling.calibration import AllReduceTimes, Calibration, Identity, Parameter, Samples
from bench.scaling.cost import measured_curve
from bench.scaling.fit import RoundFit, fit
from bench.scaling.reconcile import reconciled
from bench.scaling.scenario import wire_share
from bench.scaling.slowest_rank import Spread, typical_ms
from bench.scaling.timeline import Compute, make_work


def ddp_cases(run: RunData) -> list[dict[str, Any]]:
    """Measured DDP cases of 2 devices or more, those whose layout is known."""
    cases = run.cases
    chosen = cases[(cases["mode"] == "ddp") & (cases["status"] == "ok") & (cases["num_devices"] > 1)]
    rows = chosen[chosen["bucket_bytes"].notna()].astype(object).to_dict("records")
    return [{str(key): value for key, value in row.items()} for row in rows]


def calibration_case(run: RunData, *, cap: str | None = None) -> dict[str, Any]:
    """The case to fit on: of cap `cap`, else the one of most buckets. Raises UsageError without one."""
    rows = [row for row in ddp_cases(run) if row["comm_hook"] == "none" and row["accumulate"] == 1]
    chosen = [row for row in rows if cap in (None, row["bucket_cap_mb"])]
    if not chosen:
        caps = ", ".join(dict.fromkeys(str(row["bucket_cap_mb"]) for row in rows)) or "none"
        raise UsageError(
            f"{run.path} has no measured DDP case over 2 devices"
            f"{f' at cap {cap} (it has: {caps})' if cap else ''}; run bench.run --modes ddp --gpus 2"
        )
    return max(chosen, key=lambda row: (row["num_buckets"], -row["num_devices"]))


def calibrate(run: RunData, case: Mapping[str, Any], *, shapes: Sequence[Shape] | None = None) -> Calibration:
    """The calibration that `case` of `run` gives; `shapes` are the model's parameters, where known.

    Raises UsageError where the case lacks its anatomy, `no_sync` or communication blocks.
    """
    blocks = run.blocks[run.blocks["case_id"] == case["case_id"]]
    where = f"{run.path}: {case['case_id']}"
    sizes = [int(size) for size in str(case["bucket_bytes"]).split("/")]
    details = _details(blocks, where, len(sizes))
    local = rank_steps(blocks, "no_sync")
    if not local:
        raise UsageError(f"{where} has no no_sync blocks; measure it again")
    typical = {r: typical_ms(ranks) for r, ranks in local.items()}
    split = {name: _middle(details, name) for name in ("data_ms", "forward_ms", "optimizer_ms")}
    backward = _middle(details, "local_last_ready_ms", "last_ready_ms")
    total = backward + sum(split.values())
    # The anatomy pass is slower than the step it looks into: it gives shares, not lengths.
    steps = tuple(typical[r] for r in sorted(typical))
    backward_ms = tuple(step * backward / total for step in steps)
    end_ms = float(np.median(backward_ms))
    ready = np.median([_shares(detail) for detail in details], axis=0) * end_ms
    known = tuple(
        Parameter(name=f"bucket {i}", num_bytes=size, ready_ms=float(at))
        for i, (size, at) in enumerate(zip(sizes, ready, strict=True))
    )
    notes = [f"fitted on {case['case_id']}"]
    parameters = refined(known, shapes) if shapes else None
    if parameters is None:
        parameters = known
        notes.append("its buckets stand for parameters: only coarser layouts can be told apart")
    spread = Spread.of(local)
    allreduce = allreduce_times(run, case, sizes, blocks, where)
    curve = measured_curve(allreduce.points)
    work = make_work(sizes, list(ready), tuple((i,) for i in range(len(sizes))), curve)
    timed = step_ms_by_round(blocks, "timed").get(str(case["case_id"]), {})
    fits = [
        RoundFit(
            step_ms=timed[r],
            compute=Compute(
                before_ms=typical[r] * (split["data_ms"] + split["forward_ms"]) / total,
                backward_ms=typical[r] * backward / total,
                after_ms=typical[r] * split["optimizer_ms"] / total,
            ),
        )
        for r in sorted(timed.keys() & typical.keys())
    ]
    fitted = fit(
        fits,
        work,
        end_ms=end_ms,
        beside=[
            float(d["last_ready_ms"]) / float(d["local_last_ready_ms"])
            for d in details
            if "local_last_ready_ms" in d
        ],
        slowest=spread.factor(int(case["num_devices"])),
        residual_ms=_residual_ms(run),
    )
    return Calibration(
        identity=identity(run, case),
        num_ranks=int(case["num_devices"]),
        num_nodes=int(case["num_nodes"]),
        parameters=parameters,
        data_ms=tuple(step * split["data_ms"] / total for step in steps),
        forward_ms=tuple(step * split["forward_ms"] / total for step in steps),
        backward_ms=backward_ms,
        optimizer_ms=tuple(step * split["optimizer_ms"] / total for step in steps),
        allreduce=(allreduce,),
        compute_slowdown=fitted.compute_slowdown,
        comm_slowdown=fitted.comm_slowdown,
        residual_ms=fitted.residual_ms,
        rank_spread=spread.of_ranks,
        slowest_spread=spread.of_slowest,
        single_step_ms=single_steps(run, int(case["batch_per_device"])),
        notes=tuple(notes),
    )


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


def _details(blocks: pd.DataFrame, where: str, num_buckets: int) -> list[dict[str, Any]]:
    texts = blocks.loc[(blocks["phase"] == "anatomy") & blocks["detail"].notna(), "detail"]
    found = [json.loads(text) for text in texts]
    found = [d for d in found if len(d.get("ready_ms", ())) == num_buckets]
    if not found:
        raise UsageError(f"{where} has no anatomy blocks with ready times; measure it again")
    return found


def _shares(detail: Mapping[str, Any]) -> list[float]:
    values = detail["ready_ms"]
    ready = list(values.values()) if isinstance(values, dict) else list(values)
    return [at / max(ready) for at in ready]


def _middle(details: Sequence[Mapping[str, Any]], *names: str) -> float:
    values = [d[name] for d in details for name in names[:1] if name in d]
    return float(np.median(values)) if values else _middle(details, *names[1:])


def rank_steps(blocks: pd.DataFrame, *phases: str) -> dict[int, dict[int, list[float]]]:
    """Every step's ms of these phases, by round and rank."""
    found: dict[int, dict[int, list[float]]] = {}
    chosen = blocks[blocks["phase"].isin(phases)]
    for r, rank, text in zip(chosen["round"], chosen["rank"], chosen["steps_ms"], strict=True):
        steps_ms = found.setdefault(int(r), {}).setdefault(int(rank), [])
        steps_ms += [float(ms) for ms in str(text).split()]
    return found


def _residual_ms(run: RunData) -> float | None:
    """What DDP adds on one device, where nothing is sent: median over rounds; None where not measured."""
    cases = run.cases
    alone = cases[(cases["mode"] == "ddp") & (cases["status"] == "ok") & (cases["num_devices"] == 1)]
    for case_id in alone["case_id"]:
        timed, local = (
            step_ms_by_round(run.blocks, phase).get(str(case_id), {}) for phase in ("timed", "no_sync")
        )
        gaps = [timed[r] - local[r] for r in timed.keys() & local.keys()]
        if gaps:
            return max(float(np.median(gaps)), 0.0)
    return None


def allreduce_times(
    run: RunData, case: Mapping[str, Any], sizes: Sequence[int], blocks: pd.DataFrame, where: str
) -> AllReduceTimes:
    """The measured curve, in line with what the case's own buckets took; else a rate from those alone.

    The curve is taken once and in one go, the buckets in every round: what held the network up just then
    is no part of any step.
    """
    replay = step_ms_by_round(blocks, "comm").get(str(case["case_id"]), {})
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
        raise UsageError(f"{where} has no communication measured by itself; measure it again")
    return AllReduceTimes(num_ranks=num_ranks, backend=backend, points=points)
