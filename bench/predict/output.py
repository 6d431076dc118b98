"""Writes predictions as a table, as CSV or as the document that the report draws."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ddp_bench.bench.cli import print_table
from ddp_bench.bench.findings.numbers import per_second, short, with_interval
from ddp_bench.bench.findings.wording import CPU_STAND_IN
from ddp_bench.bench.predict.source import Source
from ddp_bench.bench.results.store import write_output
from ddp_bench.bench.scaling.calibration import Calibration
from ddp_bench.bench.scaling.document import Predictions, line
from ddp_bench.bench.scaling.predict import BESIDE_OTHERS, Prediction
from ddp_bench.bench.scaling.scaling_limit import RULE, Curve, sentence
from ddp_bench.bench.scaling.scenario import Scenario, as_calibrated, batch_per_device
from ddp_bench.bench.scaling.validate import HeldOut, error_sizes
from ddp_bench.bench.settings import IMAGES
from ddp_bench.bench.stats import Interval
from ddp_bench.bench.text import visible

Asked = Sequence[Sequence[Prediction]]
"""Predictions that were asked for, in groups that differ in devices alone."""

CSV_COLUMNS = (
    *("num_devices", "bucket_cap_mb", "step_ms_p50", "step_ms_low", "step_ms_high"),
    *("images_per_s", "images_per_s_low", "images_per_s_high"),
    *("efficiency", "efficiency_low", "efficiency_high"),
    *("exposed_comm_ms", "exposed_comm_ms_low", "exposed_comm_ms_high"),
    *("network", "unit", "reason"),
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
    return Predictions(
        identity=source.calibration.identity,
        fitted=source.fitted,
        rule=RULE,
        notes=tuple(notes(source, predictions, validated, changed)),
        lines=tuple(
            line(
                curve,
                network=network_name(group[0]),
                batch_size=as_calibrated(source.calibration, group[0].scenario).batch_per_device or 0,
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
                "lost": None if p.reason else asdict(p.losses),
                "extrapolated_rank_spread_ms": None if p.reason else p.extrapolated_ms,
                "timeline": None if p.reason else asdict(p.step),
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
    table = Table(
        box=box.SIMPLE_HEAD, title=f"Predicted{_batch(predictions[0].scenario) if predictions else ''}"
    )
    several = len({network_name(p) for p in predictions}) > 1
    for name in (
        *(("network",) if several else ()),
        "devices",
        "cap MiB",
        "buckets",
        "step ms",
        escape(visible(per_second(predictions[0].unit if predictions else IMAGES))),
        "efficiency %",
        "exposed ms",
        "wait ms",
    ):
        table.add_column(name, justify="right")
    refused = [p.reason for p in predictions if p.reason]
    if refused:
        table.add_column("", overflow="fold")
    for p in predictions:
        figures = _EMPTY if p.reason else _figures(p)
        table.add_row(
            *((network_name(p),) if several else ()),
            *(f"{p.scenario.num_devices}", str(p.scenario.bucket_cap_mb), f"{p.num_buckets}"),
            *figures,
            *((p.reason,) if refused else ()),
        )
    print_table(table)


def _batch(scenario: Scenario) -> str:
    of = "in all" if scenario.scaling == "strong" else "per device"
    return f", {scenario.scaling} scaling, batch {scenario.batch_per_device} {of}"


def _figures(p: Prediction) -> tuple[str, ...]:
    exposed = p.shown_exposed_ms
    return (
        *(_shown(value) for value in (p.step_ms, p.images_per_s, p.efficiency.scaled(100))),
        "" if exposed is None else _shown(exposed),
        f"{p.wait_ms:.2f}",
    )


_EMPTY = ("", "", "", "", "")
"""As many cells as `_figures` gives."""


def show_validation(cases: Sequence[HeldOut]) -> None:
    """Print the table of held-out cases."""
    table = Table(box=box.SIMPLE_HEAD, title="Held out: cases that nothing was fitted to")
    several = len({case.network for case in cases}) > 1
    for name in (*(("link",) if several else ()), "case", "measured ms", "predicted ms", "error %"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for case in cases:
        table.add_row(
            *((case.network,) if several else ()),
            *(case.case_id, short(case.measured_ms)),
            *(
                (case.reason, "")
                if case.predicted_ms is None
                else (_shown(case.predicted_ms), f"{case.error_pct:+.1f}")
            ),
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
    batch = calibration.identity.batch_per_device
    if any(batch_per_device(calibration, p.scenario) != batch for p in predictions):
        lines.append("Compute is taken as proportional to the batch; a small batch on a GPU takes longer.")
    on_cores = calibration.identity.device_type == "cpu"
    if on_cores and any(p.scenario.elsewhere for p in predictions):
        lines.append("Assumed: cores move the bytes, so a faster network takes more of them from compute.")
    shares = [share for p in predictions for cause, share in p.losses.shares_pct() if cause == BESIDE_OTHERS]
    if any(share >= 5 for share in shares):
        slower = "as much slower than alone as on the calibrated machine"
        lines.append(f"Assumed: {BESIDE_OTHERS} stays {slower}.")
    lines += _cautions(predictions, calibration.num_ranks)
    lines += _errors(calibration, predictions, validated, changed)
    if predictions:
        lines.append(
            "Parentheses hold 95% intervals; efficiency is throughput over n times that of one device."
        )
    if calibration.identity.device_type == "cpu":
        lines.append(f"{CPU_STAND_IN}.")
    return lines


def _cautions(predictions: Sequence[Prediction], num_ranks: int) -> list[str]:
    """Say what of the shown predictions is extrapolated, and what is left out of them."""
    shown = [p for p in predictions if not p.reason]
    several = len({network_name(p) for p in shown}) > 1
    found = [
        f"Caution: on {p.scenario.num_devices} devices{f' over {network_name(p)}' if several else ''} "
        f"{p.caution}; {num_ranks} ranks were calibrated."
        for p in shown
        if p.caution
    ]
    if any(p.shown_exposed_ms is None for p in shown):
        found.append("Exposed communication is left out where it is not known to half its value.")
    return found


def _errors(
    calibration: Calibration,
    predictions: Sequence[Prediction],
    validated: Sequence[HeldOut] | None,
    changed: Interval | None,
) -> list[str]:
    """Say how far the model was off on held-out cases, and whether the intervals hold that."""
    sizes = error_sizes(validated or ())
    refused = len(validated or ()) - len(sizes)
    lines = [f"Of the held-out cases {refused} could not be predicted."] if refused else []
    if sizes and validated:
        most = max(case.num_devices for case in validated if case.error_pct is not None)
        lines.append(
            f"Error on {len(sizes)} held-out cases: {median(sizes):.1f}% at the median, {max(sizes):.1f}% at "
            f"the largest{'; the intervals of predictions include it' if predictions else ''}. None has more "
            f"than {most} devices: beyond, the error was not measured."
        )
    elif calibration.model_error_pct is not None:
        lines.append(
            f"Intervals include the model's error on held-out cases, {calibration.model_error_pct:.1f}%."
        )
    elif predictions:
        lines.append("Intervals leave the model's own error out: it was not measured; --validate does.")
    if changed is not None:
        lines.append(
            f"The machine changed: one device alone took {_shown(changed)} times as long when these "
            "cases were measured as when it was calibrated; the errors hold that too."
        )
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
    named = (p.scenario.num_devices, str(p.scenario.bucket_cap_mb))
    found = (p.step_ms, p.images_per_s, p.efficiency, p.shown_exposed_ms)
    shown = [None if p.reason else one for one in found]
    figures = [(None,) * 3 if one is None else (one.estimate, one.low, one.high) for one in shown]
    return (*named, *(value for figure in figures for value in figure), network_name(p), p.unit, p.reason)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}" if math.isfinite(value) else ""
    return "" if value is None else str(value)


def _shown(value: Interval) -> str:
    return with_interval(value, digits=4)
