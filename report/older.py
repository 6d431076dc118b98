"""Completes runs of an earlier schema with what their blocks say, so that the page reads alike for all."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from bench.conditions import Manifest
from bench.estimate import MIN_ROUNDS
from bench.findings.wording import finite, text
from bench.results.aggregate import typical_of
from bench.results.comparisons import Comparison
from bench.results.round_times import RoundTimes
from bench.results.schema import CASES, SCHEMA_VERSION, typed_frame
from bench.results.store import RunData
from bench.results.typical import Typical
from bench.stats import Interval
from report.forest import against_default
from report.select import records

Cells = dict[Any, Any]

_NOTE = (
    "This run is of an earlier version: its numbers were computed anew from blocks.csv, and can differ a "
    "little from those of its cases.csv."
)
_ONE = Interval(1.0, 1.0, 1.0)
_UNKNOWN = Interval(math.nan, math.nan, math.nan)


def completed(run: RunData, comparisons: Sequence[Comparison]) -> RunData:
    """Return the run with ratios to DDP's default; an older one with the numbers that one fit gives."""
    rows = [dict(row) for row in records(run.cases)]
    if run.cases["vs_ddp_default"].isna().all():
        _put_ratios(rows, comparisons)
    if _is_older(run.manifest) and not run.blocks.empty:
        _put_steps(rows, typical_of(RoundTimes.of(run.blocks)))
    return replace(run, cases=typed_frame(rows, CASES))


def notes(run: RunData) -> tuple[str, ...]:
    """Say that the numbers are not those of the run's cases.csv, where that is so."""
    return (_NOTE,) if _is_older(run.manifest) and not run.blocks.empty else ()


def _is_older(manifest: Manifest) -> bool:
    version = manifest.get("schema_version")
    return isinstance(version, int) and version < SCHEMA_VERSION


def _put_ratios(rows: Sequence[Cells], comparisons: Sequence[Comparison]) -> None:
    data_parallel = {text(row["case_id"]) for row in rows if row["mode"] == "dp"}
    found: dict[str, Interval] = {}
    for default in dict.fromkeys(_default_of(one, data_parallel) for one in comparisons):
        found |= {default: _ONE, **against_default(comparisons, default)}
    for row in rows:
        if (case_id := text(row["case_id"])) in found:
            _put(row, "vs_ddp_default", found[case_id])


def _default_of(one: Comparison, data_parallel: Container[str]) -> str:
    return one.case_id if one.reference_id in data_parallel else one.reference_id


def _put_steps(rows: Sequence[Cells], typical: Typical) -> None:
    ok = [row for row in rows if row["status"] == "ok" and typical.has((text(row["case_id"]), "timed"))]
    single = next((row for row in ok if row["mode"] == "single"), None)
    for row in ok:
        case_id, batch = text(row["case_id"]), finite(row["global_batch"])
        if batch is None:
            continue
        step = typical.step_ms(case_id)
        _put(row, "step_ms", step)
        rates = (1000 * batch / ms for ms in (step.estimate, step.high, step.low))
        _put(row, "images_per_s", Interval(*rates))
        if single is not None and row is not single:
            steps = typical.ratio(text(single["case_id"]), case_id)
            speedup = steps.scaled(batch / float(single["global_batch"]))
            _put(row, "speedup", speedup)
            _put(row, "efficiency", speedup.scaled(1 / int(row["num_devices"])))
        few = (finite(row["num_rounds"]) or 0) < MIN_ROUNDS
        for name, found in (
            ("no_sync_step_ms", typical.step_ms(case_id, "no_sync")),
            ("comm_ms", typical.step_ms(case_id, "comm")),
            ("exposed_comm_ms", typical.exposed_ms(case_id)),
            ("hidden_pct", _UNKNOWN if few else typical.hidden_pct(case_id)),
        ):
            if finite(row[name]) is not None:
                _put(row, name, found)


def _put(row: Cells, name: str, found: Interval) -> None:
    row |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
