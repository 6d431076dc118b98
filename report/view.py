"""Turns the rows of runs into everything that the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from bench.findings.findings import conclude
from bench.findings.wording import CPU_STAND_IN, plain, plural, text, truth
from bench.results.aggregate import comparisons_of_run
from bench.results.store import RunData
from bench.scaling.document import Predictions
from report import anatomy, caps, conditions, devices, paper, predicted, rounds, tables, together
from report.drawings import Drawing
from report.model import Page, RunFiles, RunView
from report.select import WorkloadCases, workloads

_MOST_HOSTS = 4
SHARED_WARNING = (
    "Some cases use more devices than the machine has, so devices share cores or GPUs: such numbers say "
    "nothing about scaling on devices of their own. They are drawn hollow and marked “shared”."
)


def page(
    runs: Sequence[RunData], files: Sequence[RunFiles] = (), predictions: Predictions | None = None
) -> Page:
    """Make the whole page; several runs stand one after another, their differences first.

    `files` are what the page offers of each run's files, in the order of the runs; `predictions` are
    shown with the first run.
    """
    offered = files or [RunFiles()] * len(runs)
    titles = _titles(runs)
    views = tuple(
        _run_view(run, own, title, f"run{i}", predictions if i == 1 else None)
        for i, (run, own, title) in enumerate(zip(runs, offered, titles, strict=True), 1)
    )
    if len(views) == 1:
        return Page(title=titles[0], runs=views, differences=None)
    return Page(
        title=" · ".join(titles),
        runs=views,
        differences=conditions.differences(titles, [view.conditions for view in views]),
        together=together.section(titles, [workloads(run.cases) for run in runs]),
    )


def _titles(runs: Sequence[RunData]) -> list[str]:
    """Name each run; runs that share a name go by their folder too, or by a number."""
    names = [plain(run.manifest.get("name")) or run.path.name for run in runs]
    names = [
        name if names.count(name) == 1 else f"{name} ({run.path.name})"
        for name, run in zip(names, runs, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name}, {names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def _run_view(
    run: RunData, files: RunFiles, title: str, key: str, predictions: Predictions | None
) -> RunView:
    cases = run.cases
    measured = workloads(cases)
    several = len(measured) > 1
    named = [w.cases.assign(workload=w.label if several else "") for w in measured]
    ranks = conditions.ranks(run.manifest)
    by_case = rounds.by_case(measured, run.blocks, files.traces, key=key)
    beside = paper.section(run, measured[0], key=f"{key}-paper") if measured else None
    drawn = [
        _figures(workload, run, key=f"{key}-{i}", with_caps=beside is None)
        for i, workload in enumerate(measured, start=1)
    ]
    if several:
        drawn = [
            tuple(replace(figure, title=f"{figure.title}: {workload.label}") for figure in figures)
            for workload, figures in zip(measured, drawn, strict=True)
        ]
    return RunView(
        key=key,
        title=title,
        subtitle=_subtitle(run, cases, measured),
        warnings=_warnings(cases),
        verdict=tuple(conclude(run.path, run.manifest, cases, run.blocks, comparisons_of_run(run)).sentences),
        figures=tuple(figure for figures in drawn for figure in figures),
        paper=beside,
        tables=tables.tables(pd.concat(named), rounds.links(by_case)) if named else (),
        rounds=by_case,
        files=files,
        unmeasured=tables.unmeasured(cases),
        conditions=(
            *conditions.groups(run.manifest, link=conditions.link(run.manifest, cases)),
            *conditions.stability(run.manifest, cases, run.blocks),
        ),
        condition_tables=(ranks,) if ranks else (),
        topology=conditions.topology(run.manifest),
        predicted=None
        if predictions is None
        else predicted.section(run, predictions, key=f"{key}-predicted"),
    )


def _figures(workload: WorkloadCases, run: RunData, *, key: str, with_caps: bool) -> tuple[Drawing, ...]:
    """Make every figure there is data for; bucket caps only where they are not drawn beside the paper's."""
    made = (
        devices.throughput(workload, key=key),
        devices.efficiency(workload, key=key),
        devices.dp_against_ddp(workload, run.blocks, key=key),
        caps.bucket_caps(workload, key=key) if with_caps else None,
        anatomy.breakdown(workload, key=key),
        anatomy.one_step(workload, run.buckets, key=key),
        rounds.step_times(workload, run.blocks, key=key),
        devices.memory(workload, key=key),
        rounds.drift(workload, run.blocks, key=key),
    )
    return tuple(figure for figure in made if figure is not None)


def _subtitle(run: RunData, cases: pd.DataFrame, measured: list[WorkloadCases]) -> tuple[str, ...]:
    hardware = dict.fromkeys(text(name) for name in cases["device_name"])
    hosts = conditions.hosts(run.manifest)
    what = measured[0].label if len(measured) == 1 else plural(len(measured), "workload") if measured else ""
    link = conditions.link(run.manifest, cases)
    parts = (
        what,
        *hardware,
        f"{'hosts' if len(hosts) > 1 else 'host'} {_listed(hosts)}" if hosts else "",
        f"link {link}" if link else "",
        plain(run.manifest.get("created_utc")),
    )
    return tuple(part for part in parts if part)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_HOSTS
    return ", ".join(names[:_MOST_HOSTS]) + (f" and {plural(more, 'other')}" if more > 0 else "")


def _warnings(cases: pd.DataFrame) -> tuple[str, ...]:
    ok = cases["status"] == "ok"
    broken = cases[~ok & (cases["status"] != "skipped")]
    made = (
        f"{CPU_STAND_IN}." if (cases["device_type"] == "cpu").any() else "",
        SHARED_WARNING if any(truth(value) for value in cases.loc[ok, "oversubscribed"]) else "",
        f"{plural(len(broken), 'case')} of {len(cases)} did not finish: see “Not measured”."
        if len(broken)
        else "",
    )
    return tuple(warning for warning in made if warning)
