"""Runs that repeat one another: how many of their intervals hold the value that they have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median, stdev

from ..bench.conditions import machine_kind
from ..bench.findings.next_step import took_turns
from ..bench.findings.numbers import TIMES, number, short_percent
from ..bench.findings.wording import case_label, estimate, text, truth
from ..bench.results.comparisons import over_eager
from ..bench.results.schema import records
from ..bench.results.store import RunData
from ..bench.stats.interval import Interval
from ..bench.stats.two_runs import common_value
from .table import Heading, Table

LEAST_RUNS = 3
"""Two agree or not; they have no scatter to hold their intervals against."""


def _are_repeats(runs: Sequence[RunData]) -> bool:
    """Whether runs measured the same plan on one kind of machine, one after another."""
    manifests = [run.manifest for run in runs]
    plans = {manifest.plan_hash for manifest in manifests}
    kinds = {str(machine_kind(manifest)) for manifest in manifests}
    alike = len(plans) == len(kinds) == 1 and None not in plans
    return alike and len(runs) >= LEAST_RUNS and not took_turns(manifests)


def repeats(runs: Sequence[RunData]) -> tuple[str, Table] | None:
    """Say how many intervals of repeated runs hold their common value, in all and ratio by ratio.

    None for runs that do not repeat one another, or know no ratio.
    """
    if not _are_repeats(runs):
        return None
    found: dict[str, list[Interval]] = {}
    for run in runs:
        for name, ratio in _ratios(run):
            if not math.isnan(ratio.low):
                found.setdefault(name, []).append(ratio)
    rows, held, total = [], 0, 0
    for name, ratios in found.items():
        if len(ratios) < LEAST_RUNS:
            continue
        common = common_value(ratios)
        holding = sum(not ratio.excludes(common) for ratio in ratios)
        held, total = held + holding, total + len(ratios)
        scatter = stdev(math.log(ratio.estimate) for ratio in ratios)
        width = median(ratio.half_width for ratio in ratios)
        cells = (*map(short_percent, (scatter, width)), f"{holding} of {len(ratios)}")
        rows.append((name, number(common), *cells))
    if not rows:
        return None
    said = f"Repeated runs: {held} of {total} intervals hold the value that the runs have in common"
    columns = (
        Heading("Ratio"),
        Heading(f"common value ({TIMES})", "number"),
        Heading("scatter of the runs (SD)", "number"),
        Heading("half-width of an interval", "number"),
        Heading("hold it", "number"),
    )
    note = (
        "The runs measured the same plan on one kind of machine. The common value is the mean of the runs, "
        "each by its interval. An interval of 95% holds it in 19 of 20 runs: where intervals tell what the "
        "next run brings, half of one is about twice the scatter of the runs."
    )
    return f"{said}, {100 * held / total:.0f}%.", Table("Repeated runs", note, columns, tuple(rows))


def _ratios(run: RunData) -> Iterator[tuple[str, Interval]]:
    """The answers of a run and the speed-ups of its cases that have their devices for themselves."""
    rows = [row for row in records(run.cases) if row["status"] == "ok" and not truth(row["oversubscribed"])]
    names = {text(row["case_id"]): case_label(row) for row in rows}
    across = over_eager(run.compared, rows)
    for one in run.compared:
        if one not in across and {one.case_id, one.reference_id} <= names.keys():
            yield f"{names[one.case_id]} / {names[one.reference_id]}", one.ratio
    for row in rows:
        speedup = estimate(row, "speedup")
        if text(row["mode"]) != "single" and speedup is not None:
            yield f"{names[text(row['case_id'])]} / single", speedup
