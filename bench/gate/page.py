"""The page of a comparison, of the parts that the page of a run is made of."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

from ...report import build
from ...report.drawing import Figure
from ...report.forest import Ratio, forest
from ...report.page import Card, Files, Page, data_link
from ...report.table import Heading, Table
from ..common.cli import speaker
from ..common.text import csv_cell
from ..findings.next_step import again
from ..results.tables import csv_bytes
from .compare import Gate
from .decide import INFORMING_CONFIDENCE
from .judge import VERDICTS, Change, Verdict, cells, change, said
from .output import HEADINGS, NUMBERS, conditions, decides, named, notes, verdict, word
from .runs import GateRun

_STATES: dict[Verdict, str] = {
    "regressed": "found",
    "improved": "found",
    "noted": "equal",
    "allowed": "equal",
}


def html(gate: Gate, baseline: GateRun, candidate: GateRun) -> str:
    """The whole page."""
    return build.render(page(gate, baseline, candidate))


def markdown(gate: Gate, baseline: GateRun, candidate: GateRun) -> str:
    """The same for a job summary or a pull-request comment, what was decided first."""
    made = page(gate, baseline, candidate)
    return build.markdown(replace(made, heading=f"{speaker('gate')}: {verdict(gate)}", status=made.title))


def page(gate: Gate, baseline: GateRun, candidate: GateRun) -> Page:
    """What both show: what was decided, changes drawn, a table of all, how both ran."""
    sides = {"Baseline": baseline, "Candidate": candidate}
    found, heading = word(gate), f"{_name(candidate)} against {_name(baseline)}"
    return Page(
        title=heading,
        heading=heading,
        status=f"{found[:1].upper()}{found[1:]} · {verdict(gate).removeprefix(f'{found}: ')}",
        warnings=conditions(gate),
        cards=cards(gate),
        following=decides(gate),
        notes=notes(gate),
        figures=[one for name in ("images_per_s", "speedup") if (one := _figure(gate, name)) is not None],
        tables=[_table(gate)],
        files=Files(data=data_link("comparison.csv", _csv(gate))),
        conditions={name: _facts(side) for name, side in sides.items()},
    )


def _name(side: GateRun) -> str:
    return side.manifest.name or side.path.name.removesuffix(".zip")


def cards(gate: Gate) -> list[Card]:
    """A card for each metric, of its worst verdict."""
    by_metric: dict[str, list[Change]] = {"throughput": []}  # comes first
    for one in gate.shown:
        by_metric.setdefault(one.column.label if one.column else "cases", []).append(one)
    made = []
    for label, found in by_metric.items():
        if not found:
            continue
        worst = min((one.verdict for one in found), key=VERDICTS.index)
        those = [one for one in found if one.verdict == worst]
        if worst == "allowed":
            sentence = f"No case is worse by more than {100 * (those[0].threshold or 0):g}%."
        elif worst == "not comparable":
            differing = ", ".join(d.name for d in gate.differences if d.blocking)
            why = f"the runs differ in {differing}" if differing else those[0].reason
            sentence = f"{why[:1].upper()}{why[1:]}."
        else:
            sentence = f"{named(those)[:1].upper()}{named(those)[1:]}."
        title, state = f"{label[:1].upper()}{label[1:]}", _STATES.get(worst, "open")
        made.append(Card(title, state, f"{worst[:1].upper()}{worst[1:]}", sentence))
    return made


def _figure(gate: Gate, metric: str) -> Figure | None:
    """Draw how one metric of every case changed; None where it was not compared."""
    found = [c for c in gate.shown if c.metric == metric and c.ratio is not None]
    if not found or found[0].column is None:
        return None
    label, threshold, sentence = found[0].column.label, found[0].threshold or 0.0, said(found[0])
    confidence = gate.confidence if any(c.decides for c in found) else INFORMING_CONFIDENCE
    rows = [
        Ratio(c.label, c.label, c.ratio, change(c), _look(c), hollow=c.verdict == "not judged")
        for c in found
        if c.ratio is not None
    ]
    return forest(
        rows,
        threshold,
        key=metric.replace("_", "-"),
        title=f"Change of {label}",
        caption=f"{sentence[:1].upper()}{sentence[1:]}.",
        note="Each mark is the candidate against the baseline; right of the line it is higher. Bars "
        f"are {100 * confidence:.4g}% intervals. What regressed has its bar left of the line and its "
        "mark left of the shaded band.",
        x_label=f"change of {label} (%); shaded: within {100 * threshold:g}%",
        ticks=lambda ratio: f"{100 * (ratio - 1):.3g}",
    )


def _look(c: Change) -> str:
    mode = c.label.partition(",")[0]
    return "ddp" if mode.startswith("DDP") else "dp" if mode.startswith("DP") else "single"


def _table(gate: Gate) -> Table:
    """Every case and metric, worst first, as on the terminal."""
    columns = tuple(Heading(name.capitalize(), "number" if name in NUMBERS else "") for name in HEADINGS)
    return Table("Every comparison", "The worst first.", columns, tuple(map(cells, gate.shown)))


def _facts(side: GateRun) -> dict[str, str]:
    """How a side ran, as far as its manifest tells."""
    manifest = side.manifest
    told = {
        "run": str(side.path),
        "started": manifest.created_utc,
        "CPU": manifest.environment.cpu_model,
        "torch": manifest.versions.get("torch"),
        "commit": (manifest.workload or manifest.git).commit,
        "command": again(manifest),
    }
    return {name: value for name, value in told.items() if value}


def _csv(gate: Gate) -> bytes:
    """Every comparison in full digits; without a value a cell is empty."""
    names = "case metric verdict baseline candidate ratio ratio_low ratio_high threshold reason"
    lines = [names.split()]
    for c in gate.comparisons:
        ratio = astuple(c.ratio) if c.ratio else (None,) * 3
        numbers = (c.baseline, c.candidate, *ratio, c.threshold)
        known = ("" if x is None or math.isnan(x) else f"{x}" for x in numbers)
        lines.append([csv_cell(c.label), c.metric or "", c.verdict, *known, csv_cell(c.reason)])
    return csv_bytes(lines)
