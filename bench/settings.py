"""What a run does: every setting once, with its parser and help, resolved from four layers.

Defaults, then the preset, then the TOML file, then the command line; later layers win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench import cli
from bench.errors import UsageError
from bench.layout import PYTORCH_CAPS, BucketCaps

STAGED = ("partition", "pipeline")
"""Modes in which each device has some of the layers."""

COMPARATORS = ("fsdp", *STAGED)
"""Modes beside DP and DDP, which people take where a model's memory or its size asks for them."""

MODES = ("single", "dp", "ddp", *COMPARATORS)
RANK_PER_DEVICE = ("ddp", *COMPARATORS)
"""Modes in which every device has a process of its own."""

SCHEDULES = ("gpipe", "1f1b")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
NO, YES = False, True
PASSES = ("no_sync", "comm", "anatomy", "trace")
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune")
DDP_OPTIMIZER, PYTHON_REDUCER = "ddp_optimizer", "python_reducer"
MARGINS = {"cpu": 0.05, "cuda": 0.01}
"""What counts as equal by kind of device, a fraction: what their noise lets a run of minutes resolve."""

LEAST_BLOCK_S = 1.0
"""Seconds of a block on a GPU: its clock and its queue are the same throughout most of it."""

MOST_DEVICES = 4096
"""Largest device count of a case or a prediction: a slip of the keyboard ends here."""

DEFAULT_CAPS = ("default", "1", "25", "100")
"""A run's sweep: PyTorch's own, many small buckets, its later cap from the first on, and one large bucket."""


def _compile_modes(text: str) -> tuple[str, ...]:
    """Modes of torch.compile, `off` before the others: it is what they are compared with."""
    named = cli.choice(("on", *COMPILE_MODES))
    modes = cli.csv(lambda part: "default" if named(part) == "on" else part)(text)
    return tuple(sorted(modes, key=lambda mode: mode != "off"))


def _ddp(
    default: Any,
    parse: Callable[[str], Any],
    meaning: str,
    metavar: str,
    *,
    column: str,
    short: str,
    **more: Any,
) -> Any:
    facts = {"parse": parse, "help": meaning, "metavar": metavar, "column": column, "short": short}
    return field(
        default=default, metadata=facts | {"kind": "argument", "unmeasured": (), "later": False} | more
    )


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """One value of every DDP setting that a run may vary; the defaults are DDP's own.

    A field declares a setting: its option and parser, its column of cases.csv, and what stands for it in the
    id of a case where it is not the default. `Settings` has a field of the same name, with values to measure.
    One that came `later` counts in ids only where it is not the default: those of earlier runs hold.
    Its `kind` is `argument` (of DDP's constructor, by this name), `training` (it changes the training itself,
    not only its speed) or `other`. Where it is not the default the passes `unmeasured` are left out: they
    would be wrong.
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
    skip_all_reduce_unused_params: bool = _ddp(
        NO,
        cli.switch,
        "DDP: send no bucket of parameters without gradient (needs --find-unused-parameters on)",
        "on,off",
        column="DDP setting; with it no `comm_ms`: not every bucket is sent",
        short="skip",
        unmeasured=("comm", "calibration"),
        later=True,
    )
    batched_grad_copy: bool = _ddp(
        NO,
        cli.switch,
        "DDP: copy all gradients of a bucket at once (torch 2.15)",
        "on,off",
        column="DDP setting of torch 2.15",
        short="batched",
        later=True,
    )
    lazy_bucket_allocation: bool = _ddp(
        NO,
        cli.switch,
        "DDP: allocate buckets as they become ready (torch 2.15)",
        "on,off",
        column="DDP setting of torch 2.15",
        short="lazy",
        later=True,
    )
    delay_all_reduce: int = _ddp(
        0,
        cli.whole_number,
        "DDP: send the last N layers apart, when the backward ends (delay_all_reduce_named_params)",
        "N,…",
        column="last layers that are sent apart, also under `no_sync`: no `comm_ms`, no `exposed_comm_ms`",
        short="delay",
        kind="other",
        unmeasured=("no_sync", "comm", "calibration"),
        later=True,
    )
    ddp_mixed_precision: str = _ddp(
        "none",
        cli.choice(("none", "bf16")),
        "DDP: its own copies of parameters and gradients in bf16 (GPUs only)",
        "DTYPE,…",
        column="DDP's own mixed precision, or `none`; with it no `comm_ms` and no `exposed_comm_ms`",
        short="mp",
        kind="training",
        unmeasured=("no_sync", "comm", "calibration"),
        later=True,
    )
    zero_optimizer: bool = _ddp(
        NO,
        cli.switch,
        "DDP: ranks share the optimizer's state (ZeRO-1, ZeroRedundancyOptimizer)",
        "on,off",
        column="whether ranks share the optimizer's state (ZeRO-1); no `comm_ms`: parameters are sent too",
        short="zero",
        kind="other",
        unmeasured=("comm", "calibration"),
        later=True,
    )
    sync_buffers: bool = _ddp(
        YES,
        cli.switch,
        "DDP: broadcast buffers in the forward",
        "on,off",
        column="whether DDP broadcasts buffers in the forward",
        short="nobuf",
        kind="training",
    )
    sync_batchnorm: bool = _ddp(
        NO,
        cli.switch,
        "DDP: convert to SyncBatchNorm (GPUs only)",
        "on,off",
        column="whether BatchNorm was converted to SyncBatchNorm",
        short="syncbn",
        kind="training",
    )
    comm_hook: str = _ddp(
        "none",
        cli.choice(COMM_HOOKS),
        "DDP: gradient compression",
        "HOOK,…",
        column="DDP communication hook: `none`, `fp16`, `bf16` or `powersgd`",
        short="",
        kind="training",
    )
    accumulate: int = _ddp(
        1,
        cli.positive_int,
        "DDP: micro-batches per synchronisation",
        "K,…",
        column="micro-batches per optimizer step; gradients synchronise on the last",
        short="acc",
        kind="training",
    )
    optimize_ddp: str = _ddp(
        DDP_OPTIMIZER,
        cli.choice((DDP_OPTIMIZER, "no_optimization", PYTHON_REDUCER)),
        "compiled DDP: ddp_optimizer splits the graph at buckets, no_optimization does not; python_reducer: "
        "its all-reduces are compiled (experimental)",
        "WAY,…",
        column="compiled DDP: `ddp_optimizer`, `no_optimization` or `python_reducer`",
        short="",
        later=True,
    )


def _of_step(
    default: Any, parse: Callable[[str], Any], meaning: str, metavar: str, *, column: str, label: str
) -> Any:
    facts = {"parse": parse, "help": meaning, "metavar": metavar, "column": column, "label": label}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step is computed, all but `compile` the same in a run; the defaults are those of plain PyTorch.

    A field declares a setting as those of `DdpSettings` do, with what names it on the page. `Settings` has a
    field of the same name, where None means "by device".
    """

    channels_last: bool = _of_step(
        NO,
        cli.switch,
        "images and weights in memory format channels_last (GPU on, CPU off)",
        "on|off",
        column="whether images and weights are in memory format channels_last",
        label="channels_last",
    )
    fused_optimizer: bool = _of_step(
        NO,
        cli.switch,
        "the optimizer's fused kernels (GPU on where it has them, CPU off)",
        "on|off",
        column="whether the optimizer runs its fused kernels",
        label="fused optimizer",
    )
    cudnn_benchmark: bool = _of_step(
        NO,
        cli.switch,
        "let cuDNN time its algorithms and take the fastest",
        "on|off",
        column="whether cuDNN chose its algorithms by timing them",
        label="cuDNN benchmark",
    )
    compile: str = _of_step(
        "off",
        _compile_modes,
        "torch.compile: off, on (default), reduce-overhead (CUDA graphs), max-autotune; several are compared",
        "off,on",
        column="mode of torch.compile, or `off`",
        label="compiled",
    )


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """One value of every setting of the mode `pipeline` that a run may vary; declared as those of DDP."""

    pipeline_schedule: str = _ddp(
        "gpipe",
        cli.choice(SCHEDULES),
        "pipeline: order of the micro-batches' forwards and backwards",
        "NAME,…",
        column="pipeline: order of forwards and backwards, `gpipe` or `1f1b`",
        short="",
        later=True,
    )
    micro_batches: int = _ddp(
        4,
        cli.positive_int,
        "pipeline: micro-batches of a step",
        "M,…",
        column="pipeline: micro-batches of a step",
        short="m",
        later=True,
    )


PIPELINE_SETTINGS: tuple[Field[Any], ...] = fields(PipelineSettings)
PIPELINE_AXES = tuple(setting.name for setting in PIPELINE_SETTINGS)

STEP_SETTINGS: tuple[Field[Any], ...] = fields(StepSettings)
STEP_DEFAULTS: dict[str, Any] = {setting.name: setting.default for setting in STEP_SETTINGS}

DDP_SETTINGS: tuple[Field[Any], ...] = fields(DdpSettings)
DDP_AXES = tuple(setting.name for setting in DDP_SETTINGS)
"""Names of the DDP settings, in the order of case ids and columns."""
DDP_KINDS: dict[str, str] = {setting.name: setting.metadata["kind"] for setting in DDP_SETTINGS}


def stored(value: Any) -> Any:
    """A setting's value as manifests, journals and tables hold it: bucket caps are text."""
    if isinstance(value, tuple):
        return tuple(map(stored, value))
    return str(value) if isinstance(value, BucketCaps) else value


DDP_DEFAULTS: dict[str, Any] = {setting.name: stored(setting.default) for setting in DDP_SETTINGS}
"""DDP as its constructor makes it without arguments, as cases.csv holds it."""

LATER_DEFAULTS: dict[str, Any] = STEP_DEFAULTS | {
    setting.name: setting.default
    for setting in (*DDP_SETTINGS, *PIPELINE_SETTINGS)
    if setting.metadata["later"]
}
"""Settings that count in the id of a case only where they are not the default."""

IMAGES = "images"
"""What image models train on, and what every run of before units counted."""

MOST_UNITS = 10**9
"""Units in a sample; more would be a mistake, and products of counts stay exact."""


def _setting(default: Any, parse: Callable[[str], Any], meaning: str, metavar: str = "VALUE") -> Any:
    return field(default=default, metadata={"parse": parse, "help": meaning, "metavar": metavar})


def _swept(name: str, *values: Any) -> Any:
    """The option of an axis: `values`, or its default alone, where the user gives none."""
    setting = next(s for s in (*DDP_SETTINGS, *PIPELINE_SETTINGS) if s.name == name)
    facts = setting.metadata
    return _setting(values or (setting.default,), cli.csv(facts["parse"]), facts["help"], facts["metavar"])


def _by_device(name: str) -> Any:
    """The option of a step setting, which the device decides where the user does not."""
    facts = next(s for s in STEP_SETTINGS if s.name == name).metadata
    return _setting(None, facts["parse"], facts["help"], facts["metavar"])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run as asked for. None means "by device" or "by workload": see `ResolvedSettings`."""

    modes: tuple[str, ...] = _setting(
        ("dp", "ddp"),
        cli.csv(cli.choice(MODES)),
        "modes beside single: dp, ddp; to compare with them fsdp, partition, pipeline",
        "MODE,…",
    )
    gpus: tuple[int, ...] | None = _setting(
        None, cli.csv(cli.positive_int), "device counts (without a GPU: CPU cores)", "N,…"
    )
    arch: str | None = _setting(None, str, "model: resnet18 (CPU default), resnet50 (GPU default), …", "NAME")
    workload: str | None = _setting(None, str, "your own model instead of --arch", "package.module:name")
    batch_size: int | None = _setting(
        None, cli.positive_int, "samples per device (weak scaling) or in all (strong)", "N"
    )
    image_size: int | None = _setting(None, cli.positive_int, "image height and width, pixels", "N")
    data: str = _setting(
        "device",
        str,
        "batches: synthetic on the device, on the host, or a folder of images",
        "device|host|DIR",
    )
    data_workers: int = _setting(2, cli.whole_number, "loader processes per rank, with a folder", "N")
    prefetch: bool = _setting(
        YES, cli.switch, "copy the next batch of host or folder data to a GPU during the step", "on|off"
    )
    scaling: str = _setting(
        "weak",
        cli.choice(("weak", "strong")),
        "what stays fixed: batch per device, or in all",
        "weak|strong",
    )
    precision: str | None = _setting(
        None, cli.choice(PRECISIONS), "arithmetic (CPU fp32, GPU bf16 where it has it)", "|".join(PRECISIONS)
    )
    channels_last: bool | None = _by_device("channels_last")
    fused_optimizer: bool | None = _by_device("fused_optimizer")
    cudnn_benchmark: bool | None = _by_device("cudnn_benchmark")
    compile: tuple[str, ...] | None = _by_device("compile")
    bucket_cap_mb: tuple[BucketCaps, ...] = _swept("bucket_cap_mb", *map(BucketCaps.parse, DEFAULT_CAPS))
    gradient_as_bucket_view: tuple[bool, ...] = _swept("gradient_as_bucket_view")
    static_graph: tuple[bool, ...] = _swept("static_graph")
    find_unused_parameters: tuple[bool, ...] = _swept("find_unused_parameters")
    skip_all_reduce_unused_params: tuple[bool, ...] = _swept("skip_all_reduce_unused_params")
    batched_grad_copy: tuple[bool, ...] = _swept("batched_grad_copy")
    lazy_bucket_allocation: tuple[bool, ...] = _swept("lazy_bucket_allocation")
    delay_all_reduce: tuple[int, ...] = _swept("delay_all_reduce")
    ddp_mixed_precision: tuple[str, ...] = _swept("ddp_mixed_precision")
    zero_optimizer: tuple[bool, ...] = _swept("zero_optimizer")
    sync_buffers: tuple[bool, ...] = _swept("sync_buffers")
    sync_batchnorm: tuple[bool, ...] = _swept("sync_batchnorm")
    comm_hook: tuple[str, ...] = _swept("comm_hook")
    accumulate: tuple[int, ...] = _swept("accumulate")
    pipeline_schedule: tuple[str, ...] = _swept("pipeline_schedule")
    micro_batches: tuple[int, ...] = _swept("micro_batches")
    optimize_ddp: tuple[str, ...] = _swept("optimize_ddp")
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
        "stop when every throughput is known to ± this (default: when comparisons are, to half the margin)",
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
    sustain: float | None = _setting(
        None,
        cli.duration_s,
        "after the rounds, train each case without a pause for so long (default: not at all)",
        "5m",
    )
    case_timeout: float | None = _setting(
        None, cli.duration_s, "give a case up that takes this long in one go (20 times the usual)", "60s"
    )
    steps: int | None = _setting(
        None, cli.positive_int, "steps per block (CPU 1, GPU as many as take 1 s)", "N"
    )
    trace: bool = _setting(NO, cli.switch, "keep a Chrome trace per case and rank", "on")
    telemetry: bool = _setting(
        YES, cli.switch, "sample clocks, power and temperature of the GPUs in timed blocks", "on|off"
    )
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
    least_block_s: float | None = None
    """Least seconds of a block, where `steps` leaves it open; not an option of its own."""
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
        own = {"caps_given": cli.switch, "least_block_s": float}
        parsers = {f.name: f.metadata.get("parse", own.get(f.name, str)) for f in fields(cls)}
        given = {n: _as_text(v) for n, v in values.items() if v is not None}
        found: dict[str, Any] = {n: cli.named(n, parsers[n], text) for n, text in given.items()}
        return cls(**found)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(Settings):
    """Settings of a run on a kind of device that is known: nothing is open that the device decides."""

    gpus: tuple[int, ...] = field()
    batch_size: int = field()
    precision: str = field()
    channels_last: bool = field()
    fused_optimizer: bool = field()
    cudnn_benchmark: bool = field()
    compile: tuple[str, ...] = field()
    steps: int = field()
    """Of a block, at least."""
    margin: float = field()
    least_block_s: float = field()

    def steps_per_block(self, step_s: float) -> int:
        """Steps of a timed block of a case whose step takes so many seconds."""
        return max(self.steps, math.ceil(self.least_block_s / step_s) if step_s > 0 else 1)


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
    plain = {} if stored_settings.get("device") == "cuda" else {"precision": "fp32", **STEP_DEFAULTS}
    for setting in options_of():
        value = stored_settings.get(setting.name)
        usual = plain.get(setting.name) if setting.default is None else stored(setting.default)
        if setting.name in names and value is not None and _as_text(value) != _as_text(usual):
            found += [f"--{setting.name.replace('_', '-')}", _as_text(value)]
    return found


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """What the defaults of a run on GPUs follow from: the least of those that are visible."""

    capability: tuple[int, int]
    """CUDA compute capability, such as (9, 0)."""
    memory_gib: float


BATCH_BY_MEMORY = ((60.0, 256), (30.0, 128), (14.0, 64), (0.0, 32))
"""GiB of a GPU from which on so many images are the default: ResNet-50 at 224 pixels takes 45 MB for each in
bf16, and twice that in fp32, beside a dozen cases of 0.4 GB that stay in memory."""


def with_device_defaults(
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
    counts = settings.gpus or _counts(num_local_devices, with_all=not on_cpu)
    precision = settings.precision or ("fp32" if gpu is None else _precision(gpu))
    by_device: dict[str, Any] = {
        "precision": precision,
        "channels_last": gpu is not None,
        "fused_optimizer": gpu is not None and precision != "fp16" and "fsdp" not in settings.modes,
        "cudnn_benchmark": NO,
        "compile": ("off",),
        "margin": MARGINS[device_type],
    }
    asked = {f.name: getattr(settings, f.name) for f in fields(settings)}
    decided = {name: default if asked[name] is None else asked[name] for name, default in by_device.items()}
    decided |= {
        "device": device_type,
        "backend": ("gloo" if on_cpu else "nccl") if settings.backend == "auto" else settings.backend,
        "gpus": counts,
        "arch": arch,
        "batch_size": settings.batch_size or _batch_size(settings, counts, gpu),
        "max_time": settings.max_time or (None if settings.rounds else 200.0 if on_cpu else 600.0),
        "steps": settings.steps or 1,
    }
    if settings.least_block_s is None:
        decided["least_block_s"] = 0.0 if on_cpu or settings.steps else LEAST_BLOCK_S
    return ResolvedSettings(**asked | decided)


def _counts(num_devices: int, *, with_all: bool) -> tuple[int, ...]:
    """Powers of two, `with_all` devices at the end: six GPUs are 1, 2, 4 and 6."""
    powers = {2**i for i in range(num_devices.bit_length()) if 2**i <= num_devices}
    return tuple(sorted(powers | ({num_devices} if with_all and num_devices else set()))) or (1,)


def _precision(gpu: GpuKind) -> str:
    major, _ = gpu.capability
    return "bf16" if major >= 8 else "fp16" if major == 7 else "fp32"


def _batch_size(settings: Settings, counts: Iterable[int], gpu: GpuKind | None) -> int:
    """By memory; under strong scaling the next batch that divides over all device counts."""
    size = 16 if gpu is None else next(size for least, size in BATCH_BY_MEMORY if gpu.memory_gib >= least)
    step = math.lcm(*counts) if settings.scaling == "strong" else 1
    return -(-size // step) * step


def _as_text(raw: Any) -> str:
    if isinstance(raw, bool):
        return "on" if raw else "off"
    if isinstance(raw, list | tuple):
        return ",".join(_as_text(item) for item in raw)
    if isinstance(raw, float):
        return f"{raw:.15f}".rstrip("0").rstrip(".")
    return str(raw)
