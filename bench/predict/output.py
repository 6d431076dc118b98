"""Writes predictions as tables, and as the JSON document that the report draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from ..common.numbers import per_second, plural, short, with_interval
from ..common.text import to_json
from ..findings.wording import CPU_STAND_IN, cap_label, device_noun
from ..page.page import Card, Heading, Page, Table
from .calibration import Calibration, Identity, record_of
from .prediction import OWN, Prediction, Scenario
from .runs import HeldOut, error_sizes

VERSION = 5

LEAST_EFFICIENCY = 0.8
"""Efficiency below which the first prediction is named."""

WIDE = 0.5
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
        answers = {"answers": [f"On {of}: {said}" for of, said in self.answers()]}
        return to_json({"schema_version": VERSION, **answers, **asdict(self), "validation": errors})

    @classmethod
    def from_json(cls, content: str | bytes, *, source: str = "predictions.json") -> Predictions:
        """Read the document from that text. Raises UsageError, naming `source`, where it is not one."""
        return record_of(cls, content, VERSION, source=source, mend="predict")

    def __post_init__(self) -> None:
        above_0 = [f for p in self.predictions for f in (p.step_ms, p.images_per_s, p.efficiency)]
        above_0 += [case.predicted_ms for case in self.validation]
        for figure in (*above_0, *(p.exposed_comm_ms.plus(1e-9) for p in self.predictions)):
            if not 0 < figure.low <= figure.estimate <= figure.high < 1e15:
                raise ValueError(f"an interval of {figure}")

    def lines(self) -> list[list[Prediction]]:
        """Group them by network and cap: lines from few devices to many."""
        found: dict[tuple[str, str], list[Prediction]] = {}
        for p in sorted(self.predictions, key=lambda p: p.num_devices):
            found.setdefault((p.network, p.bucket_cap_mb), []).append(p)
        return list(found.values())

    def answers(self) -> list[tuple[str, str]]:
        """Say of every line what it is of, and how far it scales."""
        noun = device_noun(self.identity.device_type)
        said = []
        for line in self.lines():
            last = line[-1]
            if last.num_devices == 1:
                continue
            faster = with_interval(last.efficiency.scaled(last.num_devices))
            found = f"{plural(last.num_devices, noun)} train {faster} times as fast as one"
            below = next((p for p in line if p.efficiency.estimate < LEAST_EFFICIENCY), None)
            if below is not None:
                at = plural(below.num_devices, noun)
                found += f"; of what was asked, efficiency is first below {LEAST_EFFICIENCY:.0%} on {at}"
            said.append((f"{last.network}, bucket cap {cap_label(last.bucket_cap_mb)}", f"{found}."))
        return said

    def tables(self) -> list[Table]:
        """Tabulate the predictions, then the errors on held-out cases."""
        made, shown = [], [p for line in self.lines() for p in line]
        if shown:
            batch = (
                f"batch {shown[0].batch_size} {'in all' if shown[0].scaling == 'strong' else 'per device'}"
            )
            made.append(_table(f"Predictions, {batch}", "", [_row(p, self.identity.unit) for p in shown]))
        if self.validation:
            sizes, most = error_sizes(self.validation), max(case.num_devices for case in self.validation)
            included = "; intervals include it" if self.predictions else ""
            said = (
                f"Error on {len(sizes)} held-out cases: {median(sizes):.1f}% at the median, "
                f"{max(sizes):.1f}% at the largest{included}. No case has more than {most} devices: beyond, "
                "the error was not measured."
            )
            made.append(
                _table("Error of the predictions", _ERROR, [_error(c) for c in self.validation], said)
            )
        return made

    def page(self) -> Page:
        """Make the page of predictions by themselves."""
        cards = [Card(of, "found", "", said) for of, said in self.answers()]
        return Page(title="Predictions", cards=cards, tables=self.tables(), notes=self.notes)


def _row(p: Prediction, unit: str) -> dict[Heading, str]:
    rate = Heading(f"Throughput ({per_second(unit)})", "number", drop=1)
    return {
        _NETWORK: p.network,
        _CAP: cap_label(p.bucket_cap_mb),
        Heading("Devices", "number"): f"{p.num_devices:,}",
        Heading("Step (ms)", "number", drop=2): with_interval(p.step_ms, digits=4),
        rate: with_interval(p.images_per_s, digits=4),
        Heading("Efficiency (%)", "number"): with_interval(p.efficiency, factor=100, digits=4),
        Heading("Exposed (ms)", "number", drop=3): with_interval(p.exposed_comm_ms, digits=4),
    }


def _error(case: HeldOut) -> dict[Heading, str]:
    return {
        _LINK: case.network,
        Heading("Case"): case.case_id,
        Heading("Measured (ms)", "number"): short(case.measured_ms),
        Heading("Predicted (ms)", "number"): with_interval(case.predicted_ms, digits=4),
        Heading("Error (%)", "number"): f"{case.error_pct:+.1f}",
    }


def _table(title: str, note: str, rows: Sequence[dict[Heading, str]], *below: str) -> Table:
    """Make a table of rows, without what all of them have in common and stands elsewhere."""
    common = {name for name in (_NETWORK, _CAP, _LINK) if len({row.get(name) for row in rows}) == 1}
    names = tuple(name for name in rows[0] if name not in common)
    return Table(title, note, names, tuple(tuple(row[name] for name in names) for row in rows), below)


def notes(
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
    if any(p.images_per_s.half_width > WIDE for p in predictions):
        lines.append(
            f"Where an interval is wider than \N{PLUS-MINUS SIGN}{WIDE:.0%}, only the order of magnitude is "
            "known: name a network, calibrate longer, or on a quieter machine."
        )
    if predictions:
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
