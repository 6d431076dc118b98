"""The measured cases of a run as exports take them: what they are, and their figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..findings.numbers import per_second
from ..findings.wording import CPU_STAND_IN, place
from ..results.aggregate import metrics_by_round
from ..results.archive import data_kind
from ..results.case_result import CaseResult, text
from ..results.columns import Metric
from ..results.schema import EXPORTED, IDENTITY
from ..results.store import RunData
from ..stats.interval import Interval

_NO_LABELS = {"case_id", "status", "reason", "reason_code"}


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

    result: CaseResult
    figures: Mapping[str, Figure]

    @property
    def title(self) -> str:
        """Name it for tools that take nothing but a name: workload, case, devices, stand-ins told as such."""
        case = self.result
        stand_in = " (CPU stand-in)" if case.is_stand_in else ""
        return f"{case.arch} {case.case_id}, {place(case)}{stand_in}".strip()

    @property
    def note(self) -> str:
        """What stands beside every number that was measured on CPU cores; else empty."""
        return CPU_STAND_IN if self.result.device_type == "cpu" else ""

    @property
    def labels(self) -> dict[str, str]:
        """What the case is, as text by column of cases.csv."""
        known = {c.name: _label(self.result.cells.get(c.name)) for c in IDENTITY if c.name not in _NO_LABELS}
        known["data"] = data_kind(known["data"])
        return filled(known)

    @property
    def timed_ms(self) -> tuple[float, ...]:
        """Step time of the slowest rank, in order of the rounds."""
        return self.figures["step_ms"].by_round if "step_ms" in self.figures else ()


def measured_cases(run: RunData) -> list[MeasuredCase]:
    """List the cases of status `ok` in the order of cases.csv. Raises UsageError where there are none."""
    cases = [case for case in run.results if case.is_ok]
    if not cases:
        raise UsageError(f"{run.path} has no measured case; name a run with cases of status ok")
    by_round = metrics_by_round(cases, run.times)
    found = []
    for case in cases:
        figures = {}
        for column, metric in EXPORTED.items():
            values = by_round[case.case_id][column]
            figure = Figure(
                metric,
                name=f"{case.unit}_per_s" if metric.is_rate else column,
                unit=per_second(case.unit) if metric.is_rate else metric.unit or "ratio",
                value=case.interval(column),
                by_round=tuple(values[r] for r in sorted(values)),
            )
            if figure.value or figure.by_round:
                figures[column] = figure
        found.append(MeasuredCase(case, figures))
    return found


def _label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else text(value)


def filled(told: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of `told`."""
    return {name: value for name, value in told.items() if value}
