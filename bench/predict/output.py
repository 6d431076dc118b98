"""Writes predictions as tables, and as the JSON document that the report draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from ..common.numbers import format_count, format_interval, format_rate_unit, format_short
from ..common.text import to_json
from ..findings.wording import CPU_STAND_IN, format_cap, name_device
from ..page.page import Card, Heading, Page, Table
from .calibration import Calibration, Identity, read_record
from .prediction import MEASURED_NETWORK, Prediction, Scenario
from .runs import HeldOut, list_error_sizes

VERSION = 5

MIN_EFFICIENCY = 0.8
"""Efficiency below which the first prediction is named."""

MIN_WIDE_SHARE = 0.5
"""Half-width of an interval, as a share of the throughput, from which on that is said."""

_NETWORK, _CAP, _LINK = map(Heading, ("Network", "Bucket cap", "Link"))
_ERROR = (
    "Measured cases that nothing was fitted to, and what the same model predicts for them. Error is "
    "predicted over measured, less one."
)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The calibrated workload and machine, the predictions, and their errors on held-out cases."""

    identity: Identity
    notes: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    validation: tuple[HeldOut, ...] = ()

    def to_json(self) -> str:
        """Write the text of `predictions.json`. What is not known is null."""
        errors = [asdict(case) | {"error_pct": case.error_pct} for case in self.validation]
        answers = {"answers": [f"On {of}: {said}" for of, said in self.describe_scaling()]}
        return to_json({"schema_version": VERSION, **answers, **asdict(self), "validation": errors})

    @classmethod
    def from_json(cls, content: str | bytes, *, source: str = "predictions.json") -> Predictions:
        """Read the document from that text. Raises UsageError, naming `source`, where it is not one."""
        return read_record(cls, content, VERSION, source=source, mend="predict")

    def __post_init__(self) -> None:
        above_0 = [f for p in self.predictions for f in (p.step_ms, p.images_per_s, p.efficiency)]
        above_0 += [case.predicted_ms for case in self.validation]
        for figure in (*above_0, *(p.exposed_comm_ms.shift(1e-9) for p in self.predictions)):
            if not 0 < figure.low <= figure.estimate <= figure.high < 1e15:
                raise ValueError(f"an interval of {figure}")

    def group_lines(self) -> list[list[Prediction]]:
        """Group them by network and cap: lines from few devices to many."""
        found: dict[tuple[str, str], list[Prediction]] = {}
        for p in sorted(self.predictions, key=lambda p: p.num_devices):
            found.setdefault((p.network, p.bucket_cap_mb), []).append(p)
        return list(found.values())

    def describe_scaling(self) -> list[tuple[str, str]]:
        """Say of every line what it is of, and how far it scales."""
        noun = name_device(self.identity.device_type)
        said = []
        for line in self.group_lines():
            last = line[-1]
            if last.num_devices == 1:
                continue
            faster = format_interval(last.efficiency.scale(last.num_devices))
            found = f"{format_count(last.num_devices, noun)} train {faster} times as fast as one"
            below = next((p for p in line if p.efficiency.estimate < MIN_EFFICIENCY), None)
            if below is not None:
                at = format_count(below.num_devices, noun)
                found += f"; of what was asked, efficiency is first below {MIN_EFFICIENCY:.0%} on {at}"
            said.append((f"{last.network}, bucket cap {format_cap(last.bucket_cap_mb)}", f"{found}."))
        return said

    def make_tables(self) -> list[Table]:
        """Tabulate the predictions, then the errors on held-out cases."""
        made, shown = [], [p for line in self.group_lines() for p in line]
        if shown:
            batch = (
                f"batch {shown[0].batch_size} {'in all' if shown[0].scaling == 'strong' else 'per device'}"
            )
            made.append(
                _make_table(f"Predictions, {batch}", "", [_make_row(p, self.identity.unit) for p in shown])
            )
        if self.validation:
            sizes, most = list_error_sizes(self.validation), max(case.num_devices for case in self.validation)
            included = "; intervals include it" if self.predictions else ""
            said = (
                f"Error on {len(sizes)} held-out cases: {median(sizes):.1f}% at the median, "
                f"{max(sizes):.1f}% at the largest{included}. No case has more than {most} devices: beyond, "
                "the error was not measured."
            )
            made.append(
                _make_table(
                    "Error of the predictions", _ERROR, [_make_error_row(c) for c in self.validation], said
                )
            )
        return made

    def make_page(self) -> Page:
        """Make the page of predictions by themselves."""
        cards = [Card(of, "found", "", said) for of, said in self.describe_scaling()]
        return Page(title="Predictions", cards=cards, tables=self.make_tables(), notes=self.notes)


def _make_row(p: Prediction, unit: str) -> dict[Heading, str]:
    rate = Heading(f"Throughput ({format_rate_unit(unit)})", "number", drop=1)
    return {
        _NETWORK: p.network,
        _CAP: format_cap(p.bucket_cap_mb),
        Heading("Devices", "number"): f"{p.num_devices:,}",
        Heading("Step (ms)", "number", drop=2): format_interval(p.step_ms, digits=4),
        rate: format_interval(p.images_per_s, digits=4),
        Heading("Efficiency (%)", "number"): format_interval(p.efficiency, factor=100, digits=4),
        Heading("Exposed (ms)", "number", drop=3): format_interval(p.exposed_comm_ms, digits=4),
    }


def _make_error_row(case: HeldOut) -> dict[Heading, str]:
    return {
        _LINK: case.network,
        Heading("Case"): case.case_id,
        Heading("Measured (ms)", "number"): format_short(case.measured_ms),
        Heading("Predicted (ms)", "number"): format_interval(case.predicted_ms, digits=4),
        Heading("Error (%)", "number"): f"{case.error_pct:+.1f}",
    }


def _make_table(title: str, note: str, rows: Sequence[dict[Heading, str]], *below: str) -> Table:
    """Make a table of rows, without what all of them have in common and stands elsewhere."""
    common = {name for name in (_NETWORK, _CAP, _LINK) if len({row.get(name) for row in rows}) == 1}
    names = tuple(name for name in rows[0] if name not in common)
    return Table(title, note, names, tuple(tuple(row[name] for name in names) for row in rows), below)


def list_notes(
    calibration: Calibration,
    scenarios: Sequence[Scenario],
    predictions: Sequence[Prediction],
    *,
    validated: bool,
) -> tuple[str, ...]:
    """List what a reader of the tables has to know."""
    own = calibration.identity
    lines = [f"Calibration: {note}." for note in calibration.notes]
    named = dict.fromkeys((net.name, net.source) for one in scenarios for net in one.networks)
    lines += [f"Network: {name}: {source}." for name, source in named]
    if any(one.batch_size != own.batch_per_device or one.scaling == "strong" for one in scenarios):
        lines.append("Compute is taken as proportional to the batch; a small batch on a GPU takes longer.")
    if predictions and not validated:
        of = "published rows" if calibration.num_ranks == 1 else "held-out cases"
        error = calibration.model_error_pct
        lines.append(
            "Intervals leave the model's own error out: it was not measured; --validate does."
            if error is None
            else f"Intervals include the model's error on {of}, {error:.1f}%."
        )
    if any(p.images_per_s.half_width > MIN_WIDE_SHARE for p in predictions):
        lines.append(
            f"Where an interval is wider than \N{PLUS-MINUS SIGN}{MIN_WIDE_SHARE:.0%}, only the order of "
            "magnitude is known: name a network, calibrate longer, or on a quieter machine."
        )
    if predictions:
        lines.append(
            "Parentheses hold 95% intervals; efficiency is throughput over n times that of one device; "
            "exposed is communication that a step waits for."
        )
    if own.device_type == "cpu":
        if any(one.network_name != MEASURED_NETWORK for one in scenarios):
            lines.append(
                "Assumed: cores move the bytes, so a faster network takes more of them from compute."
            )
        lines.append(f"{CPU_STAND_IN}.")
    return tuple(lines)
