"""Predictions as a document, `predictions.json`: what `bench.predict` writes and the report draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp_bench.bench.cli import to_json
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.results.disk import parse_json
from ddp_bench.bench.scaling.calibration import Identity
from ddp_bench.bench.scaling.predict import Prediction
from ddp_bench.bench.scaling.scaling_limit import Curve
from ddp_bench.bench.scaling.validate import HeldOut
from ddp_bench.bench.stats import Interval

DOCUMENT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One prediction of a line, `asked` for by the user or made to draw the line. Intervals are of 95%.

    Where `reason` says why it is refused, it has no figures. Exposed communication may be missing alone.
    """

    num_devices: int
    asked: bool
    step_ms: Interval | None
    images_per_s: Interval | None
    efficiency: Interval | None
    exposed_comm_ms: Interval | None
    wait_ms: float | None
    num_buckets: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Predictions that differ in devices alone; `verdict` says where scaling breaks and what breaks it."""

    network: str
    bucket_cap_mb: str
    scaling: str
    batch_size: int
    """Per device (weak) or global (strong)."""
    comm_hook: str
    accumulate: int
    broken_at: int | None
    verdict: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What was calibrated, on which case, the predictions, and their errors on held-out cases."""

    identity: Identity
    fitted: str | None
    rule: str
    notes: tuple[str, ...]
    lines: tuple[Line, ...]
    validation: tuple[HeldOut, ...] | None

    def to_json(self, **more: Any) -> str:
        """Write the text of `predictions.json`; `more` goes into it unread. What is not known is null."""
        whole = {"schema_version": DOCUMENT_VERSION, **asdict(self), **more}
        if self.validation is not None:
            errors = [case.error_pct for case in self.validation]
            whole["validation"] = [
                {**asdict(case), "error_pct": error}
                for case, error in zip(self.validation, errors, strict=True)
            ]
        return to_json(whole) + "\n"

    @classmethod
    def from_json(cls, content: str | bytes, *, source: str = "predictions.json") -> Predictions:
        """Read the document from that text. Raises UsageError, naming `source`, where it is not one."""
        data = parse_json(content, source)
        try:
            if (version := data["schema_version"]) != DOCUMENT_VERSION:
                raise ValueError(f"schema {version!r}, this version reads {DOCUMENT_VERSION}")
            checked = data["validation"]
            return cls(
                identity=Identity(**data["identity"]),
                fitted=data["fitted"],
                rule=str(data["rule"]),
                notes=tuple(map(str, data["notes"])),
                lines=tuple(map(_line, data["lines"])),
                validation=None if checked is None else tuple(map(_held_out, checked)),
            )
        except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{source} holds no predictions ({error!r}); predict again") from None


def line(curve: Curve, *, network: str, batch_size: int, verdict: str, asked: Sequence[Prediction]) -> Line:
    """Make one line of the document; `asked` are those of its predictions that were asked for."""
    scenario = asked[0].scenario
    counts = {p.scenario.num_devices for p in asked}
    return Line(
        network=network,
        bucket_cap_mb=str(scenario.bucket_cap_mb),
        scaling=scenario.scaling,
        batch_size=batch_size,
        comm_hook=scenario.comm_hook,
        accumulate=scenario.accumulate,
        broken_at=None if curve.broken is None else curve.broken.scenario.num_devices,
        verdict=verdict,
        marks=tuple(_mark_of(p, asked=p.scenario.num_devices in counts) for p in curve.predictions),
    )


def _mark_of(p: Prediction, *, asked: bool) -> Mark:
    shown = not p.reason
    return Mark(
        num_devices=p.scenario.num_devices,
        asked=asked,
        step_ms=p.step_ms if shown else None,
        images_per_s=p.images_per_s if shown else None,
        efficiency=p.efficiency if shown else None,
        exposed_comm_ms=p.shown_exposed_ms if shown else None,
        wait_ms=p.wait_ms if shown else None,
        num_buckets=p.num_buckets,
        reason=p.reason,
    )


def _line(data: Mapping[str, Any]) -> Line:
    marks = tuple(map(_mark, data["marks"]))
    if not marks or data["broken_at"] not in (None, *(mark.num_devices for mark in marks)):
        raise ValueError("a line has no marks, or breaks where it has none")
    names = ("network", "bucket_cap_mb", "scaling", "comm_hook", "verdict")
    return Line(
        marks=marks,
        broken_at=data["broken_at"],
        batch_size=int(data["batch_size"]),
        accumulate=int(data["accumulate"]),
        **{name: str(data[name]) for name in names},
    )


_INTERVALS = ("step_ms", "images_per_s", "efficiency", "exposed_comm_ms")


def _mark(data: Mapping[str, Any]) -> Mark:
    figures = {name: None if data[name] is None else _interval(data[name]) for name in _INTERVALS}
    found = Mark(
        num_devices=int(data["num_devices"]),
        asked=bool(data["asked"]),
        wait_ms=None if data["wait_ms"] is None else float(data["wait_ms"]),
        num_buckets=int(data["num_buckets"]),
        reason=str(data.get("reason", "")),
        **figures,
    )
    whole = [figures[name] for name in _INTERVALS[:3]]
    known = [figure for figure in whole if figure is not None]
    if found.num_devices < 1 or any(figure.low <= 0 for figure in known):
        raise ValueError(f"a prediction for {found.num_devices} devices is not above 0")
    if not found.reason and len(known) < len(whole):
        raise ValueError(f"a prediction for {found.num_devices} devices has neither figures nor a reason")
    if found.reason and known:
        raise ValueError(f"a prediction for {found.num_devices} devices has figures and a reason for none")
    return found


def _held_out(data: Mapping[str, Any]) -> HeldOut:
    predicted = None if data["predicted_ms"] is None else _interval(data["predicted_ms"])
    reason = str(data.get("reason", ""))
    if predicted is None and not reason:
        raise ValueError("a held-out case has neither a prediction nor a reason")
    return HeldOut(
        case_id=str(data["case_id"]),
        num_devices=int(data["num_devices"]),
        bucket_cap_mb=str(data["bucket_cap_mb"]),
        measured_ms=_positive(data["measured_ms"]),
        predicted_ms=predicted,
        network=str(data.get("network", "")),
        reason=reason,
    )


def _positive(value: object) -> float:
    found = float(str(value))
    if not 0 < found < math.inf:
        raise ValueError(f"a step of {found} ms")
    return found


def _interval(data: Mapping[str, Any]) -> Interval:
    found = Interval(*(float(data[name]) for name in ("estimate", "low", "high")))
    if not 0 <= found.low <= found.estimate <= found.high < 1e15:
        raise ValueError(f"an interval of {found}")
    return found
