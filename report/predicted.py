"""Shows predictions beside what was measured: scaling on hardware that was not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..bench.axes import DDP_DEFAULTS
from ..bench.cli import command
from ..bench.findings.numbers import plural, with_interval
from ..bench.findings.wording import cap_label, device_noun, link_name
from ..bench.predict.calibration import differences
from ..bench.predict.output import WORDS, Predictions, Rows, table
from ..bench.predict.prediction import Prediction
from ..bench.predict.runs import ddp_cases, identity
from ..bench.results.case_result import CaseResult
from ..bench.results.store import RunData
from .cases import mark
from .chart import MOST_RUNS, Line, Mark, ideal
from .drawing import Figure
from .figures import counts_of, over_devices
from .table import Heading, Section, Table

PREDICTION = (
    "Prediction (95% interval). Exposed communication is the step less the same step without communication; "
    "efficiency is throughput over devices times that of one."
)
ERROR = (
    "Measured cases that nothing was fitted to, and what the same model predicts for them. Error is "
    "predicted over measured, less one."
)


def predicted(run: RunData, predictions: Predictions, *, key: str) -> Section:
    """Show `predictions` beside the cases of `run`."""
    lines = predictions.lines()
    notes = [
        f"Predicted by {command('predict')}, not measured: a simulation of one step, fed by a calibration.",
        *predictions.answers(),
    ]
    if len(lines) > MOST_RUNS:
        notes.append(f"Of {len(lines)} lines the first {MOST_RUNS} are drawn.")
    unlike = [differences(predictions.identity, identity(run, case)) for case in ddp_cases(run)]
    if unlike and all(unlike):
        notes.append(f"The calibration is not of this run: {min(map('; '.join, unlike), key=len)}.")
    figures, tables = [], []
    if lines:
        drawn = lines[:MOST_RUNS]
        figures = [_figure(run, predictions, drawn, key)]
        rows = table([p for line in lines for p in line])
        tables.append(_table("Predictions", PREDICTION, rows, below=predictions.notes))
    else:
        notes += predictions.notes
    if predictions.validation:
        rows, said = predictions.errors()
        tables.append(_table("Error of the predictions", ERROR, rows, below=(said,)))
    return Section("On hardware you do not have", notes, figures, tables)


def _table(title: str, note: str, rows: Rows, *, below: Sequence[str]) -> Table:
    columns = tuple(Heading(name.capitalize(), "" if name in WORDS else "number") for name in rows[0])
    return Table(title, note, columns, tuple(tuple(row.values()) for row in rows), tuple(below))


def _figure(
    run: RunData, predictions: Predictions, lines: Sequence[Sequence[Prediction]], key: str
) -> Figure:
    """Draw efficiency against devices, a line for each network and bucket cap."""
    device, link = device_noun(predictions.identity.device_type), predictions.identity.link
    first = lines[0][0]
    several_caps = len({line[0].bucket_cap_mb for line in lines}) > 1
    drawn = [
        Line(
            line[0].network + (f", bucket cap {cap_label(line[0].bucket_cap_mb)}" if several_caps else ""),
            f"run{i}",
            tuple(Mark(p.num_devices, p.efficiency.scaled(100)) for p in line),
            band=True,
        )
        for i, line in enumerate(lines, start=1)
    ]
    measured = Line(
        f"measured, {link_name(link)}" if link else "measured",
        "single",
        tuple(
            mark(float(case.num_devices), case.efficiency.scaled(100), case, "")
            for case in _measured(run, predictions, first)
            if case.efficiency is not None
        ),
        joined=False,
    )
    dotted = ideal("ideal", dict.fromkeys({1.0, *counts_of((*drawn, measured))}, 100.0))
    said = "; ".join(f"{line.label} {with_interval(line.marks[-1].value, '%')}" for line in drawn)
    return over_devices(
        key=f"{key}-efficiency",
        title="Predicted efficiency",
        panels={"efficiency (%)": [line for line in (*drawn, measured) if line.marks] + [dotted]},
        x_label=f"devices ({device}s), {first.scaling} scaling",
        caption=f"Predicted on {plural(drawn[0].marks[-1].x, device)}: {said}.",
        how_to_read="Higher is better; the dotted line is ideal. Lines are predictions, their areas 95% "
        "intervals: where an area is wide, little is known. Diamonds with bars were measured in this run, "
        "over its own network.",
    )


def _measured(run: RunData, predictions: Predictions, p: Prediction) -> list[CaseResult]:
    """Return the run's own cases of what `p` predicts, possibly on another network."""
    asked = {name: getattr(p, name) for name in ("bucket_cap_mb", "comm_hook", "accumulate")}
    usual = CaseResult.of({**DDP_DEFAULTS, **asked})

    def batch(case: CaseResult) -> float:
        return (case.batch_per_device or 0) * (case.num_devices if case.scaling == "strong" else 1)

    # Under strong scaling the batch is another at every count, and lines tell theirs.
    wanted = replace(predictions.identity, batch_per_device=1)
    found = [
        case
        for case in ddp_cases(run)
        if not differences(replace(identity(run, case), batch_per_device=1), wanted)
        and (case.scaling, batch(case)) == (p.scaling, p.batch_size)
        and not case.changed(usual)
    ]
    return sorted(found, key=lambda case: case.num_devices)
