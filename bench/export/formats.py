"""The formats of other tools: a function each, from a run to its text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cli import to_json
from ..errors import UsageError
from ..findings.numbers import per_second
from ..findings.wording import CPU_STAND_IN, place
from ..manifest import Host, Manifest, WorkloadCode
from ..results.aggregate import metrics_by_round
from ..results.case_columns import IDENTITY
from ..results.case_result import CaseResult, text
from ..results.column_types import Metric
from ..results.public import data_kind
from ..results.schema import EXPORTED
from ..results.store import RunData
from ..stats.interval import Interval

BENCHMARK = "ddp-bench"

_NO_LABELS = {"case_id", "status", "reason", "reason_code"}


@dataclass(frozen=True)
class Figure:
    """One figure of a case; `name` and `unit` say what a rate counts: `tokens_per_s`, `tokens/s`."""

    metric: Metric
    name: str
    unit: str
    value: Interval | None
    """As in cases.csv; None where it has none."""
    by_round: list[float]
    """Of the slowest rank, in order of the rounds; of memory, which is not taken by round, the one value."""


@dataclass(frozen=True)
class MeasuredCase:
    """A case of status `ok`, its figures by column; a figure that was not measured is left out."""

    result: CaseResult
    figures: Mapping[str, Figure]

    @property
    def title(self) -> str:
        """Name it for tools that take nothing but a name: workload, case, devices, stand-ins told as such."""
        case = self.result
        stand_in = " (CPU stand-in)" if case.is_stand_in else ""
        return f"{case.arch} {case.case_id}, {place(case)}{stand_in}".strip()

    @property
    def labels(self) -> dict[str, str]:
        """What the case is, as text by column of cases.csv, and what stands beside numbers of CPU cores."""
        known = {c.name: _label(self.result.cells.get(c.name)) for c in IDENTITY if c.name not in _NO_LABELS}
        note = CPU_STAND_IN if self.result.device_type == "cpu" else ""
        return _filled({**known, "data": data_kind(known["data"]), "note": note})

    @property
    def steps_ms(self) -> list[float]:
        """Step time of the slowest rank, in order of the rounds."""
        return self.figures["step_ms"].by_round if "step_ms" in self.figures else []


def measured_cases(run: RunData) -> list[MeasuredCase]:
    """List the cases of status `ok` in the order of cases.csv. Raises UsageError where there are none."""
    cases = [case for case in run.results if case.is_ok]
    if not cases:
        raise UsageError(f"{run.path} has no measured case; name a run with cases of status ok")
    rounds = metrics_by_round(cases, run.times)
    found = []
    for case in cases:
        figures = {
            column: Figure(
                metric,
                name=f"{case.unit}_per_s" if metric.is_rate else column,
                unit=per_second(case.unit) if metric.is_rate else metric.unit or "ratio",
                value=case.interval(column),
                by_round=[value for _, value in sorted(rounds[case.case_id][column].items())],
            )
            for column, metric in EXPORTED.items()
        }
        known = {column: figure for column, figure in figures.items() if figure.value or figure.by_round}
        found.append(MeasuredCase(case, known))
    return found


def _label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else text(value)


def _filled(told: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of `told`."""
    return {name: value for name, value in told.items() if value}


def pytest_benchmark(run: RunData) -> str:
    """Write every timed case as a benchmark of one step, as `pytest --benchmark-json` writes it.

    Its rounds are those of the run. Raises UsageError where no case has timed blocks.
    """
    cases = [case for case in measured_cases(run) if case.steps_ms]
    if not cases:
        raise UsageError(f"{run.path} has no timed blocks; restore its blocks.csv or name another run")
    timed = run.blocks[run.blocks["phase"] == "timed"]
    # Most blocks of a case have as many steps.
    num_steps = timed.groupby("case_id")["num_steps"].agg(lambda steps: int(steps.mode().iloc[0]))
    environment, commit = run.manifest.environment, _commit(run.manifest)
    system, _, release = (environment.os or "").partition("-")
    machine = {
        "processor": environment.cpu_model,
        "python_version": run.manifest.versions.get("python"),
        "system": system,
        "release": release,
    }
    cpu = {"brand_raw": environment.cpu_model, "count": environment.num_cores}
    return to_json(
        {
            "machine_info": _filled(machine) | {"cpu": cpu},
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
    rate = {rates.name: f"{rates.value.estimate:.6g}"} if rates.value else {}
    return {
        "group": None,
        "name": case.title,
        "fullname": case.title,
        "params": None,
        "param": None,
        "extra_info": case.labels | rate,
        "options": {},
        "stats": _stats([ms / 1000 for ms in case.steps_ms], num_steps),
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


def pytorch(run: RunData) -> str:
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
            "extra_info": labels | _filled(run_facts),
        }
        found += [
            {
                "benchmark": benchmark,
                "model": {"name": case.result.arch, "backend": case.result.case_id},
                "metric": _metric(figure),
                "runners": _runners(case.result, run.manifest),
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
    return {"name": figure.name, "benchmark_values": figure.by_round, "extra_info": told}


def _runners(case: CaseResult, manifest: Manifest) -> list[dict[str, Any]]:
    """Describe the hosts of a case, those of the first ranks; without names."""
    hosts = [*(manifest.hosts.values() or [manifest.environment])]
    return [_runner(case, host) for host in hosts[: case.num_nodes]]


def _runner(case: CaseResult, host: Host) -> dict[str, Any]:
    cpu, gpus = host.cpu_model or "", host.gpus or ()
    return _filled(
        {
            "name": case.device_type,
            "type": cpu if case.device_type == "cpu" else case.device_name,
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
    return _filled({name: _filled(told) for name, told in found.items()})


def _commit(manifest: Manifest) -> WorkloadCode:
    """The commit that was measured: of the user's workload where that is known, else of ddp-bench."""
    code, own = manifest.workload, manifest.git
    return code if code and code.commit else WorkloadCode(commit=own.commit, dirty=own.dirty)
