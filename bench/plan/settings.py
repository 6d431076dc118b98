"""Every setting of a run once, with parser and help; those that cases vary are in `case_settings.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from ..common.errors import UsageError
from ..common.values import (
    make_choice_parser,
    make_csv_parser,
    parse_duration_s,
    parse_fraction,
    parse_option,
    parse_positive_int,
    parse_switch,
    parse_whole_number,
)
from .case_settings import MODE_SETTINGS, STEP_DEFAULTS, STEP_SETTINGS, SWEPT, Value, make_option
from .modes import MODES

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PARAMETER_PRECISIONS = {"fp64": "fp64", "bf16": "pure bf16", "fp16": "pure fp16"}
"""Name of training without autocast, by the type of parameters that are not fp32."""

NCCL_BACKENDS = ("nccl2", "nccl-lazy")
"""Backends over NCCL that torch may have beside `nccl`."""

PASSES = ("no_sync", "comm", "anatomy", "trace")
MARGINS = {"cpu": 0.05, "cuda": 0.01}
"""Default margin by kind of device, a fraction: noise lets a run of minutes resolve no smaller change."""

MAX_TIME_S = {"cpu": 140.0, "cuda": 540.0}
"""Default limit of rounds by kind of device, in seconds."""

RACE_S = 130.0
"""Default limit of rounds of a race, in seconds."""

MIN_BLOCK_S = 1.0
"""Seconds of a block on a GPU: its clock and its queue are the same throughout most of it."""

MAX_DEVICES = 4096
"""Largest device count of a case or a prediction: a slip of the keyboard ends here."""

IMAGES = "images"
"""Unit of throughput of image models."""

MAX_UNITS = 10**9
"""Units in a sample; more would be a mistake, and products of counts stay exact."""


SWITCHES = [name for name, default in STEP_DEFAULTS.items() if isinstance(default, bool)]
"""Step settings of which a run takes one value."""

AXES = (*SWEPT, *STEP_DEFAULTS)
"""Settings of cases."""


def _parse_ascending(text: str) -> tuple[int, ...]:
    """Parse whole numbers, the smallest first: others are compared with that, which fits if any does."""
    return tuple(sorted(make_csv_parser(parse_positive_int)(text)))


def _make_choice(default: str | None, names: Sequence[str], meaning: str) -> Any:
    return make_option(default, make_choice_parser(names), meaning, "|".join(names))


def _make_switch(meaning: str, *, default: bool | None = False) -> Any:
    return make_option(default, parse_switch, meaning, "on|off")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run as asked for. None means "by device" or "by workload": see `ResolvedSettings`."""

    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Values to measure of each setting of cases; those of `StepSettings` only where they are given."""

    modes: tuple[str, ...] = make_option(
        ("dp", "ddp"),
        make_csv_parser(make_choice_parser(MODES)),
        f"besides single (one device): {', '.join(MODES[1:])} (docs/forms.md)",
        "MODE,…",
    )
    gpus: tuple[int, ...] | None = make_option(
        None,
        make_csv_parser(parse_positive_int),
        "device counts; CUDA_VISIBLE_DEVICES chooses GPUs; CPU cores without GPUs (default: 1, 2, 4 … all)",
        "N,…",
    )
    arch: str | None = make_option(
        None, str, "built-in model, resnet20 to resnet152 (default: CPU resnet18, GPU resnet50)", "NAME"
    )
    workload: str | None = make_option(
        None,
        str,
        "your model: a function returning an nn.Module for images, else a Workload (docs/own-model.md)",
        "package.module:name",
    )
    batch_size: tuple[int, ...] | None = make_option(
        None, _parse_ascending, "samples per device (default: CPU 16, GPU 32 to 256)", "N,…"
    )
    image_size: int | None = make_option(
        None, parse_positive_int, "pixels of a side (default: CPU 32, GPU 224)", "N"
    )
    data: str = make_option(
        "device",
        str,
        "batches: synthetic on the device, on the host, or a folder of images",
        "device|host|DIR",
    )
    data_workers: int = make_option(2, parse_whole_number, "loader processes per rank, with a folder", "N")
    scaling: str = _make_choice("weak", ("weak", "strong"), "what stays fixed: batch per device, or in all")
    precision: str | None = _make_choice(
        None, PRECISIONS, "arithmetic (default: CPU fp32, GPU bf16 if it can)"
    )
    device: str = _make_choice("auto", ("auto", "cpu", "cuda"), "where to train")
    backend: str = make_option(
        "auto",
        make_choice_parser(("auto", "nccl", *NCCL_BACKENDS, "gloo")),
        "gradient process group; nccl2 and nccl-lazy take torch ≥ 2.14",
        "auto|nccl|gloo|…",
    )
    numa_bind: bool = _make_switch("keep each rank on the CPU cores of its GPU's NUMA node", default=True)
    share_gpus: bool = _make_switch("more ranks than GPUs: shows that it works, not speed")
    rounds: int | None = make_option(
        None, parse_positive_int, "measure each case N times (default: enough to compare, or as fit)", "N"
    )
    precision_target: float | None = make_option(
        None,
        parse_fraction,
        "stop when every throughput is known to ± this (default: when comparisons are, to half the margin)",
        "2%",
    )
    margin: float | None = make_option(
        None, parse_fraction, "treat smaller differences as equal (default: CPU 5%%, GPU 1%%)", "5%"
    )
    max_time: float | None = make_option(
        None,
        parse_duration_s,
        "limit of the rounds (90s, 2h), of all attempts with --resume; start-up and proofs of correctness "
        "take time besides "
        f"(default: CPU {MAX_TIME_S['cpu']:g}s, GPU {MAX_TIME_S['cuda'] / 60:g}m)",
        "10m",
    )
    race: bool = _make_switch(
        f"drop the slowest cases one after another: more rounds for the others, in {RACE_S:g}s"
    )
    case_timeout: float | None = make_option(
        None, parse_duration_s, "give up a case that hangs this long (default: 20 times the usual)", "60s"
    )
    steps: int | None = make_option(
        None, parse_positive_int, "steps per block (default: CPU 1, GPU as many as take 1 s)", "N"
    )
    trace: bool = _make_switch("keep a Chrome trace per case and rank")
    telemetry: bool = _make_switch(
        "sample clocks, power and temperature of the GPUs in timed blocks", default=True
    )
    allreduce_curve: bool = _make_switch("also time the all-reduce by itself over message sizes")
    calibrate: bool | None = _make_switch(
        "also measure what predictions and tuning need: calibration.json (default: of DDP on one GPU alone)",
        default=None,
    )
    passes: tuple[str, ...] = make_option(
        PASSES,
        make_csv_parser(make_choice_parser((*PASSES, "none"))),
        f"what to measure besides throughput: {', '.join(PASSES)}, or none",
        "PASS,…",
    )
    sweep: str = _make_choice(
        "grid",
        ("grid", "star"),
        "DDP settings: every combination, or one varied at a time from the first of each",
    )
    seed: int = make_option(0, parse_whole_number, "seed of weights, batches and order", "N")
    name: str = make_option("run", str, "label in the results folder's name", "NAME")
    preset: str | None = None
    """Name of the preset that gave the values."""
    caps_given: bool = False
    """True where anyone but the default chose `bucket_cap_mb`."""
    least_block_s: float | None = None
    """Least seconds of a block, where `steps` leaves it open."""
    out: str | None = make_option(None, str, "results folder (default: results/<time>-<host>-<name>)", "DIR")

    def __post_init__(self) -> None:
        """Add the default sweep, and reject what no machine could run."""
        object.__setattr__(self, "axes", SWEPT | dict(self.axes))
        if self.arch is not None and self.workload is not None:
            raise UsageError("--arch and --workload exclude each other; give one")
        if self.workload == "" or self.out == "":
            empty = "workload" if self.workload == "" else "out"
            raise UsageError(f"--{empty} is empty; name one, or leave the option out")
        if "none" in self.passes and len(self.passes) > 1:
            raise UsageError("--passes none stands alone; leave none out, or the other passes")
        if max(self.gpus or (1,)) > MAX_DEVICES:
            raise UsageError(f"--gpus {max(self.gpus or (1,))} is more than {MAX_DEVICES} devices")
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name):
            raise UsageError(f"--name {self.name!r} may hold only letters, digits, '-', '_' and '.'")

    def get_first(self, axis: str) -> Any:
        """Return the value with which a sweep begins; of a step setting that is a switch, the only one."""
        return self.axes[axis][0]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Settings:
        """From parsed values by name, those of axes among them."""
        axes = {name: value for name, value in values.items() if name in AXES}
        return cls(axes=axes, **{name: value for name, value in values.items() if name not in axes})

    def stored(self) -> dict[str, Any]:
        """Return the settings by name as manifest.json holds them; those of a single value without a list."""
        given: dict[str, Any] = {name: self.axes.get(name) for name in AXES}
        given |= {f.name: getattr(self, f.name) for f in fields(self) if f.name != "axes"}
        one = (*SWITCHES, *(["batch_size"] if len(self.batch_size or ()) == 1 else []))
        return given | {name: given[name][0] for name in one if given[name]}

    @classmethod
    def from_stored(cls, values: Mapping[str, Any]) -> Settings:
        """Return the settings that a manifest holds. Raises UsageError for a value that no option gives."""
        parsers: dict[str, Any] = {"preset": str, "caps_given": parse_switch, "least_block_s": float}
        parsers |= {option.name: option.metadata["parse"] for option in list_options()}
        found: dict[str, Any] = {}
        for name, value in values.items():
            if name not in parsers:
                raise UsageError(f"another version of ddp-bench has set {name}; use that one")
            if value is not None:
                found[name] = parse_option(name, parsers[name], format_stored(value, parsers[name]))
        return cls.from_values(found)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(Settings):
    """Settings of a run on a kind of device that is known: nothing is open that the device decides."""

    gpus: tuple[int, ...] = field()
    batch_size: tuple[int, ...] = field()
    precision: str = field()
    steps: int = field()
    """Least steps of a block."""
    margin: float = field()
    calibrate: bool = field()
    least_block_s: float = field()

    def count_steps_per_block(self, step_s: float) -> int:
        """Count steps of a timed block of a case whose step takes so many seconds.

        With a folder each loader process gives as many of their batches: those of all may come together.
        """
        steps = max(self.steps, math.ceil(self.least_block_s / step_s) if step_s > 0 else 1)
        from_loaders = self.data not in ("device", "host") and self.data_workers > 0
        return steps + -steps % self.data_workers if from_loaders else steps


def list_options() -> list[Field[Any]]:
    """List the settings that a user can give, with what `make_option` knows of each.

    In the order in which commands repeat them: what is trained, how a step is computed, the axes, the rest.
    """
    own = [f for f in fields(Settings) if "parse" in f.metadata]
    rest = [f.name for f in own].index("device")
    return [*own[:rest], *STEP_SETTINGS, *MODE_SETTINGS, *own[rest:]]


def format_stored(raw: Any, parse: object) -> str:
    """Format a stored value as its option takes it: durations are stored in seconds."""
    return format_value(raw) + ("s" if parse is parse_duration_s and isinstance(raw, int | float) else "")


def format_value(raw: Any) -> str:
    """Format a value as its option takes it."""
    if isinstance(raw, bool):
        return "on" if raw else "off"
    if isinstance(raw, list | tuple):
        return ",".join(format_value(item) for item in raw)
    if isinstance(raw, float):
        return f"{raw:.15f}".rstrip("0").rstrip(".")  # 1e-05 is no option's number
    return str(raw)
