"""What exports hand on of a run: the figures of its measured cases, with unit, interval and every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_bench.bench.conditions import Manifest, part
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export.options import METRICS, Metric
from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import CPU_STAND_IN, estimate, place, stand_in, text, unit_of
from ddp_bench.bench.results.aggregate import step_ms_by_round
from ddp_bench.bench.results.comparisons import compile_mode
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.results.schema import IDENTITY, records
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.stats import Interval

_UNITS = {"step_ms": "ms", "exposed_comm_ms": "ms", "speedup": "ratio", "peak_mem_mib": "MiB"}

_NO_LABELS = {"case_id", "status", "reason"}


@dataclass(frozen=True)
class Figure:
    """One figure of a case; `name` and `unit` say what a rate counts: `tokens_per_s`, `tokens/s`."""

    metric: Metric
    name: str
    unit: str
    value: Interval | None
    """As in cases.csv; None where it has none, as the step time of older runs."""
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
        return f"{self.workload} {self.case_id}, {place(self.row)}{stand_in(self.row)}".strip()

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
        if known["data"] not in ("", "device", "host"):
            known["data"] = "folder"  # its path names a user, or a machine
        return {name: value for name, value in known.items() if value}


def measured_cases(run: RunData) -> list[MeasuredCase]:
    """List the cases of status `ok` in the order of cases.csv. Raises UsageError where there are none."""
    chosen = records(run.cases[run.cases["status"] == "ok"])
    rows: list[dict[str, Any]] = [{str(name): value for name, value in row.items()} for row in chosen]
    if not rows:
        raise UsageError(f"{run.path} has no measured case; name a run with cases of status ok")
    timed, local = (step_ms_by_round(run.blocks, phase) for phase in ("timed", "no_sync"))
    rates = {case_id: _rates(row, timed.get(case_id, {})) for row in rows for case_id in [row["case_id"]]}
    single = {compile_mode(row): str(row["case_id"]) for row in rows if row["mode"] == "single"}
    found = []
    for row in rows:
        case_id = str(row["case_id"])
        steps, rate, alone = timed.get(case_id, {}), rates[case_id], local.get(case_id, {})
        reference = rates.get(single.get(compile_mode(row), ""), {})
        memory = finite(row["peak_mem_mib"])
        by_round = {
            "images_per_s": rate,
            "step_ms": steps,
            "exposed_comm_ms": {r: steps[r] - alone[r] for r in steps if r in alone},
            "speedup": {r: rate[r] / reference[r] for r in rate if r in reference},
            "peak_mem_mib": {} if memory is None else {0: memory},
        }
        figures = {column: _figure(row, METRICS[column], values) for column, values in by_round.items()}
        known = {name: figure for name, figure in figures.items() if figure.value or figure.by_round}
        found.append(MeasuredCase(row, known, steps))
    return found


def commit_of(manifest: Manifest) -> Manifest:
    """The commit that was measured: of the user's workload where that is known, else of ddp-bench."""
    workload = part(manifest, "workload")
    return workload if workload.get("commit") else part(manifest, "git")


def _figure(row: Mapping[str, Any], metric: Metric, by_round: ByRound) -> Figure:
    unit = unit_of(row)
    is_rate = metric.column == "images_per_s"
    return Figure(
        metric,
        name=f"{unit}_per_s" if is_rate else metric.column,
        unit=f"{unit}/s" if is_rate else _UNITS[metric.column],
        value=estimate(row, metric.column),
        by_round=tuple(by_round[r] for r in sorted(by_round)),
    )


def _rates(row: Mapping[str, Any], step_ms: ByRound) -> ByRound:
    """Throughput of each round, in what the case's own throughput counts."""
    rate, step = (estimate(row, column) for column in ("images_per_s", "step_ms"))
    per_step = row["global_batch"] if rate is None or step is None else rate.estimate * step.estimate / 1000
    return {r: per_step * 1000 / ms for r, ms in step_ms.items()}


def _label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else text(value)
