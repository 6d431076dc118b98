"""The page of a user's own training that was watched: answers as of a run, and a step by part and rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..bench.common.cli import NextStep
from ..bench.common.numbers import format_count, format_interval, format_quantity, format_rough_duration
from ..bench.common.text import begin_sentence
from ..bench.findings.watched import WAITING, conclude_watch, list_parts, name_rank
from ..bench.findings.watched_settings import write_estimate
from ..bench.machine.manifest import Manifest, Timing
from ..bench.machine.watched import Watched, WatchedRank
from ..bench.page.page import Card, Figure, Heading, Page, Section, Table
from ..bench.results.case_result import CaseResult
from ..bench.results.commands import write_watch_comparison
from ..bench.results.store import RunData
from . import conditions, tables
from .cases import group_workloads
from .charts import draw_drift
from .columns import TERMS
from .page import Files, make_cards
from .step import Bar, draw_bars

_WAITS = "what a backward takes after its last bucket is ready"
_HIDDEN_CONDITIONS = ("Settings", "Environment variables")
"""Conditions that a run chooses, and those that may name a person."""

_TERMS = {
    "Overlap": "the estimated share of communication that costs no time, 1 - exposed / communication alone; "
    "0 where communication adds more than it takes alone (the card has the upper limit), empty where the "
    "interval is wider than 100 percentage points",
    "Exposed": "time that communication adds to a step: the steps beside a probe minus the step without "
    "synchronising",
    "Step without synchronising": "a probe without what its held buckets took, and without the broadcast of "
    "buffers",
}


def make_watched_page(run: RunData, files: Files) -> Page:
    """Make the page of a watched training; nothing on it is of the user's command or environment."""
    watched, manifest = run.manifest.watched or Watched(), run.manifest
    cases = [replace(one, arch=watched.script or one.arch) for one in run.results]
    found, measured, shown = conclude_watch(run), group_workloads(cases), list_parts(watched.ranks)
    own = [replace(one, cases=one.cases[:1]) for one in measured[:1]]
    over_time = [draw_drift(one, run.times, key="w1", unit="step") for one in own]
    ddp = [case for case in cases if case.mode == "ddp"]
    sent = (tables.tabulate(name, ddp) for name in ("Communication", "Bucket layouts"))
    more = (tabulate_times(cases[0]), *sent, conditions.tabulate_ranks(manifest))
    costs = [
        Card(
            one.title,
            "found" if one.ms else "open",
            one.describe_size(found.step),
            f"{one.fact} {one.remedy}",
        )
        for one in found.costs
    ]
    folds = (
        Section("more", "Steps over time", figures=[*filter(None, over_time)]),
        Section("all-tables", "More tables", tables=[one for one in more if one is not None]),
    )
    told = conditions.group_conditions(manifest, cases)
    again = write_watch_comparison("after", baseline=str(run.path))
    subtitle, setup = conditions.write_subtitle(run, measured, "run")
    slowest = write_estimate(found.step) if found.step else ""
    each = f"{format_interval(found.step, 'ms')} per step" if found.step else ""
    return Page(
        title=f"{watched.script or 'training'}, watched",
        headline=found.headline,
        heading=": ".join(filter(None, (conditions.write_heading(cases), each))),
        status=_describe_steps(watched, manifest.timing),
        subtitle=[part for part in subtitle if part != watched.script],
        setup=setup,
        cards=[*costs, *make_cards(found.others)],
        trust=found.trust,
        following=NextStep(found.advice, again if found.changes else "") if found.advice else None,
        notes=found.notes,
        intervals="95% intervals",
        figures=[draw_ranks(manifest, watched.ranks, shown)] if shown else [],
        tables_heading="Numbers",
        tables=[tabulate_ranks(manifest, watched.ranks, shown, slowest)] if shown else [],
        folds=[fold for fold in folds if fold.figures or fold.tables],
        files=files.tables,
        data=files.data,
        terms=TERMS | _TERMS,
        conditions={name: facts for name, facts in told.items() if name not in _HIDDEN_CONDITIONS},
    )


def _describe_steps(watched: Watched, timing: Timing) -> str:
    """Say in one line how many steps the answers are of, and how the training ended."""
    parts = (
        f"{watched.num_compared:,d} of {format_count(watched.num_steps, 'optimizer step')} compared",
        f"{watched.num_probes:,d} of them held gradients back (probes)" if watched.num_probes else "",
        f"{format_rough_duration(timing.measuring_s)} of training" if timing.measuring_s else "",
        f"ended with {timing.stopped_because}" if timing.stopped_because else "",
    )
    return " · ".join(filter(None, parts))


def tabulate_times(case: CaseResult) -> Table:
    """Tabulate the step times by what each is of."""
    times = {
        "Step of the slowest rank, typical": case.step_ms,
        "Step of any rank, median": case.get_interval("step_ms_p50"),
        "Step of any rank, 95th percentile": case.get_interval("step_ms_p95"),
        "Step of the slowest rank without communication, from probes": case.get_interval("no_sync_step_ms"),
    }
    rows = tuple((name, format_interval(ms)) for name, ms in times.items() if ms)
    note = "Of compared steps that hold nothing back; where there are probes, of those beside them."
    return Table("Step times", note, (Heading("Time"), Heading("ms", "number")), rows)


def tabulate_ranks(
    manifest: Manifest, ranks: Sequence[WatchedRank], shown: Mapping[str, str], slowest: str
) -> Table:
    """Tabulate parts of a step by rank, by their headings; `slowest` is the step of the slowest rank."""
    has_steps = all(one.step_ms for one in ranks)
    return Table(
        "Where a step goes, in ms",
        f"{begin_sentence(WAITING)}: {_WAITS}.",
        (
            Heading("Rank", "short"),
            *([Heading("step", "number")] if has_steps else []),
            # A terminal has a line of its own for what stands in parentheses.
            *(Heading(re.sub(r" (and .*|of .*)", r" (\1)", name), "number") for name in shown.values()),
        ),
        tuple(
            (
                name_rank(manifest, one.rank),
                *([format_quantity(one.step_ms.estimate, "")] if has_steps and one.step_ms else []),
                *(format_quantity(one.parts[part].estimate, "") for part in shown),
            )
            for one in ranks
        ),
        below=(_explain_sum(name_rank(manifest, ranks[0].rank), ranks[0], slowest),),
    )


def _explain_sum(name: str, rank: WatchedRank, slowest: str) -> str:
    """Explain why the parts of a rank, its step and the step of the slowest rank differ."""
    parts_ms = format_quantity(sum(part.estimate for part in rank.parts.values()), "ms")
    step = (
        f" and its median step takes {format_quantity(rank.step_ms.estimate, 'ms')}" if rank.step_ms else ""
    )
    last = f" The slowest rank of a step typically takes {slowest}." if slowest else ""
    return f"Each number is a median over steps: the parts of rank {name} add up to {parts_ms}{step}.{last}"


def draw_ranks(manifest: Manifest, ranks: Sequence[WatchedRank], shown: Mapping[str, str]) -> Figure:
    """Draw a stacked bar for each rank, of parts by their headings."""
    bars = []
    for one in ranks:
        parts = {name: one.parts[part].estimate for part, name in shown.items()}
        whole = f"{format_quantity(sum(parts.values()), 'ms')} in parts"
        bars.append(Bar(f"rank {name_rank(manifest, one.rank)}", whole, parts))
    rank, _, parts = bars[0]
    largest = max(parts, key=lambda name: parts[name])
    return draw_bars(
        bars,
        [*shown.values()],
        key="w1-ranks",
        title="Where a step goes, by rank",
        caption=f"The largest part of {rank}'s step is {largest}: {format_quantity(parts[largest], 'ms')}.",
        note=f"A bar's length is the sum of its parts' medians. “{WAITING}”: {_WAITS}.",
    )
