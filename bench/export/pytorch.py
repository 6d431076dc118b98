"""Records of PyTorch's OSS benchmark database, schema v3.

The columns are those of clickhouse_db_schema/benchmark.oss_ci_benchmark_v3 in pytorch/test-infra. What CI
knows of the change and the job, its upload action adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddp_bench.bench.cli import to_json
from ddp_bench.bench.conditions import part
from ddp_bench.bench.export.figures import Figure, MeasuredCase, commit_of, measured_cases
from ddp_bench.bench.export.options import Options
from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.results.store import RunData

BENCHMARK = "ddp-bench"


def export(run: RunData, options: Options) -> str:
    """Write one record per measured case and metric, as a JSON list; every round is a value of the metric."""
    dependencies = _dependencies(run)
    return to_json(
        [
            {
                "benchmark": _benchmark(case, run),
                "model": {"name": case.workload, "backend": case.case_id},
                "metric": _metric(figure),
                "runners": _runners(case, run, host_names=options.host_names),
                "dependencies": dependencies,
            }
            for case in measured_cases(run)
            for figure in case.figures.values()
            if figure.by_round
        ]
    )


def _benchmark(case: MeasuredCase, run: RunData) -> dict[str, Any]:
    more = {
        "note": case.note,
        "run_id": text(run.manifest.get("run_id")),
        "started_at": text(run.manifest.get("created_utc")),
    }
    # The dashboards read `arch` as that of the device.
    labels = {name: value for name, value in case.labels.items() if name not in ("arch", "precision")}
    return {
        "name": BENCHMARK,
        "mode": "training",
        "dtype": text(case.row["precision"]),
        "extra_info": labels | {name: value for name, value in more.items() if value},
    }


def _metric(figure: Figure) -> dict[str, Any]:
    told = {
        "unit": figure.unit,
        "meaning": figure.metric.meaning,
        "better": "higher" if figure.metric.bigger_is_better else "lower",
    }
    value = figure.value
    if value is not None:
        ends = {"estimate": value.estimate, "low": value.low, "high": value.high}
        told |= {name: f"{end:.12g}" for name, end in ends.items() if math.isfinite(end)}
    return {"name": figure.name, "benchmark_values": list(figure.by_round), "extra_info": told}


def _runners(case: MeasuredCase, run: RunData, *, host_names: bool) -> list[dict[str, Any]]:
    """Describe the hosts of a case, those of the first ranks; without names unless asked."""
    environment = part(run.manifest, "environment")
    hosts = part(run.manifest, "hosts") or {text(environment.get("host")): environment}
    used = list(hosts.items())[: int(finite(case.row["num_nodes"]) or 1)]
    return [
        _runner(case, part(hosts, name)) | ({"extra_info": {"hostname": str(name)}} if host_names else {})
        for name, _ in used
    ]


def _runner(case: MeasuredCase, host: Mapping[str, Any]) -> dict[str, Any]:
    device_type, cpu = text(case.row["device_type"]), text(host.get("cpu_model"))
    listed = host.get("gpus")
    gpus = [gpu for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []
    told: dict[str, Any] = {
        "name": device_type,
        "type": cpu if device_type == "cpu" else text(case.row["device_name"]),
        "cpu_info": cpu,
        "cpu_count": _whole(host.get("num_cores")),
        "avail_mem_in_gb": _whole(host.get("memory_gib")),
        "gpu_info": ", ".join(dict.fromkeys(text(gpu.get("name")) for gpu in gpus)),
        "gpu_count": len(gpus),
        "avail_gpu_mem_in_gb": _whole(sum(finite(gpu.get("memory_mib")) or 0 for gpu in gpus) / 1024),
    }
    return {name: value for name, value in told.items() if value}


def _whole(value: Any) -> int:
    """A number as the database's UInt32; 0, its default, where unknown."""
    number = finite(value)
    return int(number) if number is not None and 0 <= number < 2**32 else 0


def _dependencies(run: RunData) -> dict[str, dict[str, str]]:
    """The versions that were measured with, and the commit of what was."""
    versions = {str(k): {"version": text(v)} for k, v in part(run.manifest, "versions").items()}
    own = {
        "version": text(part(run.manifest, "ddp_bench").get("version")),
        "sha": text(part(run.manifest, "git").get("commit")),
    }
    measured = commit_of(run.manifest)
    workload = {"repo": text(measured.get("repository")), "sha": text(measured.get("commit"))}
    found = {**versions, BENCHMARK: own} | ({"workload": workload} if workload["repo"] else {})
    return {name: {k: v for k, v in told.items() if v} for name, told in found.items() if any(told.values())}
