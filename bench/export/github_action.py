"""JSON of github-action-benchmark's custom tools: https://github.com/benchmark-action/github-action-benchmark."""

from __future__ import annotations

import math

from ddp_bench.bench.cli import to_json
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export.figures import Figure, MeasuredCase, measured_cases
from ddp_bench.bench.export.options import Options
from ddp_bench.bench.results.store import RunData


def export(run: RunData, options: Options) -> str:
    """Write one metric of every measured case as a JSON list. Raises UsageError where no case has it."""
    known = [(case, case.figures.get(options.metric)) for case in measured_cases(run)]
    found = [entry for case, figure in known if figure is not None and (entry := _entry(case, figure))]
    if not found:
        raise UsageError(f"{run.path} has no {options.metric} of any case; give another --metric")
    return to_json(found)


def _entry(case: MeasuredCase, figure: Figure) -> dict[str, str | float]:
    value = figure.value
    if value is None:
        return {}
    known = math.isfinite(value.low) and math.isfinite(value.high)
    more = [figure.metric.meaning, f"rounds: {len(case.timed_ms)}", case.note]
    return {
        "name": case.title,
        "unit": figure.unit,
        "value": value.estimate,
        **({"range": f"95% interval {value.low:.6g} to {value.high:.6g}"} if known else {}),
        "extra": "\n".join(line for line in more if line),
    }
