"""Turns the rows of runs into everything that the page shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from ddp_bench.bench.findings.findings import conclude
from ddp_bench.bench.findings.numbers import plural
from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.results.aggregate import comparisons_of_run, typical_of
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.results.typical import Typical
from ddp_bench.report import (
    anatomy,
    answer,
    caps,
    conditions,
    devices,
    forest,
    forms,
    predicted,
    rounds,
    tables,
    together,
)
from ddp_bench.report.drawings import Drawing
from ddp_bench.report.model import Fact, Hyperlink, Page, RunFiles, RunView, Table
from ddp_bench.report.rates import with_rates
from ddp_bench.report.select import WorkloadCases, workloads

_MOST_HOSTS = 4
_MOMENT = re.compile(r"([0-9-]{10})T([0-9]{2}:[0-9]{2}):[0-9]{2}(?:Z|\+00:00)")


def page(
    runs: Sequence[RunData],
    files: Sequence[RunFiles] = (),
    predictions: Predictions | None = None,
    *,
    price: float | None = None,
) -> Page:
    """Make the whole page; several runs stand one after another, what they say together first.

    `files` are what the page offers of each run's files, in the order of the runs; `predictions` are
    shown with the first run; `price` is that of a device for an hour.
    """
    offered = files or [RunFiles()] * len(runs)
    titles = _titles(runs)
    comparisons = [comparisons_of_run(run) for run in runs]
    # One block of objects: pandas takes long for every row that is chosen of a hundred typed columns.
    runs = [replace(run, cases=run.cases.astype(object)) for run in runs]
    views = tuple(
        _run_view(
            run, found, own, title, key=f"run{i}", predictions=predictions if i == 1 else None, price=price
        )
        for i, (run, found, own, title) in enumerate(zip(runs, comparisons, offered, titles, strict=True), 1)
    )
    if len(views) == 1:
        return Page(title=titles[0], runs=views, differences=None)
    return Page(
        title=" · ".join(titles),
        runs=tuple(replace(view, heading=f"{view.title}: {view.heading}") for view in views),
        differences=conditions.differences(
            titles,
            [run.manifest for run in runs],
            [conditions.link(run.manifest, run.cases) for run in runs],
        ),
        together=together.section(titles, runs, [workloads(run.cases) for run in runs]),
    )


def _titles(runs: Sequence[RunData]) -> list[str]:
    """Name each run; runs that share a name go by their folder too, or by a number."""
    names = [run.manifest.name or run.path.name for run in runs]
    names = [
        name if names.count(name) == 1 else f"{name} ({run.path.name})"
        for name, run in zip(names, runs, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name}, {names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def _run_view(
    run: RunData,
    comparisons: Sequence[Comparison],
    files: RunFiles,
    title: str,
    *,
    key: str,
    predictions: Predictions | None,
    price: float | None,
) -> RunView:
    cases = run.cases
    conclusion = conclude(run.path, run.manifest, cases, run.blocks, comparisons, resumable=run.resumable)
    trust = (conclusion.trust.sentence,) if conclusion.trust is not None else ()
    measured = workloads(cases)
    several = len(measured) > 1
    named = [w.cases.assign(workload=w.name if several else "") for w in measured]
    ranks = conditions.ranks(run.manifest)
    typical = typical_of(RoundTimes.of(run.blocks))
    main: list[Drawing] = []
    more: list[Drawing] = []
    for i, workload in enumerate(measured, start=1):
        suffix = f": {workload.name}" if several else ""
        place = f"{key}-{i}"
        main += _titled(_main_figures(workload, run, comparisons, key=place), suffix)
        more += _titled(_more_figures(workload, run, (typical, comparisons), key=place), suffix)
    return RunView(
        key=key,
        title=title,
        heading=answer.heading(cases) or title,
        status=answer.status(run.manifest, cases, conclusion.verdicts),
        subtitle=_subtitle(run, cases, measured, title),
        warnings=answer.warnings(cases),
        cards=answer.cards(conclusion.verdicts),
        following=answer.following(conclusion),
        cautions=tuple(Fact(caution.kind, caution.sentence) for caution in conclusion.cautions),
        notes=(*trust, *conclusion.notes),
        figures=tuple(main),
        more_figures=tuple(more),
        tables=_tables(run, named, files.traces, comparisons, price),
        files=files,
        unmeasured=tables.unmeasured(cases, files.failures),
        conditions=conditions.groups(run.manifest, cases),
        condition_tables=(ranks,) if ranks else (),
        topology=conditions.topology(run.manifest),
        predicted=None
        if predictions is None
        else predicted.section(run, predictions, key=f"{key}-predicted"),
        forms=forms.section(measured, key=f"{key}-forms"),
    )


def _tables(
    run: RunData,
    named: Sequence[pd.DataFrame],
    traces: Mapping[str, tuple[Hyperlink, ...]],
    comparisons: Sequence[Comparison],
    price: float | None,
) -> tuple[Table, ...]:
    if not named:
        return ()
    rows = with_rates(pd.concat(named), run.manifest, price)
    return tables.tables(rows, traces, comparisons)


def _main_figures(
    workload: WorkloadCases, run: RunData, comparisons: Sequence[Comparison], *, key: str
) -> list[Drawing | None]:
    """Make the figures that stand unfolded: scaling, what is faster, and where a step goes."""
    return [
        devices.throughput(workload, key=key),
        forest.forest(workload, comparisons, key=key),
        anatomy.one_step(workload, run.buckets, key=key),
        anatomy.breakdown(workload, key=key),
    ]


def _more_figures(
    workload: WorkloadCases,
    run: RunData,
    fitted: tuple[Typical, Sequence[Comparison]],
    *,
    key: str,
) -> list[Drawing | None]:
    """Make all others."""
    return [
        devices.efficiency(workload, key=key),
        devices.dp_against_ddp(workload, *fitted, key=key),
        caps.bucket_caps(workload, key=key),
        devices.memory(workload, key=key),
        rounds.drift(workload, run.blocks, key=key),
    ]


def _titled(figures: Sequence[Drawing | None], suffix: str) -> list[Drawing]:
    return [replace(figure, title=f"{figure.title}{suffix}") for figure in figures if figure is not None]


def _subtitle(
    run: RunData, cases: pd.DataFrame, measured: list[WorkloadCases], title: str
) -> tuple[str, ...]:
    hardware = dict.fromkeys(text(name) for name in cases["device_name"])
    hosts = conditions.hosts(run.manifest)
    what = measured[0].label if len(measured) == 1 else plural(len(measured), "workload") if measured else ""
    link = conditions.link(run.manifest, cases)
    parts = (
        what,
        *hardware,
        f"{'hosts' if len(hosts) > 1 else 'host'} {_listed(hosts)}" if hosts else "",
        f"link {link}" if link else "",
        _moment(run.manifest.created_utc or ""),
        f"run {title}" if title != "run" else "",
    )
    return tuple(part for part in parts if part)


def _moment(written: str) -> str:
    """Write `2026-03-01 09:30 UTC`; another text as it is."""
    found = _MOMENT.fullmatch(written)
    return written if found is None else f"{found[1]} {found[2]} UTC"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_HOSTS
    return ", ".join(names[:_MOST_HOSTS]) + (f" and {plural(more, 'other')}" if more > 0 else "")
