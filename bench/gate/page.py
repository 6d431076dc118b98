"""The page of a comparison, of the parts that the page of a run is made of."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, replace

from ..common.cli import get_message_prefix
from ..common.text import escape_csv_cell
from ..page import render
from ..page.charts import Ratio, draw_forest
from ..page.page import BAD, Figure, Page, make_data_link
from ..results.commands import write_repeat_command
from ..results.tables import encode_csv
from .compare import Gate
from .decide import INFORMATIVE_ERRORS
from .headline import describe_verdict
from .judge import Change
from .output import make_outline
from .runs import GateRun
from .wording import format_change, name_unit


def render_markdown(gate: Gate, baseline: GateRun, candidate: GateRun) -> str:
    """Render the same for a job summary or a pull-request comment, what was decided first."""
    made = make_page(gate, baseline, candidate)
    heading = f"{get_message_prefix('gate')}: {describe_verdict(gate)}"
    return render.render_markdown(replace(made, heading=heading))


def make_page(gate: Gate, baseline: GateRun, candidate: GateRun) -> Page:
    """Make the page of a gate: its outline, changes drawn, all numbers, how both sides ran."""
    sides = {"Baseline": baseline, "Candidate": candidate}
    outline = make_outline(gate)
    compared, *facts = outline.facts
    return replace(
        outline,
        title=describe_verdict(gate),
        heading=get_message_prefix("gate"),
        tables_heading="Details",
        headline=describe_verdict(gate),
        status=compared,
        facts=facts,
        figures=[
            one for name in ("images_per_s", "speedup") if (one := _draw_figure(gate, name)) is not None
        ],
        data=make_data_link("comparison.csv", _write_csv(gate)),
        conditions={name: _describe_side(side) for name, side in sides.items()},
    )


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
