"""The page of a user's own training that was watched: answers as of a run, and a step by part and rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from ..bench.common.numbers import quantity
from ..bench.findings.watched import conclude_watch, write_ms
from ..bench.machine.manifest import Watched, WatchedRank
from ..bench.page.drawing import WIDTH_PT, legend, printable, read_across
from ..bench.page.page import Card, Figure, Heading, Page, Section, Step, Table
from ..bench.results.store import RunData
from . import conditions, tables
from .cases import workloads
from .charts import drift
from .page import Files, cards
from .step import WAITING, draw_bar, fill
from .table import TERMS

_WAITS = "what a backward takes after its last bucket is ready"
_HIDDEN_CONDITIONS = ("Settings", "Environment variables")
"""Of a run's choice, and of what may name a person."""

_PARTS = ("data", "forward", "backward", "waits", "buffers", "optimizer", "evaluation", "other")
_HEADINGS = {"waits": WAITING, "buffers": "broadcast of buffers"}

_ROW_PT = 42


def watched_page(run: RunData, files: Files) -> Page:
    """Make the page of a watched training; nothing on it is of the user's command or environment."""
    watched, manifest, cases = run.manifest.watched or Watched(), run.manifest, run.results
    found, measured = conclude_watch(run), workloads(cases)
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
        figures=[draw_ranks(watched.ranks)] if _shown(watched.ranks) else [],
        tables=[tabulate_ranks(watched.ranks)] if _shown(watched.ranks) else [],
        folds=[fold for fold in folds if fold.figures or fold.tables],
        files=files.tables,
        data=files.data,
        terms=TERMS,
        conditions={name: facts for name, facts in told.items() if name not in _HIDDEN_CONDITIONS},
    )


def _shown(ranks: Sequence[WatchedRank]) -> list[str]:
    """Return the parts that take time on any rank, in the order of the step."""
    known = [part for part in _PARTS if all(part in one.parts for one in ranks)]
    return [part for part in known if any(one.parts[part].estimate > 0 for one in ranks)]


def tabulate_ranks(ranks: Sequence[WatchedRank]) -> Table:
    """Tabulate the parts of a step by rank."""
    shown = _shown(ranks)
    return Table(
        "A step by part and rank",
        f"Medians of steps that hold nothing back. {WAITING[:1].upper()}{WAITING[1:]}: {_WAITS}.",
        (
            Heading("Rank", "number"),
            *(Heading(f"{_HEADINGS.get(part, part)} (ms)", "number") for part in shown),
        ),
        tuple((f"{one.rank}", *(write_ms(one.parts[part], "") for part in shown)) for one in ranks),
    )


def draw_ranks(ranks: Sequence[WatchedRank]) -> Figure:
    """Draw a stacked bar for each rank."""
    names = {part: {"waits": WAITING}.get(part, part) for part in _shown(ranks)}
    bars = {one.rank: {name: one.parts[part].estimate for part, name in names.items()} for one in ranks}
    longest = max(sum(parts.values()) for parts in bars.values())

    def draw(canvas: Canvas) -> None:
        axes: Any = canvas.subplots()
        for place, (rank, parts) in enumerate(bars.items()):
            above: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom"}
            words = printable(f"rank {rank}: {quantity(sum(parts.values()), 'ms')}")
            axes.annotate(words, (0, place - 0.2), annotation_clip=False, **above)
            draw_bar(axes, f"rank {rank}", parts, place, [*names.values()], per_pt=longest / (0.9 * WIDTH_PT))
        axes.set_xlim(0, longest)
        axes.set_ylim(len(bars) - 0.3, -0.65)
        axes.set_yticks([])
        read_across(axes, "time per step (ms)")
        legend(canvas, [Patch(label=name, **fill(name)) for name in names.values()], handlelength=1.6)

    rank, parts = next(iter(bars.items()))
    largest = max(parts, key=lambda name: parts[name])
    return Figure(
        key="w1-ranks",
        title="Where a step goes, by rank",
        caption=f"The largest part of rank {rank}'s step is {largest}: {quantity(parts[largest], 'ms')}.",
        note=f"“{WAITING}”: {_WAITS}.",
        height_pt=60 + 15 * -(-len(names) // 2) + _ROW_PT * len(bars),
        draw=draw,
    )
