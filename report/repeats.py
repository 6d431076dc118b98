"""Runs that repeat one another: how many of their intervals hold the value that they have in common."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench.conditions import machine_kind
from ..bench.findings.next_step import took_turns
from ..bench.findings.numbers import TIMES, number, short_percent
from ..bench.findings.repeats import LEAST_RUNS, agreements, ratios_of
from ..bench.results.store import RunData
from .table import Heading, Table


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
    found = agreements(ratios_of(run.cases, run.compared) for run in runs)
    if not found:
        return None
    held, total = sum(one.holding for one in found), sum(one.num_runs for one in found)
    rows = [
        (
            one.name,
            number(one.common),
            short_percent(one.scatter),
            short_percent(one.half_width),
            f"{one.holding} of {one.num_runs}",
        )
        for one in found
    ]
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
        "each by its interval. An interval of 95% speaks of its own run; where it told what the next run "
        "brings, it would hold that value in 19 of 20, and half of it be about twice the scatter of the runs."
    )
    return f"{said}, {100 * held / total:.0f}%.", Table("Repeated runs", note, columns, tuple(rows))
