"""The page of a comparison, of the parts that the page of a run is made of."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from ...report.build import render
from ...report.conditions import Fact, Group
from ...report.drawing import Figure
from ...report.forest import Ratio, forest
from ...report.page import Card, Files, Page, data_link
from ...report.table import Heading, Table
from ..findings.next_step import again
from ..text import csv_cell
from .compare import Gate
from .judge import VERDICTS, Change, Verdict
from .output import amounts, change, conditions, decides, named, notes, said, verdict, word
from .runs import GateRun

_STATES: dict[Verdict, str] = {"regressed": "found", "improved": "found", "unchanged": "equal"}
_HEADINGS = ("Case", "Metric", "Baseline", "Candidate", "Change", "Verdict", "Why")
_NUMBERS = ("Baseline", "Candidate", "Change")


def html(gate: Gate, baseline: GateRun, candidate: GateRun) -> str:
    """The whole page: what was decided, changes drawn, a table of all, how both ran."""
    return render(page(gate, baseline, candidate))


def page(gate: Gate, baseline: GateRun, candidate: GateRun) -> Page:
    """What the page shows, as records."""
    sides = {"Baseline": baseline, "Candidate": candidate}
    found, heading = word(gate), f"{_name(candidate)} against {_name(baseline)}"
    return Page(
        title=heading,
        heading=heading,
        status=f"{found[:1].upper()}{found[1:]} · {verdict(gate).removeprefix(f'{found}: ')}",
        warnings=[line for line in conditions(gate) if line.startswith("Not interleaved")],
        cards=cards(gate),
        following=decides(gate),
        notes=notes(gate),
        figures=[one for name in ("images_per_s", "speedup") if (one := _figure(gate, name)) is not None],
        tables=[_table(gate), *_differences(gate)],
        files=Files(data=data_link("comparison.csv", _csv(gate))),
        conditions=[Group(name, tuple(_facts(side))) for name, side in sides.items()],
    )


def _name(side: GateRun) -> str:
    return side.manifest.name or side.path.name.removesuffix(".zip")


def cards(gate: Gate) -> list[Card]:
    """A card for each metric, of its worst verdict."""
    by_metric: dict[str, list[Change]] = {"throughput": []}  # comes first
    for one in gate.comparisons:
        by_metric.setdefault(one.column.label if one.column else "cases", []).append(one)
    made = []
    for label, found in by_metric.items():
        if not found:
            continue
        worst = min((one.verdict for one in found), key=VERDICTS.index)
        those = [one for one in found if one.verdict == worst]
        if worst == "unchanged":
            sentence = f"No case changed by more than {100 * (those[0].threshold or 0):g}%."
        elif worst == "not comparable":
            sentence = f"{those[0].reason[:1].upper()}{those[0].reason[1:]}."
        else:
            sentence = f"{named(those)[:1].upper()}{named(those)[1:]}."
        title, state = f"{label[:1].upper()}{label[1:]}", _STATES.get(worst, "open")
        made.append(Card(title, state, f"{worst[:1].upper()}{worst[1:]}", sentence))
    return made


def _figure(gate: Gate, metric: str) -> Figure | None:
    """Draw how one metric of every case changed; None where it was not compared."""
    found = [c for c in gate.comparisons if c.metric == metric and c.ratio is not None]
    if not found or found[0].column is None:
        return None
    label, threshold, sentence = found[0].column.label, found[0].threshold or 0.0, said(found[0])
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
        how_to_read="Each mark is the candidate against the baseline; right of the line it is higher. Bars "
        f"are {100 * gate.confidence:.4g}% intervals. What regressed has its bar left of the line and its "
        "mark left of the shaded band. The axis is logarithmic.",
        x_label=f"change of {label} (%); shaded: within {100 * threshold:g}%",
        ticks=lambda ratio: f"{100 * (ratio - 1):.3g}",
    )


def _look(c: Change) -> str:
    mode = c.label.partition(",")[0]
    return "ddp" if mode.startswith("DDP") else "dp" if mode.startswith("DP") else "single"


def _table(gate: Gate) -> Table:
    """Every case and metric, worst first."""
    rows = [(c.label, *amounts(c), change(c), c.verdict, c.reason) for c in gate.comparisons]
    kept = [i for i in range(len(_HEADINGS)) if any(row[i] for row in rows)]
    columns = tuple(Heading(_HEADINGS[i], "number" if _HEADINGS[i] in _NUMBERS else "") for i in kept)
    cells = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table("Every comparison", "The worst first.", columns, cells)


def _differences(gate: Gate) -> Sequence[Table]:
    if not gate.differences:
        return ()
    columns = tuple(map(Heading, ("Condition", "Baseline", "Candidate", "Blocks a comparison")))
    rows = tuple((d.name, d.then, d.now, "yes" if d.blocking else "no") for d in gate.differences)
    return (Table("What differs between the runs", "As the two manifests tell it.", columns, rows),)


def _facts(side: GateRun) -> list[Fact]:
    """How a side ran, as far as its manifest tells."""
    manifest = side.manifest
    told = {
        "run": str(side.path),
        "started (UTC)": manifest.created_utc,
        "CPU": manifest.environment.cpu_model,
        "torch": manifest.versions.get("torch"),
        "commit": (manifest.workload or manifest.git).commit,
    }
    facts = [Fact(name, value) for name, value in told.items() if value]
    command = again(manifest)
    return [*facts, Fact("command", command, code=True)] if command else facts


def _csv(gate: Gate) -> bytes:
    """Every comparison in full digits; without a value a cell is empty."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = (
        "case",
        "metric",
        "verdict",
        "baseline",
        "candidate",
        "ratio",
        "ratio_low",
        "ratio_high",
        "threshold",
    )
    writer.writerow([*names, "reason"])
    for c in gate.comparisons:
        ratio = (c.ratio.estimate, c.ratio.low, c.ratio.high) if c.ratio else (None, None, None)
        numbers = (
            None if x is None or math.isnan(x) else x for x in (c.baseline, c.candidate, *ratio, c.threshold)
        )
        writer.writerow([csv_cell(c.label), c.metric, c.verdict, *numbers, csv_cell(c.reason)])
    return out.getvalue().encode(errors="backslashreplace")
