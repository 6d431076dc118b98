"""Shows predictions beside what was measured: scaling on hardware that was not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ..bench.axes import DDP_DEFAULTS
from ..bench.cli import command
from ..bench.findings.numbers import count, number, per_second, plural, quantity, with_interval
from ..bench.findings.wording import cap_label, device_noun, link_name
from ..bench.predict import scaling_limit
from ..bench.predict.calibration import differences
from ..bench.predict.held_out import error_sizes
from ..bench.predict.output import Predictions
from ..bench.predict.prediction import Prediction
from ..bench.predict.tables import ddp_cases, identity
from ..bench.results.case_result import CaseResult, estimate, text
from ..bench.results.case_result import Cells as Row
from ..bench.results.store import RunData
from .cases import mark
from .drawing import MOST_RUNS, Figure, Line, Mark, bare, ideal
from .figures import counts_of, device_ticks, over_devices
from .table import Heading, Section, Table


def predicted(run: RunData, predictions: Predictions, *, key: str) -> Section:
    """Show `predictions` beside the cases of `run`."""
    caps = dict.fromkeys(line.first.bucket_cap_mb for line in predictions.lines)
    by_cap = [
        [line for line in predictions.lines if line.first.bucket_cap_mb == cap][:MOST_RUNS] for cap in caps
    ]
    by_cap = [drawn for lines in by_cap if (drawn := [line for line in lines if _shown(line)])]
    made = (_predictions(predictions), _validation(predictions))
    networks = len({line.first.network for line in predictions.lines})
    notes = [
        f"Predicted by {command('predict')}, not measured: a simulation of one step, fed by a calibration."
    ]
    if networks > MOST_RUNS:
        notes.append(f"Of {networks} networks the first {MOST_RUNS} are drawn.")
    notes += _unlike(run, predictions)
    notes += [] if made[0] else predictions.notes
    figures = [
        _figure(run, predictions, of_cap, name, f"{key}-{i}", several=len(caps) > 1)
        for i, of_cap in enumerate(by_cap, start=1)
        for name in ("images_per_s", "efficiency")
    ]
    return Section("On hardware you do not have", notes, figures, list(filter(None, made)))


def _shown(line: scaling_limit.Line) -> list[Prediction]:
    """Return the predictions of a line that are not refused."""
    return [found for found in line.predictions if not found.reason]


def _figure(
    run: RunData,
    predictions: Predictions,
    lines: Sequence[scaling_limit.Line],
    name: str,
    key: str,
    *,
    several: bool,
) -> Figure:
    """Draw throughput or efficiency against devices; `several` bucket caps are told apart by the title."""
    rate, device = name == "images_per_s", device_noun(predictions.identity.device_type)
    factor, unit = (1.0, per_second(predictions.identity.unit)) if rate else (100.0, "%")
    drawn = [
        Line(
            line.first.network,
            f"run{i}",
            tuple(Mark(found.num_devices, getattr(found, name).scaled(factor)) for found in _shown(line)),
            band=True,
        )
        for i, line in enumerate(lines, start=1)
    ]
    breaks = [m for line, own in zip(lines, drawn, strict=True) for m in own.marks if m.x == line.broken_at]
    link = predictions.identity.link
    measured = Line(
        f"measured, {link_name(link)}" if link else "measured",
        "single",
        tuple(
            mark(float(row["num_devices"]), found.scaled(factor), row, "")
            for row in _measured(run, predictions, lines[0])
            if (found := estimate(row, name)) is not None
        ),
        joined=False,
    )
    broken = Line(
        "breaks here", "break", tuple(Mark(m.x, bare(m.value.estimate)) for m in breaks), joined=False
    )
    counts = counts_of((*drawn, measured))
    first = _shown(lines[0])[0]
    one = 100.0
    if rate and first.images_per_s is not None and first.efficiency is not None:
        one = first.images_per_s.estimate / first.efficiency.estimate / first.num_devices
    dotted = ideal("ideal", {n: one * n if rate else one for n in {1.0, *counts}})
    labelled = [n for n in counts if n not in {m.x for m in breaks} or int(n).bit_count() == 1]
    what = "throughput" if rate else "efficiency"
    suffix = f", bucket cap {cap_label(lines[0].first.bucket_cap_mb)}" if several else ""
    said = "; ".join(f"{line.label} {with_interval(line.marks[-1].value, unit)}" for line in drawn)
    verdict = _breaks(lines, device) if rate else " ".join(line.verdict for line in lines)
    return over_devices(
        key=f"{key}-{what}",
        title=f"Predicted {what}{suffix}",
        panels={f"{what} ({unit})": [line for line in (*drawn, measured, broken) if line.marks] + [dotted]},
        x_label=f"devices ({device}s), {lines[0].first.scaling} scaling",
        ticks=device_ticks(labelled),
        caption=f"Predicted on {plural(drawn[0].marks[-1].x, device)}: {said}. {verdict}",
        how_to_read="Higher is better; the dotted line is ideal. Lines are predictions, their areas 95% "
        "intervals: where an area is wide, little is known. Diamonds with bars were measured in this run, "
        "over its own network. A cross marks where scaling breaks: the first number of devices with a "
        "predicted efficiency below 80%.",
        log_y=rate,
    )


def _breaks(lines: Sequence[scaling_limit.Line], device: str) -> str:
    where = []
    for line in lines:
        refused = len(_shown(line)) < len(line.predictions)
        at = "at a count that is not known" if refused else "nowhere"
        at = at if line.broken_at is None else f"at {plural(line.broken_at, device)}"
        where.append(f"on {line.first.network} {at}")
    return f"Scaling breaks {', '.join(where)}."


def _measured(run: RunData, predictions: Predictions, line: scaling_limit.Line) -> list[Row]:
    """Return the run's own cases of what the line predicts, possibly on another network."""
    usual = {
        **DDP_DEFAULTS,
        "bucket_cap_mb": line.first.bucket_cap_mb,
        "comm_hook": line.first.comm_hook,
        "accumulate": line.first.accumulate,
    }

    def batch(row: Row) -> int:
        return int(row["batch_per_device"]) * (int(row["num_devices"]) if row["scaling"] == "strong" else 1)

    # Under strong scaling the batch is another at every count, and lines tell theirs.
    wanted = replace(predictions.identity, batch_per_device=1)
    rows: list[Row] = [
        row
        for row in ddp_cases(run)
        if not differences(replace(identity(run, row), batch_per_device=1), wanted)
        and (text(row["scaling"]), batch(row)) == (line.first.scaling, line.first.batch_size)
        and not CaseResult.of(row).changed(CaseResult.of(usual))
    ]
    return sorted(rows, key=lambda row: int(row["num_devices"]))


def _unlike(run: RunData, predictions: Predictions) -> list[str]:
    unlike = [differences(predictions.identity, identity(run, case)) for case in ddp_cases(run)]
    if not unlike or not all(unlike):
        return []
    least = min(unlike, key=len)
    return [f"The calibration is not of this run: {'; '.join(least)}."]


def _predictions(predictions: Predictions) -> Table | None:
    asked = [(line, found) for line in predictions.lines for found in line.predictions if found.asked]
    rows = tuple(
        (
            line.first.network,
            cap_label(line.first.bucket_cap_mb),
            count(found.num_devices),
            with_interval(found.step_ms, "ms") or "not predicted",
            with_interval(found.images_per_s, per_second(predictions.identity.unit)),
            with_interval(found.efficiency, "%", 100.0),
            with_interval(found.exposed_comm_ms, "ms"),
            quantity(found.wait_ms, "ms"),
        )
        for line, found in asked
    )
    refused = [
        f"{line.first.network}, bucket cap {cap_label(line.first.bucket_cap_mb)}, "
        f"{count(found.num_devices)} devices: {found.reason}."
        for line, found in asked
        if found.reason
    ]
    note = (
        "Prediction (95% interval). Exposed communication is the step less the same step without "
        "communication; efficiency is throughput over devices times that of one."
    )
    named = "Devices", "Step", "Throughput", "Efficiency", "Exposed communication", "Waiting for the slowest"
    columns = (Heading("Network"), Heading("Bucket cap"), *(Heading(name, "number") for name in named))
    return Table("Predictions", note, columns, rows, (*refused, *predictions.notes)) if rows else None


def _validation(predictions: Predictions) -> Table | None:
    if not predictions.validation:
        return None
    several = len({case.network for case in predictions.validation}) > 1
    columns = (
        *([Heading("Link")] if several else []),
        Heading("Case"),
        Heading("Devices", "number"),
        Heading("Bucket cap"),
        *(Heading(name, "number") for name in ("Measured step", "Predicted step", "Error")),
    )
    rows = tuple(
        (
            *([case.network] if several else []),
            case.case_id,
            count(case.num_devices),
            cap_label(case.bucket_cap_mb),
            quantity(case.measured_ms, "ms"),
            with_interval(case.predicted_ms, "ms") or case.reason,
            "" if case.error_pct is None else f"{case.error_pct:+.1f}%",
        )
        for case in predictions.validation
    )
    note = (
        "Measured cases that nothing was fitted to, and what the same model predicts for them. Error is "
        "predicted over measured, less one."
    )
    below: list[str] = []
    if sizes := error_sizes(predictions.validation):
        below = [f"Median error {number(median(sizes), 2)}%, worst {number(max(sizes), 2)}%, without signs."]
    return Table("Error of the predictions", note, columns, rows, tuple(below))
