"""The page of a comparison, of the parts that the page of a run is made of."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, replace

from ..common.cli import get_message_prefix
from ..common.text import escape_csv_cell
from ..page import render
from ..page.charts import Ratio, draw_forest
from ..page.page import BAD, Figure, Heading, Page, Table, make_data_link
from ..results.commands import write_repeat_command
from ..results.tables import encode_csv
from .decide import INFORMATIVE_ERRORS
from .headline import TONES, describe_verdict, get_next_step
from .judge import Change
from .output import format_lines, list_facts, list_notes, list_reasons, list_warnings
from .result import Gate
from .runs import GateRun
from .watched import make_cards, tabulate_parts
from .wording import format_change, format_row, name_unit

_COLUMNS = (
    *(Heading("Case"), Heading("Metric")),
    *(Heading("Baseline", "number", drop=1), Heading("Candidate", "number", drop=1)),
    *(Heading("Change", "number"), Heading("Verdict")),
)

_DIFFERENCES = (Heading("Condition"), Heading("Baseline"), Heading("Candidate"), Heading("Effect"))


def make_page(gate: Gate) -> Page:
    """Make the page of a gate: what was decided, changes drawn, all numbers, how both sides ran."""
    sides = {"Baseline": gate.baseline, "Candidate": gate.candidate}
    parts = [tabulate_parts(gate.baseline.manifest, gate.candidate.manifest)] if gate.steps else []
    figures = (_draw_figure(gate, name) for name in ("images_per_s", "speedup"))
    compared, *facts = list_facts(gate)
    return Page(
        title=describe_verdict(gate),
        heading=get_message_prefix("gate"),
        headline=describe_verdict(gate),
        status=compared,
        tone=TONES[gate.exit_code],
        facts=facts,
        cards=make_cards(gate.steps) if gate.steps else [],
        warnings=list_warnings(gate),
        following=get_next_step(gate),
        differences=_tabulate_differences(gate),
        notes=list_notes(gate),
        figures=[one for one in figures if one is not None],
        tables=[table for table in (_tabulate_changes(gate), *parts) if table.rows],
        tables_heading="Details",
        data=make_data_link("comparison.csv", _write_csv(gate)),
        conditions={name: _describe_side(side) for name, side in sides.items()},
    )


def make_outline(gate: Gate) -> Page:
    """Make the page for a terminal, whose first line is what was decided."""
    made = make_page(gate)
    return replace(made, heading="", status=made.headline, facts=[made.status, *made.facts])


def render_markdown(gate: Gate) -> str:
    """Render the page for a job summary or a pull-request comment, what was decided first."""
    made = make_page(gate)
    return render.render_markdown(replace(made, heading=f"{made.heading}: {made.headline}"))


def _tabulate_changes(gate: Gate) -> Table:
    rows = tuple(map(format_row, gate.shown))
    below = list_reasons(gate)
    if gate.interleaved and any(c.metric == "speedup" for c in gate.shown):
        below.append("Speed-ups are taken within rounds: they can differ from the ratio of the rates shown.")
    return Table("Every comparison", "The worst first.", _COLUMNS, rows, below=tuple(below))


def _tabulate_differences(gate: Gate) -> Table | None:
    """List the conditions that differ, those that block the comparison first; None where none does."""
    effects = ("does not block", "blocks the comparison")
    rows = [format_lines((d.name, d.then, d.now, effects[d.blocking])) for d in gate.differences]
    width = len(_DIFFERENCES) - (not gate.conditions_block)
    shown = tuple(tuple(row[:width]) for row in rows)
    return Table("What differs between the sides", "", _DIFFERENCES[:width], shown) if shown else None


def _draw_figure(gate: Gate, metric: str) -> Figure | None:
    """Draw how one metric of every case changed, and where it decides, what a side lacks; None if nothing."""
    found = [c for c in gate.shown if c.metric == metric and c.ratio is not None]
    if not found or found[0].column is None:
        return None
    label, threshold = found[0].column.label, found[0].threshold or 0.0
    decides = any(c.decides for c in found)
    errors = gate.errors if decides else INFORMATIVE_ERRORS
    lacking = {c.label: "missing" for c in gate.select_verdict("missing")}
    lacking |= dict.fromkeys(gate.only_in_candidate, "not in the baseline")
    rows = [
        Ratio(name, name, math.nan, math.nan, math.nan, f"{BAD.sign} {said}", "other")
        for name, said in lacking.items()
        if decides
    ]
    rows += [
        Ratio(
            name=c.label,
            case=c.label,
            **asdict(c.ratio),
            written=format_change(c),
            look=_choose_look(c),
            hollow=c.verdict == "not gated",
        )
        for c in found
        if c.ratio is not None
    ]
    return draw_forest(
        rows,
        (1 - threshold, 1 + threshold),  # as `judge` has it
        key=metric.replace("_", "-"),
        title=f"Change of {label}",
        caption=f"Left of the line, the candidate's {label} is lower than the baseline's.",
        note=f"Bars are intervals: {errors}. What regressed has its bar left of the line and its mark left "
        "of the shaded band.",
        x_label=f"change of {label} (%); shaded: within {100 * threshold:g}%",
        ticks=lambda ratio: f"{100 * (ratio - 1):.3g}",
    )


def _choose_look(c: Change) -> str:
    mode = c.label.partition(",")[0]
    return "ddp" if mode.startswith("DDP") else "dp" if mode.startswith("DP") else "single"


def _describe_side(side: GateRun) -> dict[str, str]:
    """Describe how a side ran, as far as its manifest tells."""
    manifest = side.manifest
    told = {
        "run": str(side.path),
        "started": manifest.created_utc,
        "CPU": manifest.environment.cpu_model,
        "torch": manifest.versions.get("torch"),
        "commit": (manifest.workload or manifest.git).commit,
        "command": write_repeat_command(manifest),
    }
    return {name: value for name, value in told.items() if value}


def _write_csv(gate: Gate) -> bytes:
    """Every comparison in full digits; without a value a cell is empty."""
    names = "case metric unit verdict baseline candidate ratio ratio_low ratio_high threshold reason"
    lines = [names.split()]
    for c in gate.comparisons:
        ratio = astuple(c.ratio) if c.ratio else (None,) * 3
        numbers = (c.baseline, c.candidate, *ratio, c.threshold)
        known = ("" if x is None or math.isnan(x) else f"{x}" for x in numbers)
        first = (escape_csv_cell(c.label), c.metric or "", name_unit(c), c.verdict)
        lines.append([*first, *known, escape_csv_cell(c.reason)])
    return encode_csv(lines)
