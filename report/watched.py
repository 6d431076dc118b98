"""The page of a user's own training that was watched: answers as of a run, and a step by part and rank."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench.common.numbers import quantity, with_interval
from ..bench.findings.watched import conclude_watch, write_ms
from ..bench.findings.watched_settings import Settings
from ..bench.machine.manifest import Watched, WatchedRank
from ..bench.page.page import Card, Figure, Heading, Page, Section, Step, Table
from ..bench.results.store import RunData
from . import conditions, tables
from .cases import workloads
from .charts import drift
from .page import Files, cards
from .step import WAITING, draw_bars, height_of_bars
from .table import TERMS

_WAITS = "what a backward takes after its last bucket is ready"
_HIDDEN_CONDITIONS = ("Settings", "Environment variables")
"""Of a run's choice, and of what may name a person."""

_HEADINGS = {"waits": WAITING, "buffers": "broadcast of buffers"}


def watched_page(run: RunData, files: Files) -> Page:
    """Make the page of a watched training; nothing on it is of the user's command or environment."""
    watched, manifest, cases = run.manifest.watched or Watched(), run.manifest, run.results
    found, measured, shown = conclude_watch(run), workloads(cases), _parts_taken(watched.ranks)
    over_time = [one for w in measured if (one := drift(w, run.times, key="w1")) is not None]
    more = [one for one in (*tables.tables(cases, {}, []), conditions.ranks(manifest)) if one is not None]
    late = [Card("Straggler", "found", "one rank is late", found.straggler)] if found.straggler else []
    folds = (
        Section("more", "Rounds over time", figures=over_time),
        Section("all-tables", "More tables", tables=more),
    )
    told = conditions.conditions(manifest, cases)
    return Page(
        title=manifest.name or run.path.name,
        heading=conditions.heading(cases),
        status=conditions.status(manifest, cases, found.run.verdicts),
        subtitle=conditions.subtitle(run, measured, "run"),
        cards=[*cards(found.run.verdicts), *late],
        trust=found.trust,
        following=Step(found.advice, "") if found.advice else None,
        notes=found.notes,
        intervals="In parentheses: 95% intervals.",
        figures=[draw_ranks(watched.ranks, shown)] if shown else [],
        tables=[
            *tabulate_settings(found.settings),
            *([tabulate_ranks(watched.ranks, shown)] if shown else []),
        ],
        folds=[fold for fold in folds if fold.figures or fold.tables],
        files=files.tables,
        data=files.data,
        terms=TERMS,
        conditions={name: facts for name, facts in told.items() if name not in _HIDDEN_CONDITIONS},
    )


def _parts_taken(ranks: Sequence[WatchedRank]) -> list[str]:
    """Return the parts that take time on any rank, in the order of the step."""
    known = [part for part in ranks[0].parts if all(part in one.parts for one in ranks)] if ranks else []
    return [part for part in known if any(one.parts[part].estimate > 0 for one in ranks)]


def tabulate_settings(found: Settings) -> list[Table]:
    """Tabulate what changes of settings would save, and apart from that those whose cost nobody knows."""
    columns = Heading("Cost of each step"), Heading("Where it goes", "long"), Heading("Try", "long")
    savings = [(with_interval(one.ms, "ms"), one.what, f"try {one.remedy}") for one in found.savings]
    others = [("not measured", what, f"try {remedy}") for what, remedy in found.unmeasured]
    named = {"What would save time": savings, "Set badly, at a cost that was not measured": others}
    return [Table(title, "", columns, tuple(rows)) for title, rows in named.items() if rows]


def tabulate_ranks(ranks: Sequence[WatchedRank], shown: Sequence[str]) -> Table:
    """Tabulate the shown parts of a step by rank."""
    return Table(
        "A step by part and rank",
        f"Medians of steps that hold nothing back. {WAITING[:1].upper()}{WAITING[1:]}: {_WAITS}.",
        (
            Heading("Rank", "number"),
            *(Heading(f"{_HEADINGS.get(part, part)} (ms)", "number") for part in shown),
        ),
        tuple((f"{one.rank}", *(write_ms(one.parts[part], "") for part in shown)) for one in ranks),
    )


def draw_ranks(ranks: Sequence[WatchedRank], shown: Sequence[str]) -> Figure:
    """Draw a stacked bar for each rank."""
    names = {part: {"waits": WAITING}.get(part, part) for part in shown}
    steps = {one.rank: {name: one.parts[part].estimate for part, name in names.items()} for one in ranks}
    bars = [(f"rank {rank}", quantity(sum(parts.values()), "ms"), parts) for rank, parts in steps.items()]
    rank, parts = next(iter(steps.items()))
    largest = max(parts, key=lambda name: parts[name])
    return Figure(
        key="w1-ranks",
        title="Where a step goes, by rank",
        caption=f"The largest part of rank {rank}'s step is {largest}: {quantity(parts[largest], 'ms')}.",
        note=f"“{WAITING}”: {_WAITS}.",
        height_pt=height_of_bars(len(bars), len(names)),
        draw=lambda canvas: draw_bars(canvas, bars, [*names.values()]),
    )
