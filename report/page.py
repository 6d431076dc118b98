"""Makes the page of a run: final strings, figures and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from ..bench.common.text import escape_controls
from ..bench.findings.answers import select_headline
from ..bench.findings.findings import Conclusion, conclude_run
from ..bench.findings.late_ranks import find_late_buckets
from ..bench.findings.verdicts import CAP, RESOLVED, Verdict
from ..bench.page.page import Card, Figure, Link, Page, Section
from ..bench.predict.output import Predictions
from ..bench.results.commands import write_repeat_command
from ..bench.results.comparisons import EQUAL, FASTER, SLOWER, find_default
from ..bench.results.run_folder import FAILURES
from ..bench.results.store import RunData
from . import charts, conditions, tables
from .cases import add_cells, add_rates, add_workload_names, group_workloads
from .columns import TERMS
from .forms import make_forms_section
from .predicted import make_prediction_section
from .step import draw_breakdown

_TRACE = re.compile(r"(?P<case_id>.+)-rank(?P<rank>\d+)\.json\.gz")
_STATES = {FASTER: "found", SLOWER: "found", RESOLVED: "found", EQUAL: "equal"}


@dataclass(frozen=True)
class Files:
    """Files of a run on the page: tables, traces by case, failures by their name in its folder."""

    tables: tuple[Link, ...] = ()
    traces: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    failures: Mapping[str, Link] = field(default_factory=dict)
    data: Link | None = None
    """The numbers as CSV, within the page."""

    @classmethod
    def from_folder(cls, folder: Path, page_folder: Path | None) -> Files:
        """Find the files of the run in `folder`; links lead there where it lies in or below `page_folder`.

        Links are relative, so the page and the run have to move together. None makes no links.
        """
        below = None
        if page_folder is not None and folder.resolve().is_relative_to(page_folder.resolve()):
            below = folder.resolve().relative_to(page_folder.resolve())

        def make_link(label: str, name: str) -> Link:
            return Link(label, "" if below is None else f"./{quote((below / name).as_posix())}")

        traces: dict[str, list[tuple[int, Link]]] = {}
        for path in (folder / "traces").glob("*.json.gz") if below is not None else ():
            if (match := _TRACE.fullmatch(path.name)) is not None:
                rank, name = int(match["rank"]), f"traces/{path.name}"
                traces.setdefault(match["case_id"], []).append((rank, make_link(f"rank {rank}", name)))
        kept = sorted(f"{FAILURES}/{path.name}" for path in (folder / FAILURES).glob("*.txt"))
        names = ("cases.csv", "comparisons.csv", "blocks.csv", "steps.csv", "manifest.json")
        return cls(
            tuple(make_link(name, name) for name in names if (folder / name).is_file()),
            {case_id: tuple(one for _, one in sorted(links)) for case_id, links in traces.items()},
            {name: make_link(name, name) for name in kept},
        )


def make_page(
    run: RunData,
    files: Files | None = None,
    predictions: Predictions | None = None,
    conclusion: Conclusion | None = None,
) -> Page:
    """Make the page of a run.

    Args:
        run: what was measured.
        files: what the page offers of the run's files.
        predictions: made of this run, to be drawn.
        conclusion: of this run, where it was concluded before.
    """
    files = files or Files()
    title = run.manifest.name or run.path.name
    cases, manifest = run.results, run.manifest
    conclusion, comparisons = conclusion or conclude_run(run), run.compared
    measured = group_workloads(cases)
    step = conclusion.step
    subtitle, setup = conditions.write_subtitle(run, measured, title)
    figures: list[Figure] = []
    rounds: list[Figure] = []
    for i, workload in enumerate(measured, start=1):
        if any(c.shares_gpu for c in workload.cases) and not select_headline(workload.cases):
            continue  # cases that share a GPU tell nothing about speed
        key, suffix = f"w{i}", f": {workload.name}" if len(measured) > 1 else ""
        drawn = (
            charts.draw_scaling(workload, {one.faster_id for one in conclusion.verdicts}, key=key),
            charts.draw_against_default(workload, comparisons, key=key),
            draw_breakdown(workload, comparisons, run, key=key),
        )
        over_time = charts.draw_drift(workload, run.times, key=key)
        for found, kept in ((drawn, figures), ((over_time,), rounds)):
            kept += [replace(one, title=f"{one.title}{suffix}") for one in found if one is not None]
    figures += charts.draw_over_batch_sizes(cases)
    shown = [
        add_cells(add_rates(case, manifest), traces=files.traces.get(case.case_id, ()))
        for case in add_workload_names(measured)
    ]
    results = tables.tabulate_results(cases, *choose_best(conclusion))
    others = tables.make_tables(shown, comparisons)
    failed, places = tables.tabulate_unmeasured(cases, files.failures), conditions.tabulate_ranks(manifest)
    late = tables.tabulate_late_ranks(find_late_buckets(run, find_default(select_headline(cases))))
    folds = (
        Section("more", "Rounds over time", figures=rounds),
        Section("all-tables", "More tables", tables=[*filter(None, (*others, late, places))]),
    )
    predicted = make_prediction_section(run, predictions) if predictions else None
    return Page(
        title=title,
        heading=conditions.write_heading(cases) or title,
        status=conditions.describe_status(manifest, cases, conclusion.verdicts),
        subtitle=subtitle,
        setup=setup,
        command=write_repeat_command(manifest),
        warnings=conditions.list_warnings(manifest, cases),
        cards=make_cards(conclusion.verdicts),
        following=conclusion.next_step,
        savings=tables.tabulate_savings(step.savings, escape_controls(step.consists_of)) if step else None,
        cautions=[(caution.kind, caution.sentence) for caution in conclusion.cautions],
        trust=conclusion.trust.lines if conclusion.trust else {},
        notes=conclusion.notes,
        intervals="95% intervals" if shown else "",
        are_bars=bool(figures),
        figures=figures,
        sections=[*filter(None, (make_forms_section(measured), predicted))],
        tables=[table for table in (*results, failed) if table is not None],
        folds=[fold for fold in folds if fold.figures or fold.tables],
        files=files.tables,
        data=files.data,
        conditions=conditions.group_conditions(manifest, cases),
        terms=TERMS,
    )


def choose_best(conclusion: Conclusion) -> tuple[str, str]:
    """Choose the case that the answers recommend, else DDP's best setting, and say which; blank without."""
    settings = [one for one in conclusion.verdicts if one.question == CAP]
    references = {pair.reference_id for one in settings if one.is_open for pair in one.comparisons}
    if conclusion.fastest_id not in {"", *references}:
        return conclusion.fastest_id, "recommended"
    known = {one.faster_id or one.comparisons[0].reference_id for one in settings if not one.is_open}
    ddp = [case.case_id for case in conclusion.cases if case.mode == "ddp" and case.case_id in known]
    return (ddp[0], "best DDP setting") if len(settings) == len(ddp) == 1 else ("", "")


def make_cards(verdicts: Iterable[Verdict]) -> list[Card]:
    """Make a card per answer."""
    return [
        Card(
            title=verdict.title,
            state=_STATES.get(verdict.answer, "open"),
            label=verdict.label,
            sentence=escape_controls(verdict.sentence),
            paste=escape_controls(verdict.paste),
        )
        for verdict in verdicts
    ]
