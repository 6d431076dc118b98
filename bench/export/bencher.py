"""Bencher Metric Format: https://bencher.dev/docs/reference/bencher-metric-format."""

from __future__ import annotations

import math

from ddp_bench.bench.cli import to_json
from ddp_bench.bench.export.figures import Figure, measured_cases
from ddp_bench.bench.export.options import Options
from ddp_bench.bench.results.store import RunData

MEASURES = {
    "images_per_s": ("throughput", 1.0),
    "step_ms": ("latency", 1e6),
    "exposed_comm_ms": ("exposed-communication-ns", 1e6),
    "speedup": ("speed-up", 1.0),
    "peak_mem_mib": ("peak-memory-bytes", 2.0**20),
}
"""By column the measure's name and how many of its units one of ours has.

`throughput`, per second, and `latency`, in nanoseconds, are Bencher's own. The format has no place for units:
those of other measures stand in their names."""


def export(run: RunData, _options: Options) -> str:
    """Write every measured case with its measures and the ends of their intervals, as JSON."""
    found = {
        case.title: {
            name: values
            for column, (name, factor) in MEASURES.items()
            if column in case.figures and (values := _values(case.figures[column], factor))
        }
        for case in measured_cases(run)
    }
    return to_json({title: measures for title, measures in found.items() if measures})


def _values(figure: Figure, factor: float) -> dict[str, float]:
    if figure.value is None:
        return {}
    scaled = figure.value.scaled(factor)
    values = {"value": scaled.estimate, "lower_value": scaled.low, "upper_value": scaled.high}
    return {name: value for name, value in values.items() if math.isfinite(value)}
