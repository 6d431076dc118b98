"""What a prediction is made from: one workload measured on one machine, as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.results.disk import parse_json
from ddp_bench.bench.scaling.slowest_rank import RankSpread
from ddp_bench.bench.scaling.timeline import Compute, Slowdown
from ddp_bench.bench.settings import IMAGES

CALIBRATION_VERSION = 2
_MOST = 1e12
"""Most bytes, ms or devices that a file may name; more was never measured, and might overflow."""

Samples = tuple[float, ...]
"""One figure per round; the median is the estimate, resampling gives the interval."""

Value = Callable[[Samples], float]
"""Reduces the rounds to one figure: their median, or that of a resample."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One trainable parameter; a calibration lists them in the order in which DDP's reducer has them."""

    name: str
    num_bytes: int
    """Bytes of its gradient."""
    ready_ms: float
    """When its gradient is ready, since the backward began, with no communication beside it; median."""
    kind: str = ""
    """Dtype and device where a model has several: DDP never mixes kinds in a bucket."""


@dataclass(frozen=True, kw_only=True)
class AllReduceTimes:
    """All-reduce by itself over `num_ranks` ranks: (message bytes, ms of each repetition)."""

    num_ranks: int
    backend: str
    points: tuple[tuple[int, Samples], ...]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Workload and machine that were calibrated; a calibration holds for no other."""

    arch: str
    image_size: int | None
    batch_per_device: int
    precision: str
    device_type: str
    device_name: str
    torch: str
    host: str
    """A fingerprint of the machine, such as CPU or GPU model and count; not its name alone."""
    link: str | None = None
    """Rate of the link between a lab's hosts; None on a real network."""
    step: str = ""
    """How a step is computed beside its precision, such as `channels_last, fused optimizer`."""
    unit: str = IMAGES
    units_per_sample: int = 1
    """How many of them a row of the batch holds."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything `predict` needs. Times in ms per micro-batch, of a typical rank, without communication.

    Args:
        parameters: in reducer order.
        backward_ms: the whole backward, at least the last parameter's `ready_ms`.
        optimizer_ms: optimizer step and `zero_grad`.
        compute_slowdown: how many times longer compute takes while an all-reduce is in flight, at least 1.
        comm_slowdown: how many times longer an all-reduce takes while compute runs, at least 1.
        comm_core_share: core time over wall time of all-reduces alone, where threads of a CPU move the bytes.
        copy_ms: to copy and average all gradients once, into their buckets or back.
        residual_ms: what the calibrated step takes beyond the simulated one, whatever the layout; negative
            where it takes less.
        rank_spread: a rank's own step time over the median of all, one figure per rank and step.
        slowest_spread: the longest of the ranks' over it, one figure per round
            (bench/scaling/slowest_rank.py).
        single_step_ms: step of `single`, alone on the machine; empty where it is the compute of a rank.
        model_error_pct: half-width of the model's error on held-out cases; None while unmeasured.
    """

    identity: Identity
    num_ranks: int
    num_nodes: int
    parameters: tuple[Parameter, ...]
    forward_ms: Samples
    backward_ms: Samples
    optimizer_ms: Samples
    data_ms: Samples = (0.0,)
    allreduce: tuple[AllReduceTimes, ...] = ()
    compute_slowdown: Samples = (1.0,)
    comm_slowdown: Samples = (1.0,)
    comm_core_share: Samples = (0.0,)
    copy_ms: Samples = (0.0,)
    residual_ms: Samples = (0.0,)
    rank_spread: Samples = ()
    slowest_spread: Samples = ()
    single_step_ms: Samples = ()
    model_error_pct: float | None = None
    notes: tuple[str, ...] = ()
    scaling: str = "weak"
    """What the calibrated run held fixed: the batch per device, or (`strong`) in all."""

    @property
    def spread(self) -> RankSpread:
        return RankSpread(of_ranks=self.rank_spread, of_slowest=self.slowest_spread, num_ranks=self.num_ranks)

    def compute(self, value: Value = median) -> Compute:
        """What a typical rank does by itself in a step of one micro-batch."""
        return Compute(
            before_ms=value(self.forward_ms) + value(self.data_ms),
            backward_ms=value(self.backward_ms),
            after_ms=value(self.optimizer_ms),
        )

    def slowdown(self, value: Value = median) -> Slowdown:
        """How many times as long compute and communication take beside each other."""
        return Slowdown(compute=value(self.compute_slowdown), comm=value(self.comm_slowdown))

    def __post_init__(self) -> None:
        """Raise UsageError for what no measurement can give; a file may hold anything."""
        for name in _TIMES:
            if not getattr(self, name) or not _within(getattr(self, name), 0.0):
                raise UsageError(f"calibration: {name} needs times of at least 0 ms; calibrate again")
        if not self.residual_ms or not _within(self.residual_ms, -_MOST):
            raise UsageError("calibration: residual_ms needs times; calibrate again")
        for name in ("compute_slowdown", "comm_slowdown"):
            if not getattr(self, name) or not _within(getattr(self, name), 1.0):
                raise UsageError(f"calibration: {name} is below 1; calibrate again")
        sizes = [p.num_bytes for p in self.parameters]
        if not sizes or not _within(sizes, 1) or not _within([p.ready_ms for p in self.parameters], 0.0):
            raise UsageError(
                "calibration: every parameter needs bytes above 0 and a ready time; calibrate again"
            )
        points = [point for times in self.allreduce for point in times.points]
        if not _within([size for size, _ in points], 1) or not all(_within(ms, 0.0) for _, ms in points):
            raise UsageError("calibration: all-reduces need bytes above 0 and times; calibrate again")
        counts = (
            self.identity.batch_per_device,
            self.identity.units_per_sample,
            self.num_ranks,
            self.num_nodes,
        )
        if not _within([*counts, *(times.num_ranks for times in self.allreduce)], 1):
            raise UsageError("calibration: batch, units, ranks and nodes start at 1; calibrate again")
        spread = (*self.rank_spread, *self.slowest_spread)
        shortest = (max(self.forward_ms) + max(self.backward_ms), *self.single_step_ms, *spread)
        if not _within(shortest, 1e-6) or not _within([self.model_error_pct or 0.0], 0.0):
            raise UsageError("calibration: a step, or the spread or error, is impossible; calibrate again")

    def to_json(self) -> str:
        return json.dumps({"schema_version": CALIBRATION_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "calibration.json") -> Calibration:
        """The calibration of that text. Raises UsageError, naming `source`, where it is not one."""
        try:
            data = parse_json(text, source)
            _check_version(data.pop("schema_version"), source)
            return cls(**{f.name: _read(f.name, data[f.name]) for f in fields(cls) if f.name in data})
        except UsageError:
            raise
        except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{source} is not a calibration ({error!r}); calibrate again") from None


_TIMES = ("forward_ms", "backward_ms", "optimizer_ms", "data_ms", "copy_ms", "comm_core_share")


def differences(found: Identity, wanted: Identity) -> list[str]:
    """List how a calibration differs from what it would be used for, one phrase per field."""
    return [
        f"{field.name} {getattr(found, field.name)!r} is not {getattr(wanted, field.name)!r}"
        for field in fields(Identity)
        if getattr(found, field.name) != getattr(wanted, field.name)
    ]


def check_same(found: Identity, wanted: Identity, *, accept: bool = False) -> None:
    """Raise UsageError naming the differences unless there are none or `accept` takes them."""
    found_differences = differences(found, wanted)
    if found_differences and not accept:
        raise UsageError(
            f"the calibration is of something else: {'; '.join(found_differences)}; "
            "calibrate again, or --accept to use it all the same"
        )


def _within(values: Sequence[float], least: float) -> bool:
    return all(least <= value <= _MOST for value in values)


def _check_version(version: object, source: str) -> None:
    if version != CALIBRATION_VERSION:
        raise UsageError(
            f"{source} has schema {version!r}, this version reads {CALIBRATION_VERSION}; calibrate again"
        )


def _read(name: str, value: Any) -> Any:
    if name == "identity":
        return Identity(**value)
    if name == "parameters":
        return tuple(
            Parameter(
                name=str(item["name"]),
                num_bytes=item["num_bytes"],
                ready_ms=item["ready_ms"],
                kind=str(item.get("kind", "")),
            )
            for item in value
        )
    if name == "allreduce":
        return tuple(
            AllReduceTimes(
                num_ranks=item["num_ranks"],
                backend=item["backend"],
                points=tuple((int(size), tuple(map(float, times))) for size, times in item["points"]),
            )
            for item in value
        )
    if name == "notes":
        return tuple(map(str, value))
    if name in ("scaling", "model_error_pct"):
        return None if value is None else {"scaling": str}.get(name, float)(value)
    return int(value) if name in ("num_ranks", "num_nodes") else tuple(map(float, value))
