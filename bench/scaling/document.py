"""Predictions as a document, `predictions.json`: what `bench.predict` writes and the report draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.cli import to_json
from bench.errors import UsageError
from bench.results.disk import parse_json
from bench.scaling.calibration import Identity
from bench.scaling.predict import Prediction
from bench.scaling.scaling_limit import Curve
from bench.scaling.validate import HeldOut
from bench.stats import Interval

DOCUMENT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One prediction of a line, `asked` for by the user or made to draw the line. Intervals are of 95%."""

    num_devices: int
    asked: bool
    step_ms: Interval
    images_per_s: Interval
    efficiency: Interval
    exposed_comm_ms: Interval
    wait_ms: float
    num_buckets: int


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
            _check_version(data["schema_version"])
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
        marks=tuple(
            Mark(
                num_devices=p.scenario.num_devices,
                asked=p.scenario.num_devices in counts,
                step_ms=p.step_ms,
                images_per_s=p.images_per_s,
                efficiency=p.efficiency,
                exposed_comm_ms=p.exposed_comm_ms,
                wait_ms=p.wait_ms,
                num_buckets=p.num_buckets,
            )
            for p in curve.predictions
        ),
    )


def _check_version(version: object) -> None:
    if version != DOCUMENT_VERSION:
        raise ValueError(f"schema {version!r}, this version reads {DOCUMENT_VERSION}")


def _line(data: Mapping[str, Any]) -> Line:
    marks = tuple(map(_mark, data["marks"]))
    if not marks or data["broken_at"] not in (None, *(mark.num_devices for mark in marks)):
        raise ValueError("a line has no marks, or breaks where it has none")
    return Line(
        marks=marks,
        broken_at=data["broken_at"],
        batch_size=int(data["batch_size"]),
        accumulate=int(data["accumulate"]),
        **{name: str(data[name]) for name in ("network", "bucket_cap_mb", "scaling", "comm_hook", "verdict")},
    )


_INTERVALS = ("step_ms", "images_per_s", "efficiency", "exposed_comm_ms")


def _mark(data: Mapping[str, Any]) -> Mark:
    found = Mark(
        num_devices=int(data["num_devices"]),
        asked=bool(data["asked"]),
        wait_ms=float(data["wait_ms"]),
        num_buckets=int(data["num_buckets"]),
        **{name: _interval(data[name]) for name in _INTERVALS},
    )
    if found.num_devices < 1 or min(found.step_ms.low, found.images_per_s.low, found.efficiency.low) <= 0:
        raise ValueError(f"a prediction for {found.num_devices} devices is not above 0")
    return found


def _held_out(data: Mapping[str, Any]) -> HeldOut:
    return HeldOut(
        case_id=str(data["case_id"]),
        num_devices=int(data["num_devices"]),
        bucket_cap_mb=str(data["bucket_cap_mb"]),
        measured_ms=_positive(data["measured_ms"]),
        predicted_ms=_interval(data["predicted_ms"]),
        network=str(data.get("network", "")),
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
