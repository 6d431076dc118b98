"""Rows to view model: everything the page shows, from the runs and nothing else. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from bench.findings import findings
from report import charts, conditions, tables
from report.model import Page, RunView
from report.numbers import plain, plural
from report.select import Workload, text, truth, workloads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.store import RunData

CPU_WARNING = "Devices are CPU cores standing in for GPUs: read ratios with care, not absolute numbers."
SHARED_WARNING = (
    "Some cases use more devices than the machine has, so devices share cores or GPUs: such numbers say "
    "nothing about scaling on devices of their own. They are drawn hollow and marked “shared”."
)


def page(runs: Sequence[RunData]) -> Page:
    """The whole page; several runs stand one after another, their differences first."""
    views = tuple(_run_view(run, f"run{i}") for i, run in enumerate(runs, start=1))
    differences = conditions.differences([v.title for v in views], [v.conditions for v in views])
    title = views[0].title if len(views) == 1 else " · ".join(view.title for view in views)
    return Page(title=title, runs=views, differences=differences)


def _run_view(run: RunData, key: str) -> RunView:
    cases = run.cases
    measured = workloads(cases)
    several = len(measured) > 1
    named = [w.cases.assign(workload=w.label if several else "") for w in measured]
    ranks = conditions.ranks(run.manifest)
    return RunView(
        key=key,
        title=plain(run.manifest.get("name")) or run.path.name,
        subtitle=_subtitle(run, cases, measured),
        warnings=_warnings(cases),
        verdict=tuple(findings(cases, run.blocks)) or (_nothing(cases),),
        figures=tuple(
            figure
            for i, workload in enumerate(measured, start=1)
            for figure in charts.figures(
                workload, key=f"{key}-{i}", heading=workload.label if several else ""
            )
        ),
        tables=tables.tables(pd.concat(named)) if named else (),
        unmeasured=tables.unmeasured(cases),
        conditions=conditions.groups(run.manifest),
        condition_tables=(ranks,) if ranks else (),
        topology=conditions.topology(run.manifest),
    )


def _subtitle(run: RunData, cases: pd.DataFrame, measured: list[Workload]) -> tuple[str, ...]:
    devices = dict.fromkeys(text(name) for name in cases["device_name"])
    host = plain(conditions.section(run.manifest, "environment").get("host"))
    what = measured[0].label if len(measured) == 1 else plural(len(measured), "workload") if measured else ""
    parts = (what, *devices, f"host {host}" if host else "", plain(run.manifest.get("created_utc")))
    return tuple(part for part in parts if part)


def _warnings(cases: pd.DataFrame) -> tuple[str, ...]:
    ok = cases["status"] == "ok"
    broken = cases[~ok & (cases["status"] != "skipped")]
    made = (
        CPU_WARNING if (cases["device_type"] == "cpu").any() else "",
        SHARED_WARNING if any(truth(value) for value in cases.loc[ok, "oversubscribed"]) else "",
        f"{plural(len(broken), 'case')} of {len(cases)} did not finish: see “Not measured”."
        if len(broken)
        else "",
    )
    return tuple(warning for warning in made if warning)


def _nothing(cases: pd.DataFrame) -> str:
    return f"Nothing was measured: none of {plural(len(cases), 'planned case')} finished."
