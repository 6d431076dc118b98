"""calibration.json: what a prediction is made from, one workload measured on one machine."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..common.cli import get_message_prefix
from ..common.errors import UsageError
from ..plan.settings import IMAGES
from ..results.disk import MAX_TABLE_BYTES, parse_json, read_text, replace_file
from ..results.run_folder import CALIBRATION
from ..results.store import read_manifest
from .allreduce import AllReduceTimes, CostCurve, Count, Ms, make_curve
from .timeline import Compute, Slowdown

T = TypeVar("T")

VERSION = 3

Times: TypeAlias = Annotated[tuple[Ms, ...], Meta(min_length=1)]
Factors: TypeAlias = Annotated[tuple[Annotated[float, Meta(ge=1, le=1e12)], ...], Meta(min_length=1)]
Positive: TypeAlias = tuple[Annotated[float, Meta(ge=1e-6, le=1e12)], ...]
Differences: TypeAlias = Annotated[tuple[Annotated[float, Meta(ge=-1e12, le=1e12)], ...], Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One trainable parameter; a calibration lists them in the order in which DDP's reducer has them."""

    name: str
    num_bytes: Count
    """Bytes of its gradient."""
    ready_ms: Ms
    """Milliseconds from the backward's start to its gradient, with no communication beside it; median."""
    kind: str = ""
    """Dtype and device where a model has several: DDP never mixes kinds in a bucket."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Workload and machine that were calibrated; a calibration holds for no other."""

    arch: str
    image_size: int | None
    batch_per_device: Count
    precision: str = ""
    device_type: str
    device_name: str
    torch: str = ""
    host: str = ""
    """A fingerprint of the machine, such as CPU or GPU model and count; not its name alone."""
    link: str | None = None
    """Rate of the link between a lab's hosts; None on a real network."""
    step: str = ""
    """Settings of a step beside its precision, such as `channels_last, fused optimizer`."""
    unit: str = IMAGES
    units_per_sample: Count = 1
    """Units in a row of the batch."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything a prediction needs. Times in ms per micro-batch, of the slowest rank, by itself."""

    identity: Identity
    num_ranks: Count
    parameters: Annotated[tuple[Parameter, ...], Meta(min_length=1)]
    """Parameters in reducer order."""
    forward_ms: Times
    backward_ms: Times
    """At least the last parameter's `ready_ms`."""
    optimizer_ms: Times
    """Milliseconds of the optimizer with `zero_grad`."""
    data_ms: Times = (0.0,)
    allreduce: Annotated[tuple[AllReduceTimes, ...], Meta(max_length=1)] = ()
    compute_slowdown: Factors = (1.0,)
    """Factors by which compute takes longer while an all-reduce is in flight."""
    comm_slowdown: Factors = (1.0,)
    """The same of an all-reduce while compute runs."""
    comm_core_share: Times = (0.0,)
    """Core time over wall time of all-reduces alone, where threads of a CPU move the bytes."""
    copy_ms: Times = (0.0,)
    """To copy and average all gradients once, into their buckets or back."""
    residual_ms: Differences = (0.0,)
    """Milliseconds of the calibrated step beyond the simulated one, whatever the layout; may be negative."""
    fitted: str = ""
    """Id of the case whose step the residual is of."""
    single_step_ms: Positive = ()
    """Milliseconds of `single`, alone on the machine; empty where it is the compute of a rank."""
    model_error_pct: Ms | None = None
    """Half-width of the model's error on held-out cases; None while unmeasured."""
    notes: tuple[str, ...] = ()
    scaling: Literal["weak", "strong"] = "weak"
    """The batch that the calibrated run held fixed: per device, or in all."""

    def __post_init__(self) -> None:
        if max(self.forward_ms) + max(self.backward_ms) < 1e-6:
            raise ValueError("forward and backward take no time")

    def compute(self) -> Compute:
        """Return the time of the slowest rank by itself in a step of one micro-batch."""
        return Compute(
            before_ms=median(self.forward_ms) + median(self.data_ms),
            backward_ms=median(self.backward_ms),
            after_ms=median(self.optimizer_ms),
        )

    def make_curve(self) -> CostCurve:
        """Make an all-reduce among the calibrated ranks; without points for one."""
        return make_curve(point for times in self.allreduce for point in times.points)

    def get_slowdown(self) -> Slowdown:
        return Slowdown(compute=median(self.compute_slowdown), comm=median(self.comm_slowdown))

    def to_json(self) -> str:
        return json.dumps({"schema_version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = CALIBRATION) -> Calibration:
        """Return the calibration of that text. Raises UsageError, naming `source`, where it is not one."""
        return read_record(cls, text, VERSION, source=source, mend="calibrate")


def read_record(cls: type[T], content: str | bytes, version: int, *, source: str, mend: str) -> T:
    """Read a record from a file's text. Raises UsageError, naming `source`, where it is not one."""
    data = parse_json(content, source)
    try:
        if isinstance(data, dict) and (found := data.get("schema_version")) != version:
            raise ValueError(f"schema {found!r}, this version reads {version}")
        return msgspec.convert(data, cls)
    except (ValueError, OverflowError, RecursionError) as error:
        what = cls.__name__.lower()
        raise UsageError(f"{source} holds no {what} ({error}); {mend} again") from None


def load_calibration(folder: Path) -> Calibration:
    """Read `calibration.json` of a results folder. Raises UsageError where there is none to be read."""
    path = folder / CALIBRATION
    if is_watched(folder):
        raise UsageError(
            f"{folder} is a watched training: its probes time all buckets together, not an all-reduce by its "
            f"size; name a network, or a run with {get_message_prefix('run')} --calibrate"
        )
    if not os.path.lexists(path):
        raise UsageError(
            f"{folder} has no {CALIBRATION}; measure a run with {get_message_prefix('run')} --calibrate"
        )
    return Calibration.from_json(read_text(path, most_bytes=MAX_TABLE_BYTES), source=str(path))


def is_watched(folder: Path) -> bool:
    """Tell whether a folder holds a training that was watched."""
    with contextlib.suppress(UsageError):
        return read_manifest(folder).watched is not None
    return False


def save_calibration(folder: Path, calibration: Calibration) -> None:
    """Put `calibration.json` into a results folder."""
    text = calibration.to_json()
    replace_file(folder / CALIBRATION, lambda file: file.write_text(text, encoding="utf-8"))


def list_differences(found: Identity, wanted: Identity) -> list[str]:
    """List how a calibration differs from what it would be used for, one phrase per field."""
    pairs = (
        (field.name, getattr(found, field.name), getattr(wanted, field.name)) for field in fields(Identity)
    )
    return [f"{name} {one!r} is not {other!r}" for name, one, other in pairs if one != other]


def check_same(found: Identity, wanted: Identity, *, accept: bool) -> None:
    """Raise UsageError naming the differences unless there are none or `accept` takes them."""
    if not accept and (unlike := list_differences(found, wanted)):
        raise UsageError(
            f"the calibration is of something else: {'; '.join(unlike)}; "
            "calibrate again, or --accept to use it all the same"
        )
