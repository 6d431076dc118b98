"""What a run does: every setting once, with its parser and help, resolved from four layers.

Defaults, then the preset, then the TOML file, then the command line; later layers win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench import cli
from bench.errors import UsageError
from bench.layout import PYTORCH_CAPS, BucketCaps

MODES = ("single", "dp", "ddp")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
NO, YES = False, True
PASSES = ("no_sync", "comm", "anatomy", "trace")
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
MARGINS = {"cpu": 0.05, "cuda": 0.01}
"""What counts as equal by kind of device, a fraction: what their noise lets a run of minutes resolve."""

MOST_DEVICES = 4096
"""Largest device count of a case or a prediction: a slip of the keyboard ends here."""

DEFAULT_CAPS = ("default", "1", "25", "100")
"""A run's sweep: PyTorch's own, many small buckets, its later cap from the first on, and one large bucket."""


def _ddp(
    default: Any, parse: Callable[[str], Any], meaning: str, metavar: str, *, column: str, short: str
) -> Any:
    facts = {"parse": parse, "help": meaning, "metavar": metavar, "column": column, "short": short}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """One value of every DDP setting that a run may vary; the defaults are DDP's own.

    A field declares a setting: its option and parser, its column of cases.csv, and what stands for it in the
    id of a case where it is not the default. `Settings` has a field of the same name, with values to measure.
    """

    bucket_cap_mb: BucketCaps = _ddp(  # noqa: RUF009 - a field
        PYTORCH_CAPS,
        BucketCaps.parse,
        "DDP bucket caps, MiB; default, a number, or a list per bucket as 1/25",
        "CAP,…",
        column="`default`, a number of MiB, `0`, or a `/`-separated list per bucket",
        short="cap",
    )
    gradient_as_bucket_view: bool = _ddp(
        NO,
        cli.switch,
        "DDP: gradients are views of the buckets",
        "on,off",
        column="DDP setting",
        short="view",
    )
    static_graph: bool = _ddp(
        NO, cli.switch, "DDP: the graph never changes", "on,off", column="DDP setting", short="static"
    )
    find_unused_parameters: bool = _ddp(
        NO,
        cli.switch,
        "DDP: search for parameters without gradient",
        "on,off",
        column="DDP setting",
        short="unused",
    )
    sync_buffers: bool = _ddp(
        YES,
        cli.switch,
        "DDP: broadcast buffers in the forward",
        "on,off",
        column="whether DDP broadcasts buffers in the forward",
        short="nobuf",
    )
    sync_batchnorm: bool = _ddp(
        NO,
        cli.switch,
        "DDP: convert to SyncBatchNorm (GPUs only)",
        "on,off",
        column="whether BatchNorm was converted to SyncBatchNorm",
        short="syncbn",
    )
    comm_hook: str = _ddp(
        "none",
        cli.choice(COMM_HOOKS),
        "DDP: gradient compression",
        "HOOK,…",
        column="DDP communication hook: `none`, `fp16`, `bf16` or `powersgd`",
        short="",
    )
    accumulate: int = _ddp(
        1,
        cli.positive_int,
        "DDP: micro-batches per synchronisation",
        "K,…",
        column="micro-batches per optimizer step; gradients synchronise on the last",
        short="acc",
    )


DDP_SETTINGS: tuple[Field[Any], ...] = fields(DdpSettings)
DDP_AXES = tuple(setting.name for setting in DDP_SETTINGS)
"""Names of the DDP settings, in the order of case ids and columns."""


def stored(value: Any) -> Any:
    """A setting's value as manifests, journals and tables hold it: bucket caps are text."""
    if isinstance(value, tuple):
        return tuple(map(stored, value))
    return str(value) if isinstance(value, BucketCaps) else value


DDP_DEFAULTS: dict[str, Any] = {setting.name: stored(setting.default) for setting in DDP_SETTINGS}
"""DDP as its constructor makes it without arguments, as cases.csv holds it."""


def _setting(default: Any, parse: Callable[[str], Any], meaning: str, metavar: str = "VALUE") -> Any:
    return field(default=default, metadata={"parse": parse, "help": meaning, "metavar": metavar})


def _swept(name: str, *values: Any) -> Any:
    """The option of a DDP setting: `values`, or its default alone, where the user gives none."""
    setting = next(s for s in DDP_SETTINGS if s.name == name)
    facts = setting.metadata
    return _setting(values or (setting.default,), cli.csv(facts["parse"]), facts["help"], facts["metavar"])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run as asked for. None means "by device" or "by workload": see `ResolvedSettings`."""

    modes: tuple[str, ...] = _setting(
        ("dp", "ddp"), cli.csv(cli.choice(MODES)), "modes beside single: dp, ddp", "MODE,…"
    )
    gpus: tuple[int, ...] | None = _setting(
        None, cli.csv(cli.positive_int), "device counts (without a GPU: CPU cores)", "N,…"
    )
    arch: str | None = _setting(None, str, "model: resnet18 (CPU default), resnet50 (GPU default), …", "NAME")
    workload: str | None = _setting(None, str, "your own model instead of --arch", "package.module:name")
    batch_size: int | None = _setting(
        None, cli.positive_int, "images per device (weak scaling) or in all (strong)", "N"
    )
    image_size: int | None = _setting(None, cli.positive_int, "image height and width, pixels", "N")
    data: str = _setting(
        "device",
        str,
        "batches: synthetic on the device, on the host, or a folder of images",
        "device|host|DIR",
    )
    data_workers: int = _setting(2, cli.whole_number, "loader processes per rank, with a folder", "N")
    scaling: str = _setting(
        "weak",
        cli.choice(("weak", "strong")),
        "what stays fixed: batch per device, or in all",
        "weak|strong",
    )
    precision: str = _setting("fp32", cli.choice(PRECISIONS), "arithmetic", "|".join(PRECISIONS))
    bucket_cap_mb: tuple[BucketCaps, ...] = _swept("bucket_cap_mb", *map(BucketCaps.parse, DEFAULT_CAPS))
    gradient_as_bucket_view: tuple[bool, ...] = _swept("gradient_as_bucket_view")
    static_graph: tuple[bool, ...] = _swept("static_graph")
    find_unused_parameters: tuple[bool, ...] = _swept("find_unused_parameters")
    sync_buffers: tuple[bool, ...] = _swept("sync_buffers")
    sync_batchnorm: tuple[bool, ...] = _swept("sync_batchnorm")
    comm_hook: tuple[str, ...] = _swept("comm_hook")
    accumulate: tuple[int, ...] = _swept("accumulate")
    device: str = _setting("auto", cli.choice(("auto", "cpu", "cuda")), "where to train", "auto|cpu|cuda")
    backend: str = _setting(
        "auto", cli.choice(("auto", "nccl", "gloo")), "gradient process group", "auto|nccl|gloo"
    )
    numa_bind: bool = _setting(
        YES, cli.switch, "keep each rank on the CPU cores of its GPU's NUMA node", "on|off"
    )
    rounds: int | None = _setting(
        None, cli.positive_int, "exactly N rounds (default: until the target or the time limit)", "N"
    )
    precision_target: float | None = _setting(
        None,
        cli.fraction,
        "stop when every images/s is known to ± this (default: when comparisons are, to half the margin)",
        "2%",
    )
    margin: float | None = _setting(
        None, cli.fraction, "differences up to this count as none (CPU 5%%, GPU 1%%)", "5%"
    )
    max_time: float | None = _setting(
        None,
        cli.duration_s,
        "start no case after this long (CPU 200s, GPU 10m; with --rounds none)",
        "10m",
    )
    case_timeout: float | None = _setting(
        None, cli.duration_s, "give a case up that takes this long in one go (20 times the usual)", "60s"
    )
    steps: int | None = _setting(None, cli.positive_int, "steps per block (CPU 1, GPU 10)", "N")
    trace: bool = _setting(NO, cli.switch, "keep a Chrome trace per case and rank", "on")
    allreduce_curve: bool = _setting(
        NO, cli.switch, "also time the all-reduce by itself over message sizes", "on"
    )
    calibrate: bool = _setting(
        NO, cli.switch, "also measure what bench.predict and bench.tune need: calibration.json", "on"
    )
    passes: tuple[str, ...] = _setting(
        PASSES,
        cli.csv(cli.choice((*PASSES, "none"))),
        "what to measure beside throughput: fewer leave time for more rounds; none: throughput alone",
        "PASS,…",
    )
    sweep: str = _setting(
        "grid",
        cli.choice(("grid", "star")),
        "DDP settings: every combination, or one varied at a time from the first of each",
        "grid|star",
    )
    seed: int = _setting(0, cli.whole_number, "seed of weights, batches and order", "N")
    name: str = _setting("run", str, "label in the results folder's name", "NAME")
    preset: str | None = None
    """Where values came from; not an option of its own."""
    caps_given: bool = NO
    """Whether anyone but the default chose `bucket_cap_mb`; not an option of its own."""
    out: str | None = _setting(None, str, "results folder (default: results/<time>-<host>-<name>)", "DIR")

    def __post_init__(self) -> None:
        """Reject what no machine could run."""
        if self.arch is not None and self.workload is not None:
            raise UsageError("--arch and --workload exclude each other; give one")
        if self.workload == "" or self.out == "":
            empty = "workload" if self.workload == "" else "out"
            raise UsageError(f"--{empty} is empty; name one, or leave the option out")
        if "none" in self.passes and len(self.passes) > 1:
            raise UsageError("--passes none stands alone; leave none out, or the other passes")
        if max(self.gpus or (1,)) > MOST_DEVICES:
            raise UsageError(f"--gpus {max(self.gpus or (1,))} is more than {MOST_DEVICES} devices")
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name):
            raise UsageError(f"--name {self.name!r} may hold only letters, digits, '-', '_' and '.'")

    def stored(self) -> dict[str, Any]:
        """What manifest.json holds of them."""
        return {f.name: stored(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def of_stored(cls, values: Mapping[str, Any]) -> Settings:
        """The settings that a manifest holds. Raises UsageError for a value that no option gives."""
        own = {"caps_given": cli.switch}
        parsers = {f.name: f.metadata.get("parse", own.get(f.name, str)) for f in fields(cls)}
        given = {n: _as_text(v) for n, v in values.items() if v is not None}
        found: dict[str, Any] = {n: cli.named(n, parsers[n], text) for n, text in given.items()}
        return cls(**found)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(Settings):
    """Settings of a run on a kind of device that is known: nothing is open that the device decides."""

    gpus: tuple[int, ...] = field()
    batch_size: int = field()
    steps: int = field()
    margin: float = field()


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"arch": "resnet20", "batch_size": 32, "max_time": "30s", "bucket_cap_mb": "default,0.25"},
    "ddp-paper": {
        "modes": "ddp",
        "sweep": "star",
        "bucket_cap_mb": "default,0,1,5,10,25,50,100",
        "accumulate": "1,2,4,8",
        "allreduce_curve": True,
        "max_time": "8m",
    },
    "full": {"precision_target": "1%", "max_time": "30m", "bucket_cap_mb": "default,1,5,10,25,50,100"},
}


def resolve(
    command_line: Mapping[str, Any], *, preset: str | None = None, config: Path | None = None
) -> Settings:
    """Settings from all layers; `command_line` maps field names to text.

    Raises UsageError that names the layer, the key and the fix.
    """
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}; {cli.did_you_mean(preset, PRESETS)}")
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if preset is not None:
        layers.append((f"preset {preset}: ", PRESETS[preset]))
    if config is not None:
        layers.append((f"{config}: ", cli.read_toml(config)))
    layers.append(("", command_line))
    known = {f.name: f for f in options_of()}
    values: dict[str, Any] = {}
    for where, layer in layers:
        for raw_key, raw in layer.items():
            key = raw_key.replace("-", "_")
            if key not in known:
                raise UsageError(f"{where}unknown key {raw_key!r}; {cli.did_you_mean(key, known)}")
            values[key] = cli.named(key, known[key].metadata["parse"], _as_text(raw), where=where)
        if "workload" in layer:
            values.pop("arch", None) if "arch" not in layer else None
    return Settings(**values, preset=preset, caps_given="bucket_cap_mb" in values)


def options_of() -> list[Field[Any]]:
    """The settings that a user can give, as dataclass fields with parser and help in their metadata."""
    return [f for f in fields(Settings) if f.metadata]


def as_options(stored_settings: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The command line of those of `names` that a manifest holds and that are not the default."""
    found: list[str] = []
    for setting in options_of():
        value = stored_settings.get(setting.name)
        if setting.name in names and value is not None and value != stored(setting.default):
            found += [f"--{setting.name.replace('_', '-')}", _as_text(value)]
    return found


def with_device_defaults(settings: Settings, *, device_type: str, num_local_devices: int) -> ResolvedSettings:
    """Fill what depends on the device: a CPU gets minutes of ResNet-18, a GPU a ResNet-50."""
    on_cpu = device_type == "cpu"
    counts = tuple(2**i for i in range(num_local_devices.bit_length()) if 2**i <= num_local_devices)
    arch = settings.arch
    if arch is None and settings.workload is None:
        arch = "resnet18" if on_cpu else "resnet50"
    given = {f.name: getattr(settings, f.name) for f in fields(settings)}
    decided = {
        "device": device_type,
        "backend": ("gloo" if on_cpu else "nccl") if settings.backend == "auto" else settings.backend,
        "gpus": settings.gpus or counts or (1,),
        "arch": arch,
        "batch_size": settings.batch_size or (16 if on_cpu else 64),
        "max_time": settings.max_time or (None if settings.rounds else 200.0 if on_cpu else 600.0),
        "margin": settings.margin or MARGINS[device_type],
        "steps": settings.steps or (1 if on_cpu else 10),
    }
    return ResolvedSettings(**given | decided)


def _as_text(raw: Any) -> str:
    if isinstance(raw, bool):
        return "on" if raw else "off"
    if isinstance(raw, list | tuple):
        return ",".join(_as_text(item) for item in raw)
    if isinstance(raw, float):
        return f"{raw:.15f}".rstrip("0").rstrip(".")
    return str(raw)
