"""Settings in which cases can differ: every setting of DDP, of the step and of a pipeline, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeAlias

from ..common.values import make_choice_parser, make_csv_parser, parse_positive_int, parse_switch
from .buckets import PYTORCH_CAPS, Caps, parse_bucket_caps

COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
MP_POLICIES = ("none", "bf16")
SCHEDULES = ("gpipe", "1f1b")
DDP_OPTIMIZER = "ddp_optimizer"


Value: TypeAlias = bool | int | str
"""Value of a case setting."""


def _parse_compile_modes(text: str) -> tuple[str, ...]:
    """Modes of torch.compile, `off` before the others: it is what they are compared with."""
    named = make_choice_parser(("on", "off", "default", "reduce-overhead", "max-autotune"))
    modes = make_csv_parser(lambda part: "default" if named(part) == "on" else part)(text)
    return tuple(sorted(modes, key=lambda mode: mode != "off"))


def make_option(default: Any, parse: Callable[[str], Any], meaning: str, metavar: str, **more: Any) -> Any:
    """Make a field that a user can give: its default, its parser, what `--help` says, and what else is known.

    Its column of cases.csv is described as in `--help`, unless `column` says more; `usual` is what a run does
    without it, unless that is the default.
    """
    column = meaning.partition(" (default")[0]
    known = {"parse": parse, "help": meaning, "metavar": metavar, "column": column, "usual": default}
    return field(default=default, metadata=known | more)


def _make_axis(default: Value, parse: Callable[[str], Value], *facts: Any, **more: Any) -> Any:
    usual = {"short": "", "kind": "argument", "unmeasured": (), "usual": (default,)}
    return make_option(default, make_csv_parser(parse), *facts, **usual | more)


def _make_switch(meaning: str, short: str, *, default: bool = False, **more: Any) -> Any:
    return _make_axis(default, parse_switch, meaning, "on|off,…", short=short, **more)


def _make_step_switch(meaning: str, label: str) -> Any:
    def parse(text: str) -> tuple[bool]:
        return (parse_switch(text),)

    return make_option(False, parse, meaning, "on|off", label=label, usual=None)


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """One value of every DDP setting that a run may vary; the defaults are DDP's own.

    A field declares a setting: its option and the parser of the values to measure, its column of cases.csv,
    and what stands for it in the id of a case where it is not the default. `usual` is what a run measures
    of it by default.
    Its `kind` is `argument` (of DDP's constructor, by this name), `training` (it changes the training itself,
    not only its speed) or `other`. Where it is not the default the passes `unmeasured` are left out: they
    would be wrong.
    """

    bucket_cap_mb: Caps = _make_axis(  # noqa: RUF009 - a field
        PYTORCH_CAPS,
        parse_bucket_caps,
        "bucket caps in MiB: N, FIRST/OTHERS such as 4/50, or PyTorch's `default`, 1/25",
        "CAP,…",
        column="`default`, a number of MiB, `0`, or a `/`-separated list per bucket",
        short="cap",
        usual=(PYTORCH_CAPS, "1", "25", "100"),
    )
    gradient_as_bucket_view: bool = _make_switch("DDP: gradients are views of the buckets", "view")
    static_graph: bool = _make_switch("DDP: the graph never changes", "static")
    find_unused_parameters: bool = _make_switch("DDP: search for parameters without gradient", "unused")
    skip_all_reduce_unused_params: bool = _make_switch(
        "DDP: send no bucket of parameters without gradient; with --find-unused-parameters or --static-graph",
        "skip",
        column="DDP: send no bucket of parameters without gradient; no `comm_ms`: not every bucket is sent",
        unmeasured=("comm", "calibration"),
    )
    batched_grad_copy: bool = _make_switch(
        "DDP: copy all gradients of a bucket at once (torch ≥ 2.12)", "batched"
    )
    lazy_bucket_allocation: bool = _make_switch(
        "DDP: allocate buckets as they become ready (torch ≥ 2.15)", "lazy"
    )
    zero_optimizer: bool = _make_switch(
        "DDP: ranks share the optimizer's state (ZeRO-1, ZeroRedundancyOptimizer)",
        "zero",
        column="whether ranks share the optimizer's state (ZeRO-1); no `comm_ms`: parameters are sent too",
        kind="other",
        unmeasured=("comm", "calibration"),
    )
    sync_buffers: bool = _make_switch(
        "DDP: broadcast buffers in the forward", "nobuf", default=True, kind="training"
    )
    sync_batchnorm: bool = _make_switch(
        "DDP: convert to SyncBatchNorm (GPUs only)", "syncbn", kind="training"
    )
    comm_hook: str = _make_axis(
        "none",
        make_choice_parser(COMM_HOOKS),
        f"DDP: gradient compression: {', '.join(COMM_HOOKS)}",
        "HOOK,…",
        kind="training",
    )
    accumulate: int = _make_axis(
        1,
        parse_positive_int,
        "DDP: micro-batches per synchronisation",
        "K,…",
        short="acc",
        kind="training",
    )
    optimize_ddp: str = _make_axis(
        DDP_OPTIMIZER,
        make_choice_parser((DDP_OPTIMIZER, "no_optimization")),
        "compiled DDP: ddp_optimizer splits the graph at buckets, no_optimization does not",
        "WAY,…",
        kind="other",
    )


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of a step, all but `compile` the same in a run; the defaults are those of plain PyTorch.

    A field declares a setting as those of `DdpSettings` do, with what names it on the page. What nobody has
    given the device decides: see `fill_device_defaults`.
    """

    channels_last: bool = _make_step_switch(
        "images and weights in memory format channels_last (default: GPU on, CPU off)", "channels_last"
    )
    fused_optimizer: bool = _make_step_switch(
        "the optimizer's fused kernels (default: GPU on where it has them, CPU off)",
        "fused optimizer",
    )
    cudnn_benchmark: bool = _make_step_switch(
        "let cuDNN time its algorithms and take the fastest (default: off)", "cuDNN benchmark"
    )
    compile: str = make_option(
        "off",
        _parse_compile_modes,
        "torch.compile: off, on (mode default), reduce-overhead (CUDA graphs), max-autotune (default: off)",
        "MODE,…",
        column="mode of torch.compile, or `off`",
        usual=None,
        label="compiled",
    )


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """One value of every setting of the mode `pipeline` that a run may vary; declared as those of DDP."""

    pipeline_schedule: str = _make_axis(
        "gpipe",
        make_choice_parser(SCHEDULES),
        f"pipeline: order of forwards and backwards: {', '.join(SCHEDULES)}",
        "NAME,…",
    )
    micro_batches: int = _make_axis(
        4,
        parse_positive_int,
        "pipeline: micro-batches of a step",
        "M,…",
        short="m",
    )


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """One value of every setting of `fully_shard` and `replicate` that a run may vary; declared as DDP's."""

    mp_policy: str = _make_axis(
        "none",
        make_choice_parser(MP_POLICIES),
        "fsdp, replicate: autocast, or a MixedPrecisionPolicy: bf16 parameters, float32 reduction",
        "POLICY,…",
        kind="training",
    )
    reshard_after_forward: bool = _make_switch(
        "fsdp: give a block's parameters back after its forward, and gather them again in the backward",
        "kept",
        default=True,
    )


SETTINGS_OF: dict[str, tuple[Field[Any], ...]] = {
    "ddp": fields(DdpSettings),
    "replicate": fields(FsdpSettings)[:1],
    "fsdp": fields(FsdpSettings),
    "pipeline": fields(PipelineSettings),
}
"""Settings that a run may vary, by mode."""

MODE_SETTINGS = tuple({s.name: s for own in SETTINGS_OF.values() for s in own}.values())
STEP_SETTINGS: tuple[Field[Any], ...] = fields(StepSettings)

MODE_DEFAULTS: dict[str, Any] = {setting.name: setting.default for setting in MODE_SETTINGS}
"""Values that torch has without arguments, as cases.csv holds them; in the order of columns."""

DDP_DEFAULTS = {setting.name: MODE_DEFAULTS[setting.name] for setting in SETTINGS_OF["ddp"]}
STEP_DEFAULTS: dict[str, Any] = {setting.name: setting.default for setting in STEP_SETTINGS}

KINDS: dict[str, str] = {setting.name: setting.metadata["kind"] for setting in MODE_SETTINGS}

SWEPT: dict[str, tuple[Value, ...]] = {s.name: s.metadata["usual"] for s in MODE_SETTINGS}
"""Values that a run measures by default, by setting."""
