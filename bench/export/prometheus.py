"""Prometheus' text exposition format 0.0.4, which is valid OpenMetrics 1.0 as well.

Samples have no time of their own, which node_exporter's textfile collector would refuse; when the run began
is a gauge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime

from ddp_bench.bench.conditions import part
from ddp_bench.bench.export.figures import MeasuredCase, measured_cases
from ddp_bench.bench.export.options import METRICS, Options
from ddp_bench.bench.findings.wording import CPU_STAND_IN, text
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.text import visible

GAUGES = {
    "images_per_s": ("throughput", "per_second", 1.0),
    "step_ms": ("step", "seconds", 1e-3),
    "exposed_comm_ms": ("exposed_communication", "seconds", 1e-3),
    "speedup": ("speedup", "ratio", 1.0),
    "peak_mem_mib": ("peak_memory", "bytes", 2.0**20),
}
"""By column the gauge's name, its base unit, and how many of them one of ours has."""

LABELS = (
    *("arch", "mode", "impl", "num_devices", "num_nodes", "device_type", "device_name", "oversubscribed"),
    *("backend", "link", "precision", "scaling", "global_batch"),
)
"""Columns of cases.csv that label a series beside the case's id, so that one can be asked for.

No label changes from run to run: a series goes on."""

Sample = tuple[Mapping[str, str], float]


def export(run: RunData, _options: Options) -> str:
    """Write a gauge for every metric, and one for each end of its interval, with a sample per case."""
    cases = measured_cases(run)
    note = f". {CPU_STAND_IN}" if any(case.note for case in cases) else ""
    lines: list[str] = []
    for column, (name, unit, factor) in GAUGES.items():
        what = METRICS[column].meaning.capitalize()
        for end, meaning in (
            ("", what),
            ("low", f"{what}: lower end of the 95% interval"),
            ("high", f"{what}: upper end of the 95% interval"),
        ):
            samples = [(_labels(case, column), value * factor) for case, value in _values(cases, column, end)]
            lines += _family("_".join(filter(None, (name, end, unit))), f"{meaning}{note}", samples)
    return "\n".join([*lines, *_about(run), "# EOF"])


def _values(cases: Iterable[MeasuredCase], column: str, end: str) -> list[tuple[MeasuredCase, float]]:
    known = [(case, case.figures[column].value) for case in cases if column in case.figures]
    found = [(case, getattr(value, end or "estimate")) for case, value in known if value is not None]
    return [(case, value) for case, value in found if math.isfinite(value)]


def _labels(case: MeasuredCase, column: str) -> dict[str, str]:
    known = case.labels
    counted = {"unit": case.figures[column].unit.removesuffix("/s")} if column == "images_per_s" else {}
    return {"case_id": case.case_id, **{name: known[name] for name in LABELS if name in known}, **counted}


def _about(run: RunData) -> list[str]:
    """Tell which run it was, and when: beside the figures, whose series go on from run to run."""
    told = {
        "run_id": text(run.manifest.get("run_id")),
        "torch": text(part(run.manifest, "versions").get("torch")),
        "commit": text(part(run.manifest, "git").get("commit")),
    }
    lines = _family("run_info", "The run that was measured", [({k: v for k, v in told.items() if v}, 1.0)])
    try:
        began = datetime.fromisoformat(text(run.manifest.get("created_utc"))).timestamp()
    except (ValueError, OverflowError):
        return lines
    return lines + _family("run_start_time_seconds", "When the run began, since the epoch", [({}, began)])


def _family(name: str, meaning: str, samples: Iterable[Sample]) -> list[str]:
    name = f"ddp_bench_{name}"
    lines = [f"{name}{_written(labels)} {value:.12g}" for labels, value in samples]
    return [f"# HELP {name} {meaning}.", f"# TYPE {name} gauge", *lines] if lines else []


def _written(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return visible(value).replace("\\", r"\\").replace('"', r"\"")
