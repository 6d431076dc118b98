"""From what a user gives to the settings of a run, layers of text and the device's defaults, and back."""

from __future__ import annotations

import math
import stat
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import UsageError
from ..common.values import parse_option, suggest_known
from .case_settings import STEP_DEFAULTS
from .modes import SPECS
from .settings import (
    MARGINS,
    MAX_TIME_S,
    MIN_BLOCK_S,
    RACE_S,
    ResolvedSettings,
    Settings,
    format_stored,
    format_value,
    list_options,
)

MAX_TOML_BYTES = 2**20

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"arch": "resnet20", "batch_size": 32, "max_time": "30s", "bucket_cap_mb": "default,0.25"},
    "ddp-paper": {
        "modes": "ddp",
        "sweep": "star",
        "bucket_cap_mb": "default,0,1,5,10,25,50,100",
        "accumulate": "1,2,4,8",
        "max_time": "8m",
    },
    "tune": {
        "modes": "ddp",
        "sweep": "star",
        "race": True,
        "bucket_cap_mb": "default,1,5,10,25,100",
        "passes": "none",
        "margin": "1%",
        "name": "tune",
    },
    "gate": {"bucket_cap_mb": "default", "passes": "none", "rounds": "20"},
    "full": {"precision_target": "1%", "max_time": "30m", "bucket_cap_mb": "default,1,5,10,25,50,100"},
}

RACE_DEFAULTS = {"gpus": "all", "max_time": f"{RACE_S:g}s"}
"""Defaults of a race that `fill_device_defaults` decides, as `--help` names them."""


def resolve(
    command_line: Mapping[str, Any], *, preset: str | None = None, config: Path | None = None
) -> Settings:
    """Resolve settings from all layers; `command_line` maps field names to text.

    Defaults, then the preset, then the TOML file, then the command line; later layers win.

    Raises UsageError that names the layer, the key and the fix.
    """
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}; {suggest_known(preset, PRESETS)}")
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if preset is not None:
        layers.append((f"preset {preset}: ", PRESETS[preset]))
    if config is not None:
        layers.append((f"{config}: ", read_toml(config)))
    layers.append(("", command_line))
    known = {option.name: option for option in list_options()}
    values: dict[str, Any] = {}
    for where, layer in layers:
        for raw_key, raw in layer.items():
            key = raw_key.replace("-", "_")
            if key not in known:
                raise UsageError(f"{where}unknown key {raw_key!r}; {suggest_known(key, known)}")
            values[key] = parse_option(key, known[key].metadata["parse"], format_value(raw), where=where)
        if "workload" in layer and "arch" not in layer:
            values.pop("arch", None)
    return Settings.from_values(values | {"preset": preset, "caps_given": "bucket_cap_mb" in values})


def read_toml(path: Path) -> dict[str, Any]:
    """Read a `--config` file as a dictionary. Raises UsageError where it cannot be read or is no TOML."""
    try:
        found = path.stat()
        is_usual = stat.S_ISREG(found.st_mode) and found.st_size <= MAX_TOML_BYTES
        content = path.read_bytes() if is_usual else b""  # a pipe would hold the command up for ever
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise UsageError(f"--config {path}: {why}; name a readable TOML file") from None
    if not is_usual:
        raise UsageError(
            f"--config {path} is no regular file of at most {MAX_TOML_BYTES} bytes; name another"
        )
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {path} is not valid TOML: {error}") from None


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """The GPU that the defaults of a run follow from: the least of those that are visible."""

    capability: tuple[int, int]
    """CUDA compute capability, such as (9, 0)."""
    memory_gib: float


BATCH_BY_MEMORY = ((60.0, 256), (30.0, 128), (14.0, 64), (0.0, 32))
"""GiB of a GPU from which on so many images are the default: ResNet-50 at 224 pixels takes 45 MB for each in
bf16, and twice that in fp32, beside a dozen cases of 0.4 GB that stay in memory."""


def fill_device_defaults(
    settings: Settings, *, device_type: str, num_local_devices: int, gpu: GpuKind | None = None
) -> ResolvedSettings:
    """Fill what depends on the device: a CPU gets minutes of ResNet-18, a GPU a ResNet-50 as it is trained.

    On a `gpu` of compute capability 8 and newer that is bf16, channels_last, a fused optimizer and a batch by
    memory; on older ones fp16, or fp32 where there are no tensor cores (below 7).
    """
    on_cpu = device_type == "cpu"
    arch = settings.arch
    if arch is None and settings.workload is None:
        arch = "resnet18" if on_cpu else "resnet50"
    counts = settings.gpus or _list_counts(num_local_devices, with_all=not on_cpu or settings.race)
    # A race is for one number of devices: what is best for two may not be for eight.
    counts = counts[-1:] if settings.race and not settings.gpus else counts
    precision = settings.precision or ("fp32" if gpu is None else _choose_precision(gpu))
    calibrate = (
        not on_cpu
        and counts == (1,)
        and "ddp" in settings.modes
        and not settings.share_gpus
        and "powersgd" not in settings.axes["comm_hook"]
    )
    fused = (
        gpu is not None
        and precision != "fp16"
        and not any(SPECS[mode].is_composable for mode in settings.modes)
    )
    step = STEP_DEFAULTS | {"channels_last": gpu is not None, "fused_optimizer": fused}
    usual_s = RACE_S if settings.race else MAX_TIME_S[device_type]
    decided = {
        "precision": precision,
        "margin": settings.margin or MARGINS[device_type],
        "calibrate": calibrate if settings.calibrate is None else settings.calibrate,
        "axes": {name: (value,) for name, value in step.items()} | dict(settings.axes),
        "device": device_type,
        "backend": ("gloo" if on_cpu else "nccl") if settings.backend == "auto" else settings.backend,
        "gpus": counts,
        "arch": arch,
        "image_size": settings.image_size or choose_image_size(arch or "", device_type),
        "batch_size": settings.batch_size or (_choose_batch_size(settings, counts, gpu),),
        "max_time": settings.max_time or (None if settings.rounds else usual_s),
        "steps": settings.steps or 1,
    }
    if settings.least_block_s is None:
        decided["least_block_s"] = 0.0 if on_cpu or settings.steps else MIN_BLOCK_S
    return ResolvedSettings(**vars(settings) | decided)


def choose_image_size(arch: str, device_type: str) -> int:
    """Height and width in pixels: 224, or 32 for ResNet-20 and where a CPU core stands in."""
    return 32 if arch == "resnet20" or device_type == "cpu" else 224


def _list_counts(num_devices: int, *, with_all: bool) -> tuple[int, ...]:
    """Powers of two, `with_all` devices at the end: six GPUs are 1, 2, 4 and 6."""
    powers = {2**i for i in range(num_devices.bit_length()) if 2**i <= num_devices}
    return tuple(sorted(powers | ({num_devices} if with_all and num_devices else set()))) or (1,)


def _choose_precision(gpu: GpuKind) -> str:
    major, _ = gpu.capability
    return "bf16" if major >= 8 else "fp16" if major == 7 else "fp32"


def _choose_batch_size(settings: Settings, counts: Iterable[int], gpu: GpuKind | None) -> int:
    """Return the batch size by memory; under strong scaling the next that divides over all device counts."""
    size = 16 if gpu is None else next(size for least, size in BATCH_BY_MEMORY if gpu.memory_gib >= least)
    step = math.lcm(*counts) if settings.scaling == "strong" else 1
    return -(-size // step) * step


def write_options(settings: Settings, without: Collection[str]) -> list[str]:
    """Write the command line of what is not the default, `without` those of these names."""
    found: list[str] = []
    plain = {} if settings.device == "cuda" else {"precision": "fp32", **STEP_DEFAULTS}
    values = settings.stored()
    for one in list_options():
        value, usual = values[one.name], one.metadata["usual"]
        usual = plain.get(one.name) if usual is None else usual
        if one.name not in without and value is not None and format_value(value) != format_value(usual):
            found += [f"--{one.name.replace('_', '-')}", format_stored(value, one.metadata["parse"])]
    return found
