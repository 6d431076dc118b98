"""The formats of other tools: a function each, from a run to its text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..cli import to_json
from ..errors import UsageError
from ..manifest import Host, Manifest, WorkloadCode
from ..results.store import RunData
from .cases import Figure, MeasuredCase, filled, measured_cases
from .main import DEFAULT

BENCHMARK = "ddp-bench"

BENCHER_UNITS = {"ms": ("-ns", 1e6), "MiB": ("-bytes", 2.0**20)}
"""The ends of measures' names, as the format has no place for units, and how many of them one of ours has."""


def bencher(run: RunData) -> str:
    """Write every measured case with its measures and the ends of their intervals, as JSON.

    Bencher Metric Format: https://bencher.dev/docs/reference/bencher-metric-format.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for case in measured_cases(run):
        for column, figure in case.figures.items():
            if figure.value is not None:
                end, factor = BENCHER_UNITS.get(figure.metric.unit, ("", 1.0))
                # Bencher's own measure, in ns, is called latency.
                name = "latency" if column == "step_ms" else figure.metric.label.replace(" ", "-") + end
                scaled = figure.value.scaled(factor)
                ends = {"value": scaled.estimate, "lower_value": scaled.low, "upper_value": scaled.high}
                known = {bound: number for bound, number in ends.items() if math.isfinite(number)}
                found.setdefault(case.title, {})[name] = known
    return to_json(found)


def github_action(run: RunData, *, metric: str = DEFAULT) -> str:
    """Write one metric of every measured case as a JSON list. Raises UsageError where no case has it.

    Custom tools of github-action-benchmark: https://github.com/benchmark-action/github-action-benchmark.
    """
    found = []
    for case in measured_cases(run):
        figure = case.figures.get(metric)
        if figure is None or (value := figure.value) is None:
            continue
        entry = {"name": case.title, "unit": figure.unit, "value": value.estimate}
        if math.isfinite(value.low) and math.isfinite(value.high):
            entry["range"] = f"95% interval {value.low:.6g} to {value.high:.6g}"
        more = [figure.metric.brief, f"rounds: {len(case.timed_ms)}", case.note]
        found.append(entry | {"extra": "\n".join(filter(None, more))})
    if not found:
        raise UsageError(f"{run.path} has no {metric} of any case; give another --metric")
    return to_json(found)


def pytest_benchmark(run: RunData, *, host_names: bool = False) -> str:
    """Write every timed case as a benchmark of one step, as `pytest --benchmark-json` writes it.

    Its rounds are those of the run. Raises UsageError where no case has timed blocks.
    """
    cases = [case for case in measured_cases(run) if case.timed_ms]
    if not cases:
        raise UsageError(f"{run.path} has no timed blocks; restore its blocks.csv or name another run")
    timed = run.blocks[run.blocks["phase"] == "timed"]
    # Most blocks of a case have as many steps.
    num_steps = timed.groupby("case_id")["num_steps"].agg(lambda steps: int(steps.mode().iloc[0]))
    environment, commit = run.manifest.environment, _commit(run.manifest)
    system, _, release = (environment.os or "").partition("-")
    machine = {
        "node": environment.host if host_names else "",
        "processor": environment.cpu_model,
        "python_version": run.manifest.versions.get("python"),
        "system": system,
        "release": release,
    }
    cpu = {"brand_raw": environment.cpu_model, "count": environment.num_cores}
    return to_json(
        {
            "machine_info": filled(machine) | {"cpu": cpu},
            "commit_info": {
                "id": commit.commit,
                "time": None,
                "author_time": None,
                "dirty": commit.dirty,
                "project": commit.repository or BENCHMARK,
                "branch": None,
            },
            "benchmarks": [_benchmark_of_a_step(case, int(num_steps[case.result.case_id])) for case in cases],
            "datetime": run.manifest.created_utc or "",
        }
    )


def _benchmark_of_a_step(case: MeasuredCase, num_steps: int) -> dict[str, Any]:
    rates = case.figures["images_per_s"]
    told = case.labels | filled({"note": case.note})
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
        "stats": _stats([ms / 1000 for ms in case.timed_ms], num_steps),
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


def pytorch(run: RunData, *, host_names: bool = False) -> str:
    """Write one record per measured case and metric, as a JSON list; every round is a value of the metric.

    Records of PyTorch's OSS benchmark database, schema v3. The columns are those of
    clickhouse_db_schema/benchmark.oss_ci_benchmark_v3 in pytorch/test-infra. What CI knows of the change and
    the job, its upload action adds.
    """
    dependencies = _dependencies(run.manifest)
    run_facts = {"run_id": run.manifest.run_id, "started_at": run.manifest.created_utc}
    found = []
    for case in measured_cases(run):
        # The dashboards read `arch` as that of the device.
        labels = {name: value for name, value in case.labels.items() if name not in ("arch", "precision")}
        benchmark = {
            "name": BENCHMARK,
            "mode": "training",
            "dtype": case.result.precision,
            "extra_info": labels | filled({"note": case.note, **run_facts}),
        }
        runners = _runners(case, run.manifest, host_names=host_names)
        found += [
            {
                "benchmark": benchmark,
                "model": {"name": case.result.arch, "backend": case.result.case_id},
                "metric": _metric(figure),
                "runners": runners,
                "dependencies": dependencies,
            }
            for figure in case.figures.values()
            if figure.by_round
        ]
    return to_json(found)


def _metric(figure: Figure) -> dict[str, Any]:
    told = {
        "unit": figure.unit,
        "meaning": figure.metric.brief,
        "better": "higher" if figure.metric.higher_is_better else "lower",
    }
    value = figure.value
    if value is not None:
        ends = {"estimate": value.estimate, "low": value.low, "high": value.high}
        told |= {name: f"{end:.12g}" for name, end in ends.items() if math.isfinite(end)}
    return {"name": figure.name, "benchmark_values": list(figure.by_round), "extra_info": told}


def _runners(case: MeasuredCase, manifest: Manifest, *, host_names: bool) -> list[dict[str, Any]]:
    """Describe the hosts of a case, those of the first ranks; without names unless asked."""
    first = manifest.environment
    hosts = manifest.hosts or {first.host or "": first}
    used = list(hosts)[: case.result.num_nodes]
    return [
        _runner(case, hosts[name]) | ({"extra_info": {"hostname": name}} if host_names else {})
        for name in used
    ]


def _runner(case: MeasuredCase, host: Host) -> dict[str, Any]:
    device_type, cpu, gpus = case.result.device_type, host.cpu_model or "", host.gpus or ()
    return filled(
        {
            "name": device_type,
            "type": cpu if device_type == "cpu" else case.result.device_name,
            "cpu_info": cpu,
            "cpu_count": _whole(host.num_cores),
            "avail_mem_in_gb": _whole(host.memory_gib),
            "gpu_info": ", ".join(dict.fromkeys(gpu.name or "" for gpu in gpus)),
            "gpu_count": len(gpus),
            "avail_gpu_mem_in_gb": _whole(sum(gpu.memory_mib or 0 for gpu in gpus) / 1024),
        }
    )


def _whole(value: float | None) -> int:
    """A number as the database's UInt32; 0, its default, where unknown."""
    return int(value) if value is not None and value < 2**32 else 0


def _dependencies(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The versions that were measured with, and the commit of what was."""
    found: dict[str, dict[str, Any]] = {
        name: {"version": version} for name, version in manifest.versions.items()
    }
    found[BENCHMARK] = {"version": manifest.ddp_bench.version, "sha": manifest.git.commit}
    measured = _commit(manifest)
    if measured.repository:
        found["workload"] = {"repo": measured.repository, "sha": measured.commit}
    return filled({name: filled(told) for name, told in found.items()})


def _commit(manifest: Manifest) -> WorkloadCode:
    """The commit that was measured: of the user's workload where that is known, else of ddp-bench."""
    code, own = manifest.workload, manifest.git
    return code if code and code.commit else WorkloadCode(commit=own.commit, dirty=own.dirty)
