"""Completes runs of an earlier schema with what their blocks say, so that the page reads alike for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_bench.bench.conditions import Manifest
from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.results.aggregate import fits_of_cases, typical_of, units_per_step
from ddp_bench.bench.results.comparisons import Comparison, over_default
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.schema import CASES, SCHEMA_VERSION, records, typed_frame
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.results.typical import Typical
from ddp_bench.bench.stats import Interval

Cells = dict[Any, Any]

ALWAYS = ("step_ms", "images_per_s", "speedup", "efficiency")
"""Columns that a run gets though its own version had none; the others only where it measured them."""

_NOTE = (
    "This run is of an earlier version: its numbers were computed anew from blocks.csv, and can differ a "
    "little from those of its cases.csv."
)


def completed(run: RunData, comparisons: Sequence[Comparison]) -> RunData:
    """Return the run with ratios to DDP's default; an older one with the numbers that one fit gives."""
    rows = [dict(row) for row in records(run.cases)]
    if run.cases["vs_ddp_default"].isna().all():
        _put_ratios(rows, comparisons)
    if _is_older(run.manifest) and not run.blocks.empty:
        _put_steps(rows, typical_of(RoundTimes.of(run.blocks)), units_per_step(run.cases))
    return replace(run, cases=typed_frame(rows, CASES))


def notes(run: RunData) -> tuple[str, ...]:
    """Say that the numbers are not those of the run's cases.csv, where that is so."""
    return (_NOTE,) if _is_older(run.manifest) and not run.blocks.empty else ()


def _is_older(manifest: Manifest) -> bool:
    version = manifest.get("schema_version")
    return isinstance(version, int) and version < SCHEMA_VERSION


def _put_ratios(rows: Sequence[Cells], comparisons: Sequence[Comparison]) -> None:
    found = over_default(comparisons, rows)
    for row in rows:
        if (case_id := text(row["case_id"])) in found:
            _put(row, "vs_ddp_default", found[case_id])


def _put_steps(rows: Sequence[Cells], typical: Typical, units: Mapping[str, int]) -> None:
    found = fits_of_cases(rows, typical, units)
    for row in rows:
        fitted = found.get(text(row["case_id"]), {})
        for name, value in fitted.items():
            if name in ALWAYS or finite(row[name]) is not None:
                _put(row, name, value)


def _put(row: Cells, name: str, found: Interval) -> None:
    row |= found.columns(name)
