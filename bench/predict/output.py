"""Writes predictions as a table, as CSV or as the document that the report draws."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from bench.cli import print_table
from bench.findings.wording import CPU_STAND_IN, per_second, short, with_interval
from bench.predict.source import Source
from bench.results.store import write_output
from bench.scaling.document import Predictions, line
from bench.scaling.predict import BESIDE_OTHERS, Prediction
from bench.scaling.scaling_limit import RULE, Curve, sentence
from bench.scaling.validate import HeldOut, median_error_pct, model_error_pct
from bench.settings import IMAGES
from bench.stats import Interval
from bench.text import visible

Asked = Sequence[Sequence[Prediction]]
"""Predictions that were asked for, in groups that differ in devices alone."""

CSV_COLUMNS = (
    *("num_devices", "bucket_cap_mb", "step_ms_p50", "step_ms_low", "step_ms_high"),
    *("images_per_s", "efficiency", "exposed_comm_ms"),
    "network",
    "unit",
)


def write_csv(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write `--csv`, one row per prediction. Raises UsageError where the file cannot be written."""
    rows = [CSV_COLUMNS, *([_cell(value) for value in _row(p)] for p in predictions)]

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    write_output(path, write, option="--csv")


def document(
    source: Source,
    curves: Sequence[Curve],
    asked: Asked,
    validated: Sequence[HeldOut] | None,
    changed: Interval | None = None,
) -> Predictions:
    """Make the document behind `--json` and `--out`; `changed` is a drift beyond noise."""
    predictions = [p for group in asked for p in group]
    batch = source.calibration.identity.batch_per_device
    return Predictions(
        identity=source.calibration.identity,
        fitted=source.fitted,
        rule=RULE,
        notes=tuple(notes(source, predictions, validated, changed)),
        lines=tuple(
            line(
                curve,
                network=network_name(group[0]),
                batch_size=group[0].scenario.batch_per_device or batch,
                verdict=verdict(source, curve, group[0]),
                asked=group,
            )
            for curve, group in zip(curves, asked, strict=True)
        ),
        validation=None if validated is None else tuple(validated),
    )


def as_json(found: Predictions, asked: Asked) -> str:
    """Write the document as JSON, the simulated timelines included."""
    return found.to_json(
        predictions=[
            {
                **dict(zip(CSV_COLUMNS, _row(p), strict=True)),
                "lost": asdict(p.losses),
                "timeline": asdict(p.step),
            }
            for group in asked
            for p in group
        ]
    )


def write_json(path: Path, text: str) -> None:
    """Write `--out`, whole or not at all. Raises UsageError where the file cannot be written."""
    write_output(path, lambda part: part.write_text(text, encoding="utf-8"), option="--out")


def verdict(source: Source, curve: Curve, of: Prediction) -> str:
    """Say in one sentence where scaling breaks on one line of predictions, and why."""
    device = "CPU core" if source.calibration.identity.device_type == "cpu" else "GPU"
    return sentence(curve, where=f"{network_name(of)}, bucket cap {_cap(of)},", device=device)


def show(predictions: Sequence[Prediction]) -> None:
    """Print the table of predictions."""
    table = Table(box=box.SIMPLE_HEAD, title="Predicted")
    several = len({network_name(p) for p in predictions}) > 1
    for name in (
        *(("network",) if several else ()),
        "GPUs",
        "cap MiB",
        "buckets",
        "step ms",
        escape(visible(per_second(predictions[0].unit if predictions else IMAGES))),
        "efficiency %",
        "exposed ms",
        "wait ms",
    ):
        table.add_column(name, justify="right")
    for p in predictions:
        percent = Interval(*(100 * x for x in (p.efficiency.estimate, p.efficiency.low, p.efficiency.high)))
        table.add_row(
            *((network_name(p),) if several else ()),
            f"{p.scenario.num_devices}",
            str(p.scenario.bucket_cap_mb),
            f"{p.num_buckets}",
            *(_shown(value) for value in (p.step_ms, p.images_per_s, percent, p.exposed_comm_ms)),
            f"{p.wait_ms:.2f}",
        )
    print_table(table)


def show_validation(cases: Sequence[HeldOut]) -> None:
    """Print the table of held-out cases."""
    table = Table(box=box.SIMPLE_HEAD, title="Held out: cases that nothing was fitted to")
    several = len({case.network for case in cases}) > 1
    for name in (*(("link",) if several else ()), "case", "measured ms", "predicted ms", "error %"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for case in cases:
        table.add_row(
            *((case.network,) if several else ()),
            *(case.case_id, short(case.measured_ms), _shown(case.predicted_ms), f"{case.error_pct:+.1f}"),
        )
    print_table(table)


def notes(
    source: Source,
    predictions: Sequence[Prediction],
    validated: Sequence[HeldOut] | None,
    changed: Interval | None = None,
) -> list[str]:
    """List what a reader of the table has to know."""
    calibration = source.calibration
    lines = [f"Calibration: {note}." for note in calibration.notes]
    lines += [f"Network: {text}." for text in dict.fromkeys(_network(p) for p in predictions)]
    if any((p.scenario.batch_per_device or 0) != 0 or p.scenario.scaling == "strong" for p in predictions):
        lines.append("Compute is taken as proportional to the batch; a small batch on a GPU takes longer.")
    on_cores = calibration.identity.device_type == "cpu"
    if on_cores and any(p.scenario.elsewhere for p in predictions):
        lines.append("Assumed: cores move the bytes, so a faster network takes more of them from compute.")
    shares = [share for p in predictions for cause, share in p.losses.shares_pct() if cause == BESIDE_OTHERS]
    if any(share >= 5 for share in shares):
        slower = "as much slower than alone as on the calibrated machine"
        lines.append(f"Assumed: {BESIDE_OTHERS} stays {slower}.")
    if validated is not None:
        largest, middle = model_error_pct(validated), median_error_pct(validated)
        included = "; the intervals of predictions include it" if predictions else ""
        lines.append(
            f"Error on {len(validated)} held-out cases: {middle:.1f}% at the median, {largest:.1f}% at the "
            f"largest{included}. None has more than "
            f"{max(case.num_devices for case in validated)} devices: beyond, the error was not measured."
        )
        if changed is not None:
            lines.append(
                f"The machine changed: one device alone took {_shown(changed)} times as long when these "
                "cases were measured as when it was calibrated; the errors hold that too."
            )
    elif calibration.model_error_pct is not None:
        lines.append(
            f"Intervals include the model's error on held-out cases, {calibration.model_error_pct:.1f}%."
        )
    elif predictions:
        lines.append("Intervals leave the model's own error out: it was not measured; --validate does.")
    if predictions:
        lines.append(
            "Parentheses hold 95% intervals; efficiency is throughput over n times that of one device."
        )
    if calibration.identity.device_type == "cpu":
        lines.append(f"{CPU_STAND_IN}.")
    return lines


def network_name(p: Prediction) -> str:
    """Name what joins the devices, in a word or two."""
    s = p.scenario
    if s.measured is not None:
        return s.measured.name
    return (
        " + ".join(net.name for net in (s.intra, s.network) if net is not None) or "the network as measured"
    )


def _network(p: Prediction) -> str:
    s = p.scenario
    named = [f"{net.name}: {net.source}" for net in (s.intra, s.network) if net is not None]
    carried = (
        "assumed on other numbers of ranks: the ring law for bytes, a tree's or ring's steps for latency"
    )
    if s.measured is not None:
        return f"{s.measured.name}: {s.measured.source}; {carried}"
    return "; ".join(named) or f"{network_name(p)}; {carried}"


def _cap(p: Prediction) -> str:
    cap = str(p.scenario.bucket_cap_mb)
    return cap if cap == "default" else f"{cap} MiB"


def _row(p: Prediction) -> tuple[Any, ...]:
    step = p.step_ms
    return (
        *(p.scenario.num_devices, str(p.scenario.bucket_cap_mb), step.estimate, step.low, step.high),
        *(p.images_per_s.estimate, p.efficiency.estimate, p.exposed_comm_ms.estimate),
        network_name(p),
        p.unit,
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}" if math.isfinite(value) else ""
    return str(value)


def _shown(value: Interval) -> str:
    return with_interval(value, digits=4)
