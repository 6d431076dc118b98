"""What exports hand on of a run: the figures of its measured cases, with unit, interval and every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export.metrics import METRICS, Metric
from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import CPU_STAND_IN, estimate, is_stand_in, place, text, unit_of
from ddp_bench.bench.results.aggregate import step_ms_by_round
from ddp_bench.bench.results.comparisons import compile_mode
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.results.schema import IDENTITY, records
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.stats import Interval

_NO_LABELS = {"case_id", "status", "reason"}


@dataclass(frozen=True)
class Figure:
    """One figure of a case; `name` and `unit` say what a rate counts: `tokens_per_s`, `tokens/s`."""

    metric: Metric
    name: str
    unit: str
    value: Interval | None
    """As in cases.csv; None where it has none."""
    by_round: tuple[float, ...]
    """Of the slowest rank, in order of the rounds; of memory, which is not taken by round, the one value."""


@dataclass(frozen=True)
class MeasuredCase:
    """A case of status `ok`, its figures by column; a figure that was not measured is left out."""

    row: Mapping[str, Any]
    figures: Mapping[str, Figure]
    timed_ms: ByRound = field(default_factory=dict)
    """Step time of the slowest rank by round, ms."""

    @property
    def case_id(self) -> str:
        """The case's name in the run's files, which stays the same from run to run."""
        return str(self.row["case_id"])

    @property
    def title(self) -> str:
        """Name it for tools that take nothing but a name: workload, case, devices, stand-ins told as such."""
        stand_in = " (CPU stand-in)" if is_stand_in(self.row) else ""
        return f"{self.workload} {self.case_id}, {place(self.row)}{stand_in}".strip()

    @property
    def workload(self) -> str:
        """The architecture, or the user's workload."""
        return text(self.row["arch"])

    @property
    def note(self) -> str:
        """What stands beside every number that was measured on CPU cores; else empty."""
        return CPU_STAND_IN if text(self.row["device_type"]) == "cpu" else ""

    @property
    def labels(self) -> dict[str, str]:
        """What the case is, as text by column of cases.csv."""
        known = {c.name: _label(self.row.get(c.name)) for c in IDENTITY if c.name not in _NO_LABELS}
        known["data"] = data_kind(known["data"])
        return {name: value for name, value in known.items() if value}


def data_kind(data: str) -> str:
    """Where batches come from, without the path of a folder, which names a user or a machine."""
    return data if data in ("", "device", "host") else "folder"


def measured_cases(run: RunData) -> list[MeasuredCase]:
    """List the cases of status `ok` in the order of cases.csv. Raises UsageError where there are none."""
    rows = records(run.cases[run.cases["status"] == "ok"])
    if not rows:
        raise UsageError(f"{run.path} has no measured case; name a run with cases of status ok")
    timed, local = (step_ms_by_round(run.blocks, phase) for phase in ("timed", "no_sync"))
    rates = {row["case_id"]: _rates(row, timed.get(row["case_id"], {})) for row in rows}
    single = {compile_mode(row): row["case_id"] for row in rows if row["mode"] == "single"}
    found = []
    for row in rows:
        case_id, unit, memory = row["case_id"], unit_of(row), finite(row["peak_mem_mib"])
        steps, rate, alone = timed.get(case_id, {}), rates[case_id], local.get(case_id, {})
        reference = rates.get(single.get(compile_mode(row)), {})
        by_round = {
            "images_per_s": rate,
            "step_ms": steps,
            "exposed_comm_ms": {r: steps[r] - alone[r] for r in steps if r in alone},
            "speedup": {r: rate[r] / reference[r] for r in rate if r in reference},
            "peak_mem_mib": {} if memory is None else {0: memory},
        }
        figures = {}
        for column, metric in METRICS.items():
            is_rate, values = column == "images_per_s", by_round[column]
            figure = Figure(
                metric,
                name=f"{unit}_per_s" if is_rate else column,
                unit=f"{unit}/s" if is_rate else metric.unit,
                value=estimate(row, column),
                by_round=tuple(values[r] for r in sorted(values)),
            )
            if figure.value or figure.by_round:
                figures[column] = figure
        found.append(MeasuredCase(row, figures, steps))
    return found


def _rates(row: Mapping[str, Any], step_ms: ByRound) -> ByRound:
    """Throughput of each round, in what the case's own throughput counts."""
    rate, step = (estimate(row, column) for column in ("images_per_s", "step_ms"))
    per_step = row["global_batch"] if rate is None or step is None else rate.estimate * step.estimate / 1000
    return {r: per_step * 1000 / ms for r, ms in step_ms.items()}


def _label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else text(value)
