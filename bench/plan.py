"""The sweep as data: cases, what is skipped and why, the order of each round."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bench.errors import UsageError
from bench.layout import BucketCaps
from bench.settings import (
    COMPARATORS,
    DDP_AXES,
    DDP_DEFAULTS,
    DDP_OPTIMIZER,
    DDP_SETTINGS,
    IMAGES,
    LATER_DEFAULTS,
    PIPELINE_AXES,
    PIPELINE_SETTINGS,
    PYTHON_REDUCER,
    RANK_PER_DEVICE,
    STAGED,
    STEP_DEFAULTS,
    DdpSettings,
    PipelineSettings,
    ResolvedSettings,
    StepSettings,
    stored,
)

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that replay CUDA graphs, by torch._inductor.list_mode_options."""

HALF_HOOKS = ("fp16", "bf16")
"""Communication hooks that send two bytes for every gradient element of four."""


_UNIT_DEFAULTS = {"unit": IMAGES, "units_per_sample": 1}


def wire_share(comm_hook: str) -> float:
    """Tell the share of fp32 gradients' bytes that a hook sends."""
    return 0.5 if comm_hook in HALF_HOOKS else 1.0


@dataclass(frozen=True, kw_only=True)
class Case(DdpSettings, PipelineSettings, StepSettings):
    """One point of the sweep: every setting that defines what is measured."""

    mode: str
    num_devices: int
    arch: str
    image_size: int | None
    batch_per_device: int
    scaling: str
    precision: str
    data: str
    device_type: str
    backend: str = ""
    unit: str = IMAGES
    """What its throughput counts; a name for people, so no part of `case_id`."""
    units_per_sample: int = 1

    @property
    def global_batch(self) -> int:
        """Samples, which are rows of the batch, per optimizer step over all devices."""
        return self.batch_per_device * self.num_devices * self.accumulate

    @property
    def units_per_step(self) -> int:
        """What an optimizer step trains over all devices, counted in `unit`."""
        return self.global_batch * self.units_per_sample

    @property
    def num_ranks(self) -> int:
        """Processes that it takes: one for every device, or one for all."""
        return self.num_devices if self.mode in RANK_PER_DEVICE else 1

    @property
    def num_batches(self) -> int:
        """Parts of the batch that ranks load, one each; stages of a pipeline all load the whole."""
        return self.num_devices if self.mode in ("ddp", "fsdp") else 1

    @property
    def num_micro_batches(self) -> int:
        """Parts that pass the stages one after another: of `partition` the whole batch is one."""
        return self.micro_batches if self.mode == "pipeline" else 1

    @property
    def is_staged(self) -> bool:
        """Whether each device has some of the layers."""
        return self.mode in STAGED

    @property
    def communicates(self) -> bool:
        """Whether its ranks all-reduce gradients in buckets."""
        return self.mode == "ddp" and self.num_devices > 1

    @property
    def has_python_reducer(self) -> bool:
        """Whether DDP's all-reduces are part of a compiled backward, without DDP's own reducer."""
        return self.optimize_ddp == PYTHON_REDUCER

    @property
    def unmeasured(self) -> set[str]:
        """Passes that would be wrong of it, by its settings.

        PowerSGD's messages are not the buckets. Hooks would have a compiled backward compiled anew.
        """
        found = {"comm"} if self.comm_hook == "powersgd" else set()
        if self.has_python_reducer:
            found |= {"comm", "anatomy", "trace", "calibration"}
        on = [setting for setting in DDP_SETTINGS if getattr(self, setting.name) != setting.default]
        return found.union(*(setting.metadata["unmeasured"] for setting in on))

    @property
    def apart_from_cap(self) -> tuple[object, ...]:
        """Equal for cases that differ in nothing but the bucket cap."""
        return tuple(item for item in self.stored().items() if item[0] != "bucket_cap_mb")

    @property
    def impl(self) -> str:
        """`cpu_standin` where DataParallel's stages run on CPU cores, else `torch`."""
        return "cpu_standin" if self.mode == "dp" and self.device_type == "cpu" else "torch"

    @property
    def case_id(self) -> str:
        """Readable name plus a hash of `stored`: the same settings give the same id everywhere."""
        settings = {name: value for name, value in self.stored().items() if name != "unit"}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
        parts = [self.mode, f"n{self.num_devices}"]
        of_mode = {"ddp": DDP_SETTINGS, "pipeline": PIPELINE_SETTINGS}
        for setting in of_mode.get(self.mode, ()):
            value, short = getattr(self, setting.name), setting.metadata["short"]
            if value != setting.default or setting.name == "bucket_cap_mb":
                parts.append(short if isinstance(value, bool) else f"{short}{value}".replace("/", "_"))
        return "-".join([*parts, digest])

    def stored(self) -> dict[str, Any]:
        """Every setting as journals hold it and `case_id` counts it; a mode without buckets has no cap.

        A setting that came later only where it is not the default: runs of before it keep their ids.
        """
        later = LATER_DEFAULTS | _UNIT_DEFAULTS
        plain = {name for name, default in later.items() if getattr(self, name) == default}
        names = [*(f.name for f in fields(self) if f.name not in DDP_AXES), *DDP_AXES]
        values = {name: stored(getattr(self, name)) for name in names if name not in plain}
        return values if self.mode == "ddp" else values | {"bucket_cap_mb": ""}

    @classmethod
    def of_stored(cls, values: Mapping[str, Any]) -> Case:
        """The case that a journal holds. Raises UsageError for a bucket cap that is none."""
        return cls(**{**values, "bucket_cap_mb": BucketCaps.parse(values.get("bucket_cap_mb") or "default")})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to run on."""

    device_type: str
    devices_per_node: int
    num_nodes: int = 1
    ranks_per_node: int | None = None
    """Ranks an outside launcher (torchrun, srun) started per node; None when the run starts its own."""
    devices_per_process: int | None = None
    """What the first of such ranks sees: one GPU with Slurm's --gpus-per-task; None: all of its machine."""
    rank_devices: tuple[str, ...] = ()
    """The GPU of each such rank; several may share one. Empty: each has its own while there are enough."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case and what is known of it before anything runs."""

    case: Case
    num_nodes: int
    oversubscribed: bool
    skip_reason: str | None = None


def expand(
    settings: ResolvedSettings,
    machine: Machine,
    *,
    arch: str,
    image_size: int | None,
    unit: str = IMAGES,
    units_per_sample: int = 1,
) -> list[Planned]:
    """Every case of the sweep, eager `single` first. Raises UsageError for what no case can do.

    Args:
        settings: resolved for this machine.
        machine: what there is to run on.
        arch: the workload's name.
        image_size: of the workload, in pixels; None where its inputs are no images.
        unit: what throughput counts.
        units_per_sample: how many of them a row of the batch holds.
    """
    batch, counts = settings.batch_size, settings.gpus
    if settings.compile == ("off",) and settings.optimize_ddp != (DDP_OPTIMIZER,):
        raise UsageError("--optimize-ddp is about compiled DDP; give --compile on, or off,on, with it")
    if settings.scaling == "strong":
        bad = [n for n in counts if batch % n]
        if bad:
            raise UsageError(
                f"--batch-size {batch} does not divide over {bad[0]} devices under strong scaling; "
                f"use a multiple of {' and '.join(str(n) for n in counts)}"
            )

    def case(compile_mode: str, mode: str, n: int, **extra: Any) -> Case:
        return Case(
            mode=mode,
            num_devices=n,
            arch=arch,
            image_size=image_size,
            batch_per_device=batch // n if settings.scaling == "strong" else batch,
            scaling=settings.scaling,
            precision=settings.precision,
            data=settings.data,
            device_type=machine.device_type,
            unit=unit,
            units_per_sample=units_per_sample,
            **{name: getattr(settings, name) for name in STEP_DEFAULTS} | {"compile": compile_mode},
            **extra,
        )

    cases = []
    for compiled in settings.compile:
        cases.append(case(compiled, "single", 1))
        if "dp" in settings.modes:
            cases += [case(compiled, "dp", n) for n in counts]
        for mode in (mode for mode in RANK_PER_DEVICE if mode in settings.modes):
            points = [(n, point) for n in counts for point in _points(settings, mode, n, compiled)]
            cases += [case(compiled, mode, n, backend=settings.backend, **point) for n, point in points]
    return [_placed(c, machine, settings) for c in cases]


def is_base(case: Case, settings: ResolvedSettings) -> bool:
    """Whether it has the first value of each list of the sweep."""
    first = settings.compile[0]
    return case.compile == first and all(
        getattr(case, name) == values[0] for name, values in _axes(settings, case.mode, first).items()
    )


def _axes(settings: ResolvedSettings, mode: str, compiled: str) -> dict[str, tuple[Any, ...]]:
    """Values of every setting of a mode; how compiled DDP is optimised means nothing to eager cases."""
    names = {"ddp": DDP_AXES, "pipeline": PIPELINE_AXES}.get(mode, ())
    axes = {name: getattr(settings, name) for name in names}
    return axes | {"optimize_ddp": (DDP_OPTIMIZER,)} if mode == "ddp" and compiled == "off" else axes


def _points(settings: ResolvedSettings, mode: str, num_devices: int, compiled: str) -> list[dict[str, Any]]:
    """A mode's settings to measure at one device count: all combinations, or one varied at a time."""
    axes = _axes(settings, mode, compiled)
    if num_devices == 1 and mode == "ddp":
        # Without communication the buckets change nothing: one cap, and one way to split at it, are enough.
        axes |= {name: axes[name][:1] for name in ("bucket_cap_mb", "optimize_ddp")}
    if settings.sweep == "grid":
        return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    base = {name: values[0] for name, values in axes.items()}
    if num_devices == 1:
        return [base]
    of_compiled = {name: values for name, values in axes.items() if name == "optimize_ddp"}
    varied = axes if compiled == settings.compile[0] else of_compiled
    return [base, *({**base, name: value} for name, values in varied.items() for value in values[1:])]


def _placed(case: Case, machine: Machine, settings: ResolvedSettings) -> Planned:
    per_node = machine.ranks_per_node or case.num_devices
    nodes = -(-case.num_ranks // per_node)
    on_a_node = min(case.num_devices, per_node) if case.mode in RANK_PER_DEVICE else case.num_devices
    shared = _is_shared(case, machine, on_a_node)
    reason = _skip_reason(case, machine, on_a_node, shared=shared)
    if shared and not settings.caps_given and case.mode == "ddp":
        reason = reason or _untold(case, settings.bucket_cap_mb[0])
    return Planned(case=case, num_nodes=nodes, oversubscribed=shared, skip_reason=reason)


def _is_shared(case: Case, machine: Machine, on_a_node: int) -> bool:
    """Whether two of its ranks or replicas would have the same device."""
    used = machine.rank_devices[: case.num_devices]
    if case.mode in RANK_PER_DEVICE and used:
        return len(set(used)) < len(used)
    return on_a_node > (machine.devices_per_process or machine.devices_per_node)


def _untold(case: Case, first: BucketCaps) -> str | None:
    """Why a cap that nobody asked for is not measured where devices are shared: it would tell little."""
    if case.bucket_cap_mb == first:
        return None
    option = f"--bucket-cap-mb {first},{case.bucket_cap_mb}"
    return f"devices are shared, where caps tell little; {option} measures it"


def _skip_reason(case: Case, machine: Machine, on_a_node: int, *, shared: bool) -> str | None:
    if (reason := _senseless(case)) is not None:
        return reason
    if machine.ranks_per_node is not None and case.mode in RANK_PER_DEVICE:
        started = machine.ranks_per_node * machine.num_nodes
        if case.num_devices > started:
            return f"needs {case.num_devices} ranks, the launcher started {started}"
    if machine.device_type == "cuda" and shared:
        if case.mode == "dp":
            return _too_few_for_dp(case, machine)
        if case.backend == "nccl":
            return f"{_too_few_for_ranks(case, machine, on_a_node)} (nccl takes one rank per GPU)"
    if case.sync_batchnorm and machine.device_type == "cpu":
        return "SyncBatchNorm needs GPUs"
    return None


def _senseless(case: Case) -> str | None:
    """Why a case is measured on no machine: another one is the same, or torch.compile would break it."""
    if case.mode == "dp" and case.num_devices == 1:
        return "DataParallel on one device is the plain module; see single"
    if case.is_staged and (reason := _no_stages(case)):
        return reason
    if case.skip_all_reduce_unused_params and not (case.find_unused_parameters or case.static_graph):
        return "nothing looks for unused parameters; --find-unused-parameters on measures it"
    caps = case.bucket_cap_mb.mib
    refusals = {
        "DataParallel cannot replicate a compiled module": case.mode == "dp",
        f"{case.mode} is compared uncompiled": case.mode in COMPARATORS,
        f"CUDA graphs ({case.compile}) overwrite the gradients of earlier micro-batches": (
            case.compile in GRAPH_MODES and case.accumulate > 1
        ),
        "torch's DDPOptimizer refuses a cap below its first bucket of 1 MiB": (
            case.mode == "ddp" and len(caps) == 1 and caps[0] < 1 and case.optimize_ddp == DDP_OPTIMIZER
        ),
        f"DDP's Python reducer knows no {_unknown_to_python_reducer(case)}": (
            case.has_python_reducer and _unknown_to_python_reducer(case) != ""
        ),
    }
    found = next((why for why, holds in refusals.items() if holds), None)
    return None if found is None or case.compile == "off" else f"{found}; --compile off measures it"


def _no_stages(case: Case) -> str | None:
    """Why a model cannot be split over devices in this way; None where it can."""
    parts, n = case.num_micro_batches, case.num_devices
    refusals = {
        "on one device it is the plain module; see single": n == 1,
        f"a batch of {case.global_batch} does not divide into {parts} micro-batches": (
            case.global_batch % parts > 0
        ),
        f"1F1B keeps {n} devices busy with {n} micro-batches or more": (
            case.pipeline_schedule == "1f1b" and parts < n
        ),
        "loss scaling skips a step by all gradients, and a stage has its own; --precision bf16": (
            case.precision == "fp16"
        ),
    }
    return next((why for why, holds in refusals.items() if holds), None)


def _unknown_to_python_reducer(case: Case) -> str:
    """A setting that it would ignore or refuse; empty without one."""
    if len(case.bucket_cap_mb.mib) > 1:
        return "list of bucket caps"
    known = ("bucket_cap_mb", "accumulate", "optimize_ddp")
    changed = [name for name in DDP_AXES if stored(getattr(case, name)) != DDP_DEFAULTS[name]]
    return next((name for name in changed if name not in known), "")


def _too_few_for_dp(case: Case, machine: Machine) -> str:
    here, seen = machine.devices_per_node, machine.devices_per_process or machine.devices_per_node
    if seen < case.num_devices <= here:
        return (
            f"DataParallel needs {case.num_devices} GPUs in one process, and the first rank sees {seen} of "
            f"{here}; with Slurm, give --gpus-per-node or --gres instead of --gpus-per-task"
        )
    return f"DataParallel works within one machine: needs {case.num_devices} GPUs, there are {here}"


def _too_few_for_ranks(case: Case, machine: Machine, on_a_node: int) -> str:
    used = machine.rank_devices[: case.num_devices]
    if used:
        num_gpus = len(set(used))
        return f"{case.num_devices} ranks share {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
    return f"needs {on_a_node} GPUs per machine, there are {machine.devices_per_node}"


def world_size(plan: Sequence[Planned]) -> int:
    """Ranks the job needs: those of the largest case that runs, at least one."""
    return max((p.case.num_ranks for p in plan if not p.skip_reason), default=1)


def equal_layout_reason(case_id: str) -> str:
    """Why a case is skipped that has the bucket layout of `case_id`; `equal_layout` reads it back."""
    return f"same bucket layout as {case_id}; see its row"


def equal_layout(reason: str) -> str | None:
    """The case that was measured instead of a skipped one; None where it was skipped for another reason."""
    found = re.match(r"same bucket layout as (\S+);", reason)
    return None if found is None else found[1]


def round_order(num_cases: int, *, seed: int, round_index: int) -> list[int]:
    """A fresh random order of the cases for each round, the same on every rank."""
    order = list(range(num_cases))
    random.Random(f"{seed}/{round_index}").shuffle(order)  # noqa: S311 - a schedule, not a secret
    return order


def plan_hash(plan: Sequence[Planned]) -> str:
    """Identifies the sweep: equal for equal cases in equal order."""
    return hashlib.sha256("\n".join(p.case.case_id for p in plan).encode()).hexdigest()[:12]


LEAST_WARMUP_S = 2.0
"""Of a case on a GPU, where there is time: its clock rises with load, and its allocator settles."""

WARMUP_SHARE = 0.1
"""Share of the time limit that all of these together take at most."""


def least_warmup_s(plan: Sequence[Planned], settings: ResolvedSettings) -> float:
    """Least seconds that each case of a plan warms up; 0 on CPU cores, where a few steps are enough."""
    if settings.device != "cuda":
        return 0.0
    runnable = sum(p.skip_reason is None for p in plan)
    limit = math.inf if settings.max_time is None else settings.max_time
    return min(LEAST_WARMUP_S, WARMUP_SHARE * limit / max(runnable, 1))


def step_s_of(planned: Planned, *, step_s: float, single_batch: int) -> float:
    """Expected seconds of a step of a case, from those of `single_batch` samples on one device.

    Ranks that share a device are taken to run one after the other; communication is not counted.
    """
    sharing = planned.case.num_devices if planned.oversubscribed else 1
    return step_s * planned.case.batch_per_device * planned.case.accumulate * sharing / single_batch


def timed_block_s(planned: Planned, settings: ResolvedSettings, *, step_s: float, single_batch: int) -> float:
    """Expected seconds of a timed block of a case; arguments as of `step_s_of`."""
    own_s = step_s_of(planned, step_s=step_s, single_batch=single_batch)
    return settings.steps_per_block(own_s) * own_s


def estimate_s(
    plan: Sequence[Planned], *, step_s: float, single_batch: int, settings: ResolvedSettings
) -> float:
    """Expected seconds of measuring, from one measured step of `single_batch` samples on one device.

    Without communication (`step_s_of`), so a lower bound, cut off at the time limit.
    """
    run = [p for p in plan if not p.skip_reason]
    least = least_warmup_s(plan, settings)
    warmup = sum(max(5 * step_s_of(p, step_s=step_s, single_batch=single_batch), least) for p in run)
    per_round = sum(timed_block_s(p, settings, step_s=step_s, single_batch=single_batch) for p in run)
    limit = math.inf if settings.max_time is None else settings.max_time
    wanted = math.inf if settings.rounds is None else warmup + settings.rounds * per_round
    # The first round is always finished.
    return max(warmup + per_round, min(wanted, limit))
