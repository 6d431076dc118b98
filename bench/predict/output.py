"""Writes predictions as tables, as CSV, and as the document that the report draws, `predictions.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from ..cli import print_table, to_json
from ..errors import UsageError
from ..findings.numbers import per_second, short, with_interval
from ..findings.wording import CPU_STAND_IN
from ..results.disk import parse_json
from ..results.store import write_output
from ..stats.interval import Interval
from ..text import visible
from .calibration import Calibration, Identity
from .held_out import HeldOut, error_sizes
from .prediction import BESIDE_OTHERS, Prediction
from .scaling_limit import RULE, Line
from .scenario import Scenario

VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What was calibrated, on which case, the predictions, and their errors on held-out cases."""

    identity: Identity
    fitted: str | None
    notes: tuple[str, ...]
    lines: tuple[Line, ...]
    validation: tuple[HeldOut, ...] | None
    rule: str = RULE

    def to_json(self) -> str:
        """Write the text of `predictions.json`. What is not known is null."""
        whole = {"schema_version": VERSION, **asdict(self)}
        if self.validation is not None:
            whole["validation"] = [asdict(case) | {"error_pct": case.error_pct} for case in self.validation]
        return to_json(whole) + "\n"

    @classmethod
    def from_json(cls, content: str | bytes, *, source: str = "predictions.json") -> Predictions:
        """Read the document from that text. Raises UsageError, naming `source`, where it is not one."""
        data = parse_json(content, source)
        try:
            version = data.get("schema_version") if isinstance(data, dict) else VERSION
            if version != VERSION:
                raise ValueError(f"schema {version!r}, this version reads {VERSION}")
            found = msgspec.convert(data, cls)
            found._check()
        except (ValueError, OverflowError, RecursionError) as error:
            raise UsageError(f"{source} holds no predictions ({error}); predict again") from None
        return found

    def _check(self) -> None:
        """Raise ValueError for figures that no prediction has."""
        predictions = [p for line in self.lines for p in line.predictions]
        above_0 = [f for p in predictions for f in (p.step_ms, p.images_per_s, p.efficiency)]
        others = [p.exposed_comm_ms for p in predictions]
        others += [case.predicted_ms for case in self.validation or ()]
        for figure in filter(None, (*above_0, *others)):
            if not 0 <= figure.low <= figure.estimate <= figure.high < 1e15:
                raise ValueError(f"an interval of {figure}")
        if any(figure is not None and figure.low <= 0 for figure in above_0):
            raise ValueError("a prediction is not above 0")
        for line in self.lines:
            if line.broken_at not in (None, *(p.num_devices for p in line.predictions)):
                raise ValueError("a line breaks where it has no prediction")


def write_csv(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write `--csv`, one row per prediction. Raises UsageError where the file cannot be written."""
    table = pd.DataFrame(map(_cells, predictions))
    write_output(path, lambda part: table.to_csv(part, index=False, lineterminator="\n"), option="--csv")


def _cells(p: Prediction) -> dict[str, Any]:
    """The row of predictions.csv."""
    row: dict[str, Any] = {"num_devices": p.num_devices, "bucket_cap_mb": p.bucket_cap_mb}
    for name in ("step_ms", "images_per_s", "efficiency", "exposed_comm_ms"):
        figure: Interval | None = getattr(p, name)
        ends = [""] * 3 if figure is None else [f"{end:.10g}" for end in astuple(figure)]
        middle = "step_ms_p50" if name == "step_ms" else name
        row |= dict(zip((middle, f"{name}_low", f"{name}_high"), ends, strict=True))
    return row | {"network": p.network, "unit": p.unit, "reason": p.reason}


def show(predictions: Sequence[Prediction]) -> None:
    """Print the table of predictions, at least one."""
    first = predictions[0]
    of = "in all" if first.scaling == "strong" else "per device"
    several = len({p.network for p in predictions}) > 1
    refused = any(p.reason for p in predictions)
    columns = ("devices", "cap MiB", "buckets", "step ms", escape(visible(per_second(first.unit))))
    table = Table(
        box=box.SIMPLE_HEAD, title=f"Predicted, {first.scaling} scaling, batch {first.batch_size} {of}"
    )
    for name in (*(("network",) if several else ()), *columns, "efficiency %", "exposed ms", "wait ms"):
        table.add_column(name, justify="right")
    if refused:
        table.add_column("", overflow="fold")
    for p in predictions:
        table.add_row(
            *((p.network,) if several else ()),
            *(f"{p.num_devices}", p.bucket_cap_mb, f"{p.num_buckets}", _shown(p.step_ms)),
            *(_shown(p.images_per_s), _shown(p.efficiency, 100), _shown(p.exposed_comm_ms)),
            "" if p.wait_ms is None else f"{p.wait_ms:.2f}",
            *((p.reason,) if refused else ()),
        )
    print_table(table)


def show_validation(cases: Sequence[HeldOut]) -> None:
    """Print the table of held-out cases."""
    table = Table(box=box.SIMPLE_HEAD, title="Held out: cases that nothing was fitted to")
    several = len({case.network for case in cases}) > 1
    for name in (*(("link",) if several else ()), "case", "measured ms", "predicted ms", "error %"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for case in cases:
        error = "" if case.error_pct is None else f"{case.error_pct:+.1f}"
        table.add_row(
            *((case.network,) if several else ()),
            *(case.case_id, short(case.measured_ms), _shown(case.predicted_ms) or case.reason, error),
        )
    print_table(table)


def notes(
    calibration: Calibration,
    scenarios: Sequence[Scenario],
    predictions: Sequence[Prediction],
    validated: Sequence[HeldOut] | None,
    changed: Interval | None = None,
) -> tuple[str, ...]:
    """List what a reader of the table has to know; `changed` is a drift of the machine beyond noise."""
    batch = calibration.identity.batch_per_device
    batches = {p.batch_size // (p.num_devices if p.scaling == "strong" else 1) for p in predictions}
    lost = [dict(p.lost.shares_pct()) for p in predictions if p.lost is not None]
    on_cores = calibration.identity.device_type == "cpu"
    lines = [f"Calibration: {note}." for note in calibration.notes]
    lines += [f"Network: {text}." for text in dict.fromkeys(one.network_source for one in scenarios)]
    if batches - {batch}:
        lines.append("Compute is taken as proportional to the batch; a small batch on a GPU takes longer.")
    if on_cores and any(one.network is not None for one in scenarios):
        lines.append("Assumed: cores move the bytes, so a faster network takes more of them from compute.")
    if any(shares.get(BESIDE_OTHERS, 0) >= 5 for shares in lost):
        slower = "as much slower than alone as on the calibrated machine"
        lines.append(f"Assumed: {BESIDE_OTHERS} stays {slower}.")
    if any(p.exposed_comm_ms is None for p in predictions if not p.reason):
        lines.append("Exposed communication is left out where it is not known to half its value.")
    lines += _errors(calibration, validated or (), changed, predicted=bool(predictions))
    if predictions:
        lines.append(
            "Parentheses hold 95% intervals; efficiency is throughput over n times that of one device."
        )
    if on_cores:
        lines.append(f"{CPU_STAND_IN}.")
    return tuple(lines)


def _errors(
    calibration: Calibration, validated: Sequence[HeldOut], changed: Interval | None, *, predicted: bool
) -> list[str]:
    """Say how far the model was off on held-out cases, and whether the intervals hold that."""
    sizes = error_sizes(validated)
    refused = len(validated) - len(sizes)
    lines = [f"Of the held-out cases {refused} could not be predicted."] if refused else []
    if sizes:
        most = max(case.num_devices for case in validated if case.error_pct is not None)
        lines.append(
            f"Error on {len(sizes)} held-out cases: {median(sizes):.1f}% at the median, {max(sizes):.1f}% at "
            f"the largest{'; the intervals of predictions include it' if predicted else ''}. None has more "
            f"than {most} devices: beyond, the error was not measured."
        )
    elif calibration.model_error_pct is not None:
        of = "published rows" if calibration.num_ranks == 1 else "held-out cases"
        lines.append(f"Intervals include the model's error on {of}, {calibration.model_error_pct:.1f}%.")
    elif predicted:
        lines.append("Intervals leave the model's own error out: it was not measured; --validate does.")
    if changed is not None:
        lines.append(
            f"The machine changed: one device alone took {_shown(changed)} times as long when these "
            "cases were measured as when it was calibrated; the errors hold that too."
        )
    return lines


def _shown(value: Interval | None, factor: float = 1.0) -> str:
    return with_interval(value, factor=factor, digits=4)
