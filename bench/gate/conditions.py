"""Where the conditions of two runs differ, and the settings of their cases."""

from __future__ import annotations

from collections.abc import Iterable

from bench.conditions import Difference, Question, differences
from bench.gate.runs import SWEPT, GateCase, GateRun
from bench.results.schema import IDENTITY

PLANNED = tuple(
    column.name
    for column in IDENTITY
    if column.name not in {*SWEPT, "case_id", "status", "reason", "global_batch", "device_name", "link"}
)
"""Settings and places of a case, known of unmeasured ones too; global_batch follows from them."""

SEEN = ("device_name", "link")
"""Known only of cases that were measured."""


def run_differences(
    baseline: GateRun, candidate: GateRun, pairs: Iterable[tuple[GateCase, GateCase]]
) -> tuple[Difference, ...]:
    """Conditions and settings that differ, blocking ones first."""
    found = _between_cases(list(pairs))
    found += differences(baseline.manifest, candidate.manifest, Question.GATE)
    return tuple(sorted(found, key=lambda difference: not difference.blocking))


def _between_cases(pairs: list[tuple[GateCase, GateCase]]) -> list[Difference]:
    found = []
    for name in (*PLANNED, *SEEN):
        changed = [
            (a.row.get(name, "none"), b.row.get(name, "none"))
            for a, b in pairs
            if a.row.get(name) != b.row.get(name) and (name in PLANNED or (a.ok and b.ok))
        ]
        if changed:
            left, right = (", ".join(dict.fromkeys(side)) for side in zip(*changed, strict=True))
            found.append(Difference(name, left, right, blocking=True))
    return found
