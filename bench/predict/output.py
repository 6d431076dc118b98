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
from rich.table import Table

from ..cli import print_table, to_json
from ..errors import UsageError
from ..findings.numbers import per_second, plural, short, with_interval
from ..findings.wording import CPU_STAND_IN, cap_label, device_noun
from ..results.disk import parse_json
from ..results.store import write_output
from ..stats.interval import Interval
from ..text import visible
from .calibration import Calibration, Identity
from .held_out import HeldOut, error_sizes
from .prediction import Prediction
from .scenario import OWN, Scenario

VERSION = 4

LEAST_EFFICIENCY = 0.8
"""Where it is first lower is said."""

WORDS = {"network", "bucket cap", "link", "case"}
"""Columns that hold no numbers."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What was calibrated, on which case, the predictions, and their errors on held-out cases."""

    identity: Identity
    fitted: str
    notes: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    validation: tuple[HeldOut, ...] = ()

    def to_json(self) -> str:
        """Write the text of `predictions.json`. What is not known is null."""
        errors = [asdict(case) | {"error_pct": case.error_pct} for case in self.validation]
        answers = {"answers": self.answers()}
        return to_json({"schema_version": VERSION, **answers, **asdict(self), "validation": errors}) + "\n"

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
        above_0 = [f for p in self.predictions for f in (p.step_ms, p.images_per_s, p.efficiency) if f]
        others = [p.exposed_comm_ms for p in self.predictions] + [
            case.predicted_ms for case in self.validation
        ]
        for figure in filter(None, (*above_0, *others)):
            if not 0 <= figure.low <= figure.estimate <= figure.high < 1e15:
                raise ValueError(f"an interval of {figure}")
        if any(figure.low <= 0 for figure in above_0):
            raise ValueError("a prediction is not above 0")

    def lines(self) -> list[list[Prediction]]:
        """Group what is not refused by network and cap: lines from few devices to many."""
        found: dict[tuple[str, str], list[Prediction]] = {}
        for p in sorted(self.predictions, key=lambda p: p.num_devices):
            if not p.reason:
                found.setdefault((p.network, p.bucket_cap_mb), []).append(p)
        return list(found.values())

    def answers(self) -> list[str]:
        """Say in a sentence each how far every line scales, and why others are not predicted."""
        noun = device_noun(self.identity.device_type)
        said = []
        for line in self.lines():
            last = line[-1]
            if last.efficiency is None or last.num_devices == 1:
                continue
            faster = with_interval(last.efficiency.scaled(last.num_devices))
            found = f"{_on(last)}: {plural(last.num_devices, noun)} train {faster} times as fast as one"
            below = next((p for p in line if p.efficiency and p.efficiency.estimate < LEAST_EFFICIENCY), None)
            if below is not None:
                at = plural(below.num_devices, noun)
                found += f"; of what was asked, efficiency is first below {LEAST_EFFICIENCY:.0%} on {at}"
            said.append(f"{found}.")
        refused = [p for p in self.predictions if p.reason]
        return said + [f"{_on(p)}, {plural(p.num_devices, noun)}: {p.reason}." for p in refused]

    def errors(self) -> tuple[list[str], list[list[str]], str]:
        """Make headings and rows of the held-out cases in the same way, and what the errors are."""
        named = ["link", "case", "measured (ms)", "predicted (ms)", "error (%)"]
        rows = [
            [
                case.network,
                case.case_id,
                short(case.measured_ms),
                with_interval(case.predicted_ms, digits=4) or case.reason,
                "" if case.error_pct is None else f"{case.error_pct:+.1f}",
            ]
            for case in self.validation
        ]
        sizes = error_sizes(self.validation)
        if not sizes:
            return *_telling(named, rows), ""
        most = max(case.num_devices for case in self.validation if case.error_pct is not None)
        said = (
            f"Error on {len(sizes)} held-out cases: {median(sizes):.1f}% at the median, {max(sizes):.1f}% at "
        )
        said += "the largest; intervals include it. " if self.predictions else "the largest. "
        said += f"No case has more than {most} devices: beyond, the error was not measured."
        return *_telling(named, rows), said


def table(shown: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    """Make headings and rows of text of predictions, at least one, that are not refused."""
    unit = visible(per_second(shown[0].unit))
    named = ["network", "bucket cap", "devices", "step (ms)", unit, "efficiency (%)", "exposed (ms)"]
    rows = [
        [
            p.network,
            cap_label(p.bucket_cap_mb),
            f"{p.num_devices:,}",
            *(with_interval(figure, digits=4) for figure in (p.step_ms, p.images_per_s)),
            with_interval(p.efficiency, factor=100, digits=4),
            with_interval(p.exposed_comm_ms, digits=4),
        ]
        for p in shown
    ]
    return _telling(named, rows)


def _telling(named: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Leave out what all rows have in common; it stands elsewhere."""
    common = {"network", "bucket cap", "link"}
    kept = [i for i, name in enumerate(named) if name not in common or len({row[i] for row in rows}) > 1]
    return [named[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _on(p: Prediction) -> str:
    return f"On {p.network}, bucket cap {cap_label(p.bucket_cap_mb)}"


def write_csv(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write `--csv`, one row per prediction. Raises UsageError where the file cannot be written."""
    rows = pd.DataFrame(map(_cells, predictions))
    write_output(path, lambda part: rows.to_csv(part, index=False, lineterminator="\n"), option="--csv")


def _cells(p: Prediction) -> dict[str, Any]:
    """The row of predictions.csv."""
    row: dict[str, Any] = {"num_devices": p.num_devices, "bucket_cap_mb": p.bucket_cap_mb}
    for name in ("step_ms", "images_per_s", "efficiency", "exposed_comm_ms"):
        figure: Interval | None = getattr(p, name)
        ends = [""] * 3 if figure is None else [f"{end:.10g}" for end in astuple(figure)]
        middle = "step_ms_p50" if name == "step_ms" else name
        row |= dict(zip((middle, f"{name}_low", f"{name}_high"), ends, strict=True))
    return row | {"network": p.network, "unit": p.unit, "reason": p.reason}


def show(found: Predictions) -> None:
    """Print the answers, the tables, and what a reader of them has to know."""
    for text in found.answers():
        print(text)
    for line in found.lines():
        batch = f"batch {line[0].batch_size} {'in all' if line[0].scaling == 'strong' else 'per device'}"
        _print(*table(line), title=f"{_on(line[0])}, {batch}")
    if found.validation:
        named, rows, said = found.errors()
        _print(named, rows, title="Held out: cases that nothing was fitted to")
        print(said)
    for text in found.notes:
        print(text)


def _print(named: Sequence[str], rows: Sequence[Sequence[str]], *, title: str) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in named:
        table.add_column(
            name, justify="left" if name in ("network", "bucket cap", "link", "case") else "right"
        )
    for row in rows:
        table.add_row(*row)
    print_table(table)


def notes(
    calibration: Calibration, scenarios: Sequence[Scenario], *, predicted: bool, validated: bool
) -> tuple[str, ...]:
    """List what a reader of the tables has to know."""
    own = calibration.identity
    lines = [f"Calibration: {note}." for note in calibration.notes]
    named = dict.fromkeys((net.name, net.source) for one in scenarios for net in one.networks)
    lines += [f"Network: {name}: {source}." for name, source in named]
    if any(one.batch_size != own.batch_per_device or one.scaling == "strong" for one in scenarios):
        lines.append("Compute is taken as proportional to the batch; a small batch on a GPU takes longer.")
    if predicted and not validated:
        of = "published rows" if calibration.num_ranks == 1 else "held-out cases"
        error = calibration.model_error_pct
        lines.append(
            "Intervals leave the model's own error out: it was not measured; --validate does."
            if error is None
            else f"Intervals include the model's error on {of}, {error:.1f}%."
        )
    if predicted:
        lines.append(
            "Parentheses hold 95% intervals; efficiency is throughput over n times that of one device; "
            "exposed is communication that a step waits for."
        )
    if own.device_type == "cpu":
        if any(one.network_name != OWN for one in scenarios):
            lines.append(
                "Assumed: cores move the bytes, so a faster network takes more of them from compute."
            )
        lines.append(f"{CPU_STAND_IN}.")
    return tuple(lines)
