"""JSON as `pytest --benchmark-json` writes it, so that `pytest-benchmark compare` draws a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_bench.bench.cli import to_json
from ddp_bench.bench.conditions import part
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export.figures import MeasuredCase, commit_of, measured_cases
from ddp_bench.bench.export.options import Options
from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.results.store import RunData


def export(run: RunData, options: Options) -> str:
    """Write every timed case as a benchmark of one step; its rounds are those of the run.

    Raises UsageError where no case has timed blocks.
    """
    cases = [case for case in measured_cases(run) if case.timed_ms]
    if not cases:
        raise UsageError(f"{run.path} has no timed blocks; restore its blocks.csv or name another run")
    timed = run.blocks[run.blocks["phase"] == "timed"]
    # Most blocks of a case have as many steps.
    num_steps = timed.groupby("case_id")["num_steps"].agg(lambda steps: int(steps.mode().iloc[0]))
    commit = commit_of(run.manifest)
    started = text(run.manifest.get("created_utc"))
    return to_json(
        {
            "machine_info": _machine(run, host_names=options.host_names),
            "commit_info": {
                "id": commit.get("commit"),
                "time": None,
                "author_time": None,
                "dirty": commit.get("dirty"),
                "project": commit.get("repository") or "ddp-bench",
                "branch": None,
            },
            "benchmarks": [_benchmark(case, int(num_steps[case.case_id])) for case in cases],
            "datetime": started,
        }
    )


def _machine(run: RunData, *, host_names: bool) -> dict[str, Any]:
    environment = part(run.manifest, "environment")
    system, _, release = text(environment.get("os")).partition("-")
    told = {
        "node": text(environment.get("host")) if host_names else "",
        "processor": text(environment.get("cpu_model")),
        "python_version": text(part(run.manifest, "versions").get("python")),
        "system": system,
        "release": release,
    }
    cpu = {"brand_raw": environment.get("cpu_model"), "count": environment.get("num_cores")}
    return {name: value for name, value in told.items() if value} | {"cpu": cpu}


def _benchmark(case: MeasuredCase, num_steps: int) -> dict[str, Any]:
    rates = case.figures["images_per_s"]
    told = case.labels | ({"note": case.note} if case.note else {})
    if rates.value is not None:
        told[rates.name] = f"{rates.value.estimate:.6g}"
    return {
        "group": None,
        "name": case.title,
        "fullname": case.title,
        "params": None,
        "param": None,
        "extra_info": told,
        "options": {},
        "stats": _stats([case.timed_ms[r] / 1000 for r in sorted(case.timed_ms)], num_steps),
    }


def _stats(data: list[float], iterations: int) -> dict[str, Any]:
    """Describe step times, in seconds, one per round, in pytest-benchmark's words.

    Its quartiles are Hazen's. `ld15iqr` and `hd15iqr` are the ends of the data that lie within 1.5
    interquartile ranges of the quartiles.
    """
    values = np.array(data)
    q1, q3 = (float(q) for q in np.quantile(values, [0.25, 0.75], method="hazen"))
    iqr, mean = q3 - q1, float(values.mean())
    stddev = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    within = values[(values >= q1 - 1.5 * iqr) & (values <= q3 + 1.5 * iqr)]
    far = int((np.abs(values - mean) > stddev).sum())
    beyond = len(values) - len(within)
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "mean": mean,
        "stddev": stddev,
        "rounds": len(values),
        "median": float(np.median(values)),
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": beyond,
        "stddev_outliers": far,
        "outliers": f"{far};{beyond}",
        "ld15iqr": float(within.min()),
        "hd15iqr": float(within.max()),
        "ops": len(values) / float(values.sum()),
        "total": float(values.sum()),
        "data": data,
        "iterations": iterations,
    }
