"""Runs made of numbers: a real results folder, or its checked cases, from step times by round."""

import math
from dataclasses import replace
from pathlib import Path

import made
from made import made_manifest, new_run, write_tables

from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.decide import Policy
from ddp_bench.bench.gate.runs import GateCase, GateRun
from ddp_bench.bench.results.aggregate import describe_planned_case, estimate_cases
from ddp_bench.bench.results.case_result import CaseResult
from ddp_bench.bench.stats.fit import FittedSteps, estimate_difference

MANIFEST = {
    "versions": {"torch": "2.15.0", "python": "3.12.1"},
    "environment": {"cpu_model": "Some CPU", "num_cores": 2, "gpus": [], "env": {"OMP_NUM_THREADS": "1"}},
    "settings": {"data": "device", "steps": 2, "seed": 0},
    "model": {"num_params": 10, "gradient_bytes": 40},
}


def plan(arch="resnet18", **settings):
    return made.planned(made.resolved(gpus=(2,), bucket_cap_mb=("default",), **settings), arch=arch)


STEADY = {
    ("single", 1): [100.0, 101, 99, 100.5, 99.5, 100.2],
    ("dp", 2): [200.0, 202, 198, 201, 199, 200.4],
    ("ddp", 2): [125.0, 126, 124, 125.6, 124.4, 125.2],
}


def slowed(factor, *only, steps=STEADY):
    """Steps that take `factor` times as long: of all cases, or of those of these modes."""
    return {
        key: [factor * ms for ms in series] if not only or key[0] in only else series
        for key, series in steps.items()
    }


def block_rows(case_id, mode, series, phase="timed"):
    ranks = range(2 if mode == "ddp" else 1)
    return [
        made.block(case_id, r, ms, phase=phase, rank=rank, steps=2)
        for r, ms in enumerate(series, 1)
        for rank in ranks
    ]


def write_run(folder, steps=STEADY, *, no_sync_ms=100.0, peak_mem_mib=None, planned=(), **manifest):
    """A results folder as bench.run leaves it; DDP's step under no_sync takes `no_sync_ms`."""
    outcomes, rows = [], []
    for p in planned or plan():
        series = steps.get((p.case.mode, p.case.num_devices))
        usual = {"device_name": "CPU core", "peak_mem_mib": peak_mem_mib}
        facts = usual if series else {"status": "failed", "reason": "no such luck"}
        outcomes.append(describe_planned_case(p, **facts))
        rows += block_rows(p.case.case_id, p.case.mode, series or [])
        if p.case.mode == "ddp" and series:
            rows += block_rows(p.case.case_id, "ddp", [no_sync_ms] * len(series), "no_sync")
    return write_tables(new_run(folder, **MANIFEST | manifest), outcomes, rows)


def rounds_of(images_per_s, speedup, *, step_ms=None, exposed_comm_ms=None, peak_mem_mib=None):
    """The figures of a case by metric, launch and round."""
    return {
        "step_ms": dict(step_ms or {}),
        "images_per_s": dict(images_per_s),
        "speedup": dict(speedup),
        "exposed_comm_ms": dict(exposed_comm_ms or {}),
        "peak_mem_mib": {} if peak_mem_mib is None else {(0, 0): peak_mem_mib},
    }


def in_one_launch(values):
    """These figures by launch and round."""
    return {(0, r): value for r, value in enumerate(values)}


def with_rounds(run, *, only=(), **by_metric):
    """The run with other figures of these metrics: of every case, or of those named."""
    fitted = {
        name: estimate_difference([found[r] for r in sorted(found)]) if len(found) > 1 else None
        for name, found in by_metric.items()
    }
    cases = (
        replace(
            case,
            rounds={**case.rounds, **by_metric},
            fitted={name: one for name, one in {**case.fitted, **fitted}.items() if one is not None},
        )
        if not only or case.result.case_id in only
        else case
        for case in run.cases
    )
    return replace(run, cases=tuple(cases))


def made_result(mode, n, **told):
    """What a gate reads of a case's row."""
    row = {"case_id": f"{mode}-n{n}", "mode": mode, "num_devices": n, "status": "ok", "device_type": "cpu"}
    return CaseResult.from_row({**row, **told})


def changed(case, **told):
    """The case with other cells; those that are None are missing."""
    return replace(case, result=CaseResult.from_row({**case.result.cells, **told}))


def of_modes(run, *modes):
    """The run with its cases of these modes alone."""
    return replace(run, cases=tuple(case for case in run.cases if case.result.mode in modes))


def renamed(run, prefix):
    """The run with another id of every case."""
    return replace(run, cases=tuple(changed(c, case_id=f"{prefix}-{c.result.case_id}") for c in run.cases))


def with_exposed(values, steps=STEADY):
    """A run in which communication adds so many ms to each DDP step."""
    return with_rounds(made_run(steps), only=("ddp-n2",), exposed_comm_ms=in_one_launch(values))


def made_run(steps, *, path="made", num_images=16, launches=1, **manifest):
    """The same without files, as `read_run` would give it, or merged of so many launches."""
    steps = {
        key: {divmod(r, len(series) // launches): ms for r, ms in enumerate(series)}
        for key, series in steps.items()
    }
    rates = {
        key: {r: num_images * key[1] * 1000 / ms for r, ms in series.items()} for key, series in steps.items()
    }
    single = rates["single", 1]
    typical = FittedSteps({(f"{mode}-n{n}", "timed"): steps[mode, n] for mode, n in steps})
    results = {(mode, n): made_result(mode, n, global_batch=num_images * n) for mode, n in steps}
    fitted = estimate_cases([*results.values()], typical)
    cases = tuple(
        GateCase(
            results[mode, n],
            rounds=rounds_of(
                rates[mode, n],
                {} if mode == "single" else {r: rate / single[r] for r, rate in rates[mode, n].items()},
                step_ms=steps[mode, n],
            ),
            fitted={k: one for k, one in fitted[f"{mode}-n{n}"].items() if not math.isnan(one.error)},
        )
        for mode, n in steps
    )
    return GateRun(Path(path), made_manifest(**{**MANIFEST, **manifest}), cases)


def failed(run, case_id, reason="no such luck"):
    """The run with that case failed."""
    cases = (
        replace(changed(c, status="failed", reason=reason), rounds=rounds_of({}, {}))
        if c.result.case_id == case_id
        else c
        for c in run.cases
    )
    return replace(run, cases=tuple(cases))


def gated(baseline, candidate, **options):
    """The gate of two runs, or of the runs of such step times; it allows 5% of every metric."""
    if options.pop("interleaved", False):
        options.setdefault("looks", (1,))
    runs = (one if isinstance(one, GateRun) else made_run(one) for one in (baseline, candidate))
    asked = options.pop("asked", None)
    return compare(*runs, policy=Policy(**options), asked=asked)


def of_metric(gate, *names):
    return [c for c in gate.comparisons if c.metric in names]
