"""Turns the rows of runs into everything that the page shows: final strings, figures and tables."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from ..bench.findings.answers import headline
from ..bench.findings.cautions import Caution
from ..bench.findings.findings import conclude_run
from ..bench.findings.next_step import NextStep, again
from ..bench.findings.verdicts import RESOLVED, Verdict
from ..bench.predict.output import Predictions
from ..bench.results.comparisons import EQUAL, FASTER, SLOWER
from ..bench.results.store import FAILURES, RunData
from ..bench.text import visible
from . import conditions, figures, forest, step, tables, timeline
from .cases import with_cells, with_rates, workloads
from .drawing import Figure
from .forms import forms
from .head import heading, status, subtitle, warnings
from .predicted import predicted
from .table import Link, Section, Table

_TRACE = re.compile(r"(?P<case_id>.+)-rank(?P<rank>\d+)\.json\.gz")
_STATES = {FASTER: "found", SLOWER: "found", RESOLVED: "found", EQUAL: "equal"}


@dataclass(frozen=True)
class Files:
    """What the page says of a run's files: tables, traces by case, failures by their name in its folder."""

    tables: tuple[Link, ...] = ()
    traces: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    failures: Mapping[str, Link] = field(default_factory=dict)
    data: Link | None = None
    """The numbers as CSV within the page."""

    @classmethod
    def of(cls, folder: Path, page_folder: Path | None) -> Files:
        """Find the files of the run in `folder`; links lead there where it lies in or below `page_folder`.

        Links are relative, so the page and the run have to move together. None makes no links.
        """
        below = None
        if page_folder is not None and folder.resolve().is_relative_to(page_folder.resolve()):
            below = folder.resolve().relative_to(page_folder.resolve())

        def link(label: str, name: str) -> Link:
            return Link(label, "" if below is None else f"./{quote((below / name).as_posix())}")

        traces: dict[str, list[tuple[int, Link]]] = {}
        for path in (folder / "traces").glob("*.json.gz") if below is not None else ():
            if (match := _TRACE.fullmatch(path.name)) is not None:
                rank, name = int(match["rank"]), f"traces/{path.name}"
                traces.setdefault(match["case_id"], []).append((rank, link(f"rank {rank}", name)))
        kept = sorted(f"{FAILURES}/{path.name}" for path in (folder / FAILURES).glob("*.txt"))
        names = ("cases.csv", "comparisons.csv", "blocks.csv", "manifest.json")
        return cls(
            tuple(link(name, name) for name in names if (folder / name).is_file()),
            {case_id: tuple(one for _, one in sorted(links)) for case_id, links in traces.items()},
            {name: link(name, name) for name in kept},
        )


def data_link(name: str, csv: bytes) -> Link:
    """A link of a page that holds a file of its own, which a browser saves under `name`."""
    return Link(name, f"data:text/csv;base64,{base64.b64encode(csv).decode()}")


class Card(NamedTuple):
    """One answer: `state` is `found`, `equal` or `open`, `label` names it in words, `paste` is code."""

    title: str
    state: str
    label: str
    sentence: str
    paste: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole page: `heading` names what was measured, `title` the run; what is not given is not shown."""

    title: str
    heading: str
    status: str
    subtitle: Sequence[str] = ()
    command: str = ""
    warnings: Sequence[str] = ()
    cards: Sequence[Card] = ()
    trust: Mapping[str, str] = field(default_factory=dict)
    """What the answers are worth, by what they claim; empty where there are none."""
    following: NextStep | None = None
    cautions: Sequence[Caution] = ()
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    not_drawn: Sequence[str] = ()
    """Why a figure is missing."""
    more_figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    """The first is the page's; the others are folded."""
    files: Files = field(default_factory=Files)
    unmeasured: Table | None = None
    conditions: Sequence[conditions.Group] = ()
    ranks: Table | None = None
    topology: str = ""
    sections: Mapping[str, Section] = field(default_factory=dict)
    """What stands between the figures and the numbers, by its key."""

    @property
    def folds(self) -> dict[str, Section]:
        """What is folded, by its key."""
        more, others = self.more_figures, self.tables[1:]
        return {
            **({"more": Section(more[0].title.partition(":")[0], figures=more)} if more else {}),
            **({"all-tables": Section("More tables", tables=others)} if others else {}),
        }


def page(
    run: RunData,
    files: Files | None = None,
    predictions: Predictions | None = None,
    *,
    price: float | None = None,
) -> Page:
    """Make the page of a run.

    Args:
        run: what was measured.
        files: what the page offers of the run's files.
        predictions: made of this run, to be drawn.
        price: of a device for an hour.
    """
    files = files or Files()
    title = run.manifest.name or run.path.name
    cases, manifest = run.results, run.manifest
    conclusion, comparisons = conclude_run(run), run.compared
    measured = workloads(cases)
    main: list[Figure] = []
    not_drawn: list[str] = []
    more: list[Figure] = []
    for i, workload in enumerate(measured, start=1):
        place = f"w{i}"
        if any(c.answers_nothing for c in workload.cases) and not headline(workload.cases):
            not_drawn.append("No figures: cases that share a GPU tell nothing about speed.")
            continue
        one_step, why_not = timeline.one_step(workload, run.blocks, key=place)
        not_drawn += [why_not] if why_not else []
        first = (
            figures.scaling(workload, key=place),
            forest.against_default(workload, comparisons, key=place),
            figures.bucket_caps(workload, key=place),
            step.breakdown(workload, comparisons, key=place),
            one_step,
        )
        rest = (figures.drift(workload, run.times, key=place),)
        suffix = f": {workload.name}" if len(measured) > 1 else ""
        for found, kept in ((first, main), (rest, more)):
            kept += [replace(one, title=f"{one.title}{suffix}") for one in found if one is not None]
    shown = [
        with_cells(with_rates(case, manifest, price), workload=w.name if len(measured) > 1 else "")
        for w in measured
        for case in w.cases
    ]
    sections = {
        "forms": forms(measured),
        "predicted": predicted(run, predictions, key="predicted") if predictions else None,
    }
    return Page(
        title=title,
        heading=", ".join(filter(None, (heading(cases) or title, conditions.link(manifest, cases)))),
        status=status(manifest, cases, conclusion.verdicts),
        subtitle=subtitle(run, measured, title),
        command=again(manifest) or " ".join(manifest.argv),
        warnings=warnings(cases, conditions.link(manifest, cases)),
        cards=cards(conclusion.verdicts),
        following=conclusion.next_step,
        cautions=conclusion.cautions,
        trust=conclusion.trust.lines if conclusion.trust else {},
        notes=conclusion.notes,
        figures=main,
        not_drawn=tuple(dict.fromkeys(not_drawn)),
        more_figures=more,
        tables=tables.tables(shown, files.traces, comparisons),
        files=files,
        unmeasured=tables.unmeasured(cases, files.failures),
        conditions=conditions.groups(manifest, cases),
        ranks=conditions.ranks(manifest),
        topology=(manifest.environment.topology or "").strip("\n"),
        sections={name: section for name, section in sections.items() if section is not None},
    )


def cards(verdicts: Iterable[Verdict]) -> list[Card]:
    """Make a card per answer."""
    return [
        Card(
            title=verdict.title,
            state=_STATES.get(verdict.answer, "open"),
            label=verdict.label,
            sentence=visible(verdict.sentence),
            paste=visible(verdict.paste),
        )
        for verdict in verdicts
    ]
