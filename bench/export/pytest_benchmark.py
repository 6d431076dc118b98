"""A run as `pytest --benchmark-json` would write it: a benchmark of one training step for each case."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..common.errors import UsageError
from ..common.text import to_json
from ..findings.wording import CPU_STAND_IN, name_devices
from ..results.archive import name_data_kind
from ..results.case_columns import IDENTITY
from ..results.case_result import CaseResult, get_text
from ..results.store import RunData

_NO_LABELS = {"case_id", "status", "reason", "reason_code"}


def write_pytest_benchmark(run: RunData) -> str:
    """Write the measured cases of a run as JSON, times in seconds per step of the slowest rank.

    Raises UsageError where no case has timed blocks.
    """
    steps_ms = run.times.collect_step_ms("timed")
    cases = [case for case in run.results if case.is_ok and case.case_id in steps_ms]
    if not cases:
        raise UsageError(f"{run.path} has no measured case with its timed blocks; name a run that has")
    timed = run.blocks[run.blocks["phase"] == "timed"]
    # Most blocks of a case have as many steps.
    num_steps = timed.groupby("case_id")["num_steps"].agg(lambda steps: int(steps.mode().iloc[0]))
    environment = run.manifest.environment
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
            "machine_info": {name: told for name, told in machine.items() if told} | {"cpu": cpu},
            "commit_info": _describe_commit(run),
            "benchmarks": [
                {
                    "group": None,
                    "name": _name_case(case),
                    "fullname": _name_case(case),
                    "params": None,
                    "param": None,
                    "extra_info": _make_labels(case),
                    "options": {},
                    "stats": _describe_times(
                        [ms / 1000 for _, ms in sorted(steps_ms[case.case_id].items())],
                        int(num_steps[case.case_id]),
                    ),
                }
                for case in cases
            ],
            "datetime": run.manifest.created_utc or "",
        }
    )


def _name_case(case: CaseResult) -> str:
    """Name it for tools that take nothing but a name: workload, case, devices, stand-ins told as such."""
    stand_in = " (CPU stand-in)" if case.is_stand_in else ""
    return f"{case.arch} {case.case_id}, {name_devices(case)}{stand_in}".strip()


def _make_labels(case: CaseResult) -> dict[str, str]:
    """Label a case: as text by column of cases.csv, its throughput, and a note where it has no GPUs."""
    found = {column.name: _format_label(case.cells.get(column.name)) for column in IDENTITY}
    found["data"] = name_data_kind(found["data"])
    found["note"] = CPU_STAND_IN if case.device_type == "cpu" else ""
    if rate := case.images_per_s:
        found[f"{case.unit}_per_s"] = f"{rate.estimate:.6g}"
    return {name: told for name, told in found.items() if told and name not in _NO_LABELS}


def _format_label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else get_text(value)


def _describe_commit(run: RunData) -> dict[str, Any]:
    """Return the commit that was measured: of the user's workload where that is known, else of ddp-bench."""
    code = run.manifest.workload
    is_known = code is not None and code.commit is not None
    measured = code if code is not None and is_known else run.manifest.git
    return {
        "id": measured.commit,
        "time": None,
        "author_time": None,
        "dirty": measured.dirty,
        "project": (code is not None and is_known and code.repository) or "ddp-bench",
        "branch": None,
    }


def _describe_times(data: list[float], iterations: int) -> dict[str, Any]:
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
