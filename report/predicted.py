"""Shows predictions beside what was measured: scaling on hardware that was not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ddp_bench.bench.axes import DDP_DEFAULTS
from ddp_bench.bench.cli import command
from ddp_bench.bench.findings.numbers import count, number, per_second, plural, quantity, with_interval
from ddp_bench.bench.findings.wording import Row, cap_label, device_noun, estimate, link_name, settings, text
from ddp_bench.bench.predict.calibration import Identity, differences
from ddp_bench.bench.predict.held_out import error_sizes
from ddp_bench.bench.predict.measured import ddp_cases, identity
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.predict.prediction import Prediction
from ddp_bench.bench.predict.scaling_limit import Line
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.stats import Interval
from ddp_bench.report.devices import LOG_FROM, device_ticks, marked
from ddp_bench.report.drawings import MOST_RUNS, Chart, Panel, Point, Series
from ddp_bench.report.model import Section, Table, TableColumn

_NOTE = f"Predicted by {command('predict')}, not measured: a simulation of one step, fed by a calibration."
_HOW = (
    "Lines are predictions, their areas 95% intervals: where an area is wide, little is known. Diamonds with "
    "bars were measured in this run, over its own network. A cross marks where scaling breaks: the first "
    "number of devices with a predicted efficiency below 80%."
)
_COLUMNS = (
    TableColumn("Network"),
    TableColumn("Bucket cap"),
    TableColumn("Devices", "number"),
    TableColumn("Step", "number"),
    TableColumn("Throughput", "number"),
    TableColumn("Efficiency", "number"),
    TableColumn("Exposed communication", "number"),
    TableColumn("Waiting for the slowest", "number"),
)
_TABLE_NOTE = (
    "Prediction [95% interval]. Exposed communication is the step less the same step without communication; "
    "efficiency is throughput over devices times that of one."
)
_CHECKED = (
    TableColumn("Case"),
    TableColumn("Devices", "number"),
    TableColumn("Bucket cap"),
    TableColumn("Measured step", "number"),
    TableColumn("Predicted step", "number"),
    TableColumn("Error", "number"),
)
_CHECKED_NOTE = (
    "Measured cases that nothing was fitted to, and what the same model predicts for them. Error is "
    "predicted over measured, less one."
)


def section(run: RunData, predictions: Predictions, *, key: str) -> Section:
    """Show `predictions` beside the cases of `run`."""
    found = predictions.lines
    caps = dict.fromkeys(line.first.bucket_cap_mb for line in found)
    by_cap = [[line for line in found if line.first.bucket_cap_mb == cap][:MOST_RUNS] for cap in caps]
    made = (_predictions(predictions), _validation(predictions))
    by_cap = [drawn for lines in by_cap if (drawn := [line for line in lines if _shown(line)])]
    networks = len({line.first.network for line in predictions.lines})
    more = [f"Of {networks} networks the first {MOST_RUNS} are drawn."] if networks > MOST_RUNS else []
    return Section(
        title="On hardware you do not have",
        notes=(_NOTE, *more, *_unlike(run, predictions), *(() if made[0] else predictions.notes)),
        figures=tuple(
            _figure(run, predictions, lines, name, f"{key}-{i}", several=len(caps) > 1)
            for i, lines in enumerate(by_cap, start=1)
            for name in ("images_per_s", "efficiency")
        ),
        tables=tuple(table for table in made if table is not None),
    )


def _shown(line: Line) -> list[Prediction]:
    """Return the predictions of a line that are not refused."""
    return [mark for mark in line.predictions if not mark.reason]


def _figure(
    run: RunData, predictions: Predictions, lines: Sequence[Line], name: str, key: str, *, several: bool
) -> Chart:
    """Show throughput or efficiency against devices; `several` bucket caps are told apart by the title."""
    rate = name == "images_per_s"
    device, link = device_noun(predictions.identity.device_type), predictions.identity.link
    suffix = f", bucket cap {cap_label(lines[0].first.bucket_cap_mb)}" if several else ""
    factor, unit = (1.0, per_second(predictions.identity.unit)) if rate else (100.0, "%")
    predicted = [
        Series(line.first.network, f"run{i}", tuple(_point(m, name, factor) for m in _shown(line)), area=True)
        for i, line in enumerate(lines, start=1)
    ]
    at_break = [
        point
        for line, series in zip(lines, predicted, strict=True)
        for point in series.points
        if point.x == line.broken_at
    ]
    broken = Series("breaks here", "break", tuple(Point(p.x, p.y) for p in at_break), joined=False)
    measured = Series(
        f"measured, {link_name(link)}" if link else "measured",
        "single",
        _measured(run, predictions, lines[0], name, factor),
        joined=False,
    )
    counts = sorted({p.x for s in (*predicted, measured) for p in s.points})
    mark = _shown(lines[0])[0]
    one = _of(mark, "images_per_s") / _of(mark, "efficiency") / mark.num_devices if rate else 100.0
    ideal = Series(
        "ideal", "ideal", tuple(Point(n, one * n if rate else one) for n in sorted({1.0, *counts}))
    )
    drawn = [series for series in (*predicted, measured, broken) if series.points]
    said = "; ".join(f"{s.label} {with_interval(s.points[-1].interval, unit)}" for s in predicted)
    most = plural(predicted[0].points[-1].x, device)
    return Chart(
        key=f"{key}-{'throughput' if rate else 'efficiency'}",
        title=f"Predicted {'throughput' if rate else 'efficiency'}{suffix}",
        x_label=f"devices ({device}s), {lines[0].first.scaling} scaling",
        y_label=f"throughput ({unit})" if rate else "efficiency (%)",
        ticks=device_ticks(
            [n for n in counts if n not in {p.x for p in at_break} or int(n).bit_count() == 1]
        ),
        panels=(Panel("", (*drawn, ideal)),),
        caption=f"Predicted on {most}: {said}. "
        + (_breaks(lines, device) if rate else " ".join(line.verdict for line in lines)),
        how_to_read=f"Higher is better; the dotted line is ideal. {_HOW}",
        log_x=max(counts) > LOG_FROM,
        log_y=rate and max(counts) > LOG_FROM,
    )


def _breaks(lines: Sequence[Line], device: str) -> str:
    where = []
    for line in lines:
        refused = len(_shown(line)) < len(line.predictions)
        at = "at a count that is not known" if refused else "nowhere"
        at = at if line.broken_at is None else f"at {plural(line.broken_at, device)}"
        where.append(f"on {line.first.network} {at}")
    return f"Scaling breaks {', '.join(where)}."


def _point(mark: Prediction, name: str, factor: float) -> Point:
    value: Interval = getattr(mark, name)
    return Point.at(mark.num_devices, value.scaled(factor))


def _of(mark: Prediction, name: str) -> float:
    value: Interval = getattr(mark, name)
    return value.estimate


def _measured(
    run: RunData, predictions: Predictions, line: Line, name: str, factor: float
) -> tuple[Point, ...]:
    """Return the run's own cases of what the line predicts, possibly on another network."""
    usual = {
        **DDP_DEFAULTS,
        "bucket_cap_mb": line.first.bucket_cap_mb,
        "comm_hook": line.first.comm_hook,
        "accumulate": line.first.accumulate,
    }
    rows = [
        row
        for row in ddp_cases(run)
        if not differences(_of_any_batch(identity(run, row)), _of_any_batch(predictions.identity))
        and (text(row["scaling"]), _batch_size(row)) == (line.first.scaling, line.first.batch_size)
        and not settings(row, usual)
    ]
    found = [(row, estimate(row, name)) for row in sorted(rows, key=lambda row: int(row["num_devices"]))]
    return tuple(
        marked(float(row["num_devices"]), value.scaled(factor), row)
        for row, value in found
        if value is not None
    )


def _of_any_batch(found: Identity) -> Identity:
    """Leave the batch out: under strong scaling it is another at every count, and lines tell theirs."""
    return replace(found, batch_per_device=1)


def _batch_size(row: Row) -> int:
    """As a line has it: per device (weak) or in all (strong)."""
    return int(row["batch_per_device"]) * (int(row["num_devices"]) if row["scaling"] == "strong" else 1)


def _unlike(run: RunData, predictions: Predictions) -> list[str]:
    cases = ddp_cases(run)
    unlike = [differences(predictions.identity, identity(run, case)) for case in cases]
    if not unlike or not all(unlike):
        return []
    nearest = next(found for found in unlike if len(found) == min(map(len, unlike)))
    return [f"The calibration is not of this run: {'; '.join(nearest)}."]


def _predictions(predictions: Predictions) -> Table | None:
    asked = [(line, mark) for line in predictions.lines for mark in line.predictions if mark.asked]
    rows = tuple(
        (
            line.first.network,
            cap_label(line.first.bucket_cap_mb),
            count(mark.num_devices),
            with_interval(mark.step_ms, "ms") or "not predicted",
            with_interval(mark.images_per_s, per_second(predictions.identity.unit)),
            with_interval(mark.efficiency, "%", 100.0),
            with_interval(mark.exposed_comm_ms, "ms"),
            quantity(mark.wait_ms, "ms"),
        )
        for line, mark in asked
    )
    refused = [
        f"{line.first.network}, bucket cap {cap_label(line.first.bucket_cap_mb)}, "
        f"{count(mark.num_devices)} devices: {mark.reason}."
        for line, mark in asked
        if mark.reason
    ]
    below = (*refused, *predictions.notes)
    return Table("Predictions", _TABLE_NOTE, _COLUMNS, rows, below=below) if rows else None


def _validation(predictions: Predictions) -> Table | None:
    if not predictions.validation:
        return None
    several = len({case.network for case in predictions.validation}) > 1
    columns = (*((TableColumn("Link"),) if several else ()), *_CHECKED)
    rows = tuple(
        (
            *((case.network,) if several else ()),
            case.case_id,
            count(case.num_devices),
            cap_label(case.bucket_cap_mb),
            quantity(case.measured_ms, "ms"),
            with_interval(case.predicted_ms, "ms") or case.reason,
            "" if case.error_pct is None else f"{case.error_pct:+.1f}%",
        )
        for case in predictions.validation
    )
    sizes = error_sizes(predictions.validation)
    below = f"Median error {number(median(sizes), 2)}%, worst {number(max(sizes), 2)}%, without signs."
    said = (below,) if sizes else ()
    return Table("Error of the predictions", _CHECKED_NOTE, columns, rows, below=said)
