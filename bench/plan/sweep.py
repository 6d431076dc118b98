"""The sweep as data: cases, and what is skipped and why."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..common.errors import UsageError
from ..common.numbers import format_count
from .buckets import parse_caps_mib
from .case import GRAPH_MODES, Case
from .case_settings import DDP_OPTIMIZER, SETTINGS_OF, STEP_DEFAULTS
from .modes import RANK_PER_DEVICE, SPECS
from .settings import IMAGES, ResolvedSettings

SHARING = "--share-gpus on shows that it works, and nothing of its speed"
"""Advice where there are too few GPUs for a case."""

EXCLUSIVE = (
    "GPUs in compute mode EXCLUSIVE_PROCESS take one process, and other ranks hold them; measure --modes dp "
    "by itself, or set nvidia-smi -c DEFAULT"
)
"""Why DP, which opens every GPU in the first rank's process, is left out beside other ranks."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine and ranks that a run has."""

    device_type: str
    devices_per_node: int
    rank_hosts: tuple[str, ...] = ()
    """The host of each rank that a launcher (torchrun, srun) has started; empty: the run starts its own."""
    devices_per_process: int | None = None
    """Devices that the first of such ranks sees: one with Slurm's --gpus-per-task; None: all of its host."""
    staged_backend: str = ""
    """Backend that torch asks for under pipelines in the place of `nccl`; empty: nothing else."""
    is_exclusive: bool = False
    """True where a GPU takes a single process, so that DP of the first rank has none beside other ranks."""
    rank_devices: tuple[str, ...] = ()
    """The device of each such rank; several may share one. Empty: each has its own while there are enough."""

    @property
    def num_nodes(self) -> int:
        return len({*self.rank_hosts}) or 1


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case and what is known of it before anything runs."""

    case: Case
    num_nodes: int
    oversubscribed: bool
    skip_reason: str | None = None


def expand_cases(
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
    _check(settings)
    counts = settings.gpus

    def make_case(batch: int, compile_mode: str, mode: str, n: int, **extra: Any) -> Case:
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
            **{name: settings.get_first(name) for name in STEP_DEFAULTS} | {"compile": compile_mode},
            **extra,
        )

    cases = []
    for batch, compiled in _pair_variants(settings):
        cases.append(make_case(batch, compiled, "single", 1))
        if "dp" in settings.modes:
            cases += [make_case(batch, compiled, "dp", n) for n in counts]
        for mode in (mode for mode in RANK_PER_DEVICE if mode in settings.modes):
            points = [
                (n, point) for n in counts for point in _expand_axes(settings, mode, n, batch, compiled)
            ]
            staged = SPECS[mode].is_staged and settings.backend == "nccl" and machine.staged_backend
            backend = staged or settings.backend
            cases += [make_case(batch, compiled, mode, n, backend=backend, **point) for n, point in points]
    planned = [_plan_case(c, machine, settings) for c in cases]
    if machine.is_exclusive and max(count_ranks(planned), len(machine.rank_hosts)) > 1:
        planned = [
            replace(p, skip_reason=p.skip_reason or EXCLUSIVE) if p.case.spec.has_replicas else p
            for p in planned
        ]
    if any(p.oversubscribed and is_calibrated(p.case, settings) for p in planned):
        raise UsageError(
            f"--calibrate on looks into {max(counts)} ranks, which share devices here: nothing follows for "
            "ranks with one each; leave it out, or calibrate with fewer: --gpus 1"
        )
    return planned


def _pair_variants(settings: ResolvedSettings) -> list[tuple[int, str]]:
    """Pair batch sizes with modes of torch.compile; each pair has a `single`, and under `star` one varies."""
    every = itertools.product(settings.batch_size, map(str, settings.axes["compile"]))
    first = settings.batch_size[0], settings.get_first("compile")
    return [one for one in every if settings.sweep == "grid" or one[0] == first[0] or one[1] == first[1]]


def _check(settings: ResolvedSettings) -> None:
    """Raise UsageError for what no case of these settings can do."""
    if settings.axes["compile"] == ("off",) and settings.axes["optimize_ddp"] != (DDP_OPTIMIZER,):
        raise UsageError("--optimize-ddp is about compiled DDP; give --compile on, or off,on, with it")
    if settings.calibrate and settings.get_first("comm_hook") == "powersgd":
        raise UsageError(
            "--calibrate on looks into the first --comm-hook, and of powersgd nothing can be predicted: its "
            "messages are not the buckets; name another one first, as in --comm-hook none,powersgd"
        )
    if settings.scaling == "strong" and settings.axes["accumulate"] != (1,):
        raise UsageError(
            "--scaling strong fixes the batch of a step, and --accumulate multiplies it; give one of them"
        )
    for batch, n in itertools.product(settings.batch_size, settings.gpus):
        if settings.scaling == "strong" and batch % n:
            raise UsageError(
                f"--batch-size {batch} does not divide over {n} devices under strong scaling; "
                f"use a multiple of {' and '.join(map(str, settings.gpus))}"
            )


def is_calibrated(case: Case, settings: ResolvedSettings) -> bool:
    """Tell whether the calibration pass includes a case: the largest count, the first value of each axis."""
    first = settings.get_first("compile")
    return (
        settings.calibrate
        and case.spec.has_buckets
        and "calibration" not in case.unmeasured
        and case.num_devices == max(settings.gpus)
        and (case.batch, case.compile) == (settings.batch_size[0], first)
        and all(
            getattr(case, name) == values[0]
            for name, values in _list_axes(settings, case.mode, first).items()
        )
    )


def _list_axes(settings: ResolvedSettings, mode: str, compiled: str) -> dict[str, tuple[Any, ...]]:
    """Values of every setting of a mode; how compiled DDP is optimised means nothing to eager cases."""
    axes = {setting.name: settings.axes[setting.name] for setting in SETTINGS_OF.get(mode, ())}
    return (
        axes | {"optimize_ddp": (DDP_OPTIMIZER,)} if SPECS[mode].has_buckets and compiled == "off" else axes
    )


def _expand_axes(
    settings: ResolvedSettings, mode: str, num_devices: int, batch: int, compiled: str
) -> list[dict[str, Any]]:
    """Return a mode's settings to measure at one device count: all combinations, or one varied at a time."""
    axes = _list_axes(settings, mode, compiled)
    if num_devices == 1 and SPECS[mode].has_buckets:
        # Without communication the buckets change nothing: one cap, and one way to split at it, are enough.
        axes |= {name: axes[name][:1] for name in ("bucket_cap_mb", "optimize_ddp")}
    if settings.sweep == "grid":
        return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    base = {name: values[0] for name, values in axes.items()}
    if num_devices == 1 or batch != settings.batch_size[0]:
        return [base]
    of_compiled = {name: values for name, values in axes.items() if name == "optimize_ddp"}
    varied = axes if compiled == settings.get_first("compile") else of_compiled
    return [base, *({**base, name: value} for name, values in varied.items() for value in values[1:])]


def _plan_case(case: Case, machine: Machine, settings: ResolvedSettings) -> Planned:
    ranks_on = Counter(machine.rank_hosts[: case.num_ranks]) or Counter([""] * case.num_ranks)
    nodes = len(ranks_on)
    on_a_node = max(ranks_on.values()) if case.spec.rank_per_device else case.num_devices
    shared = _is_shared(case, machine, on_a_node)
    reason = _find_skip_reason(case, machine, on_a_node, shared=shared and not settings.share_gpus)
    if settings.share_gpus and machine.device_type == "cuda" and case.mode != "single":
        shared = True  # what lets ranks share GPUs holds for the processes, in cases that share none too
    is_unasked = not settings.caps_given and case.bucket_cap_mb != settings.get_first("bucket_cap_mb")
    if reason is None and case.spec.has_buckets and shared and is_unasked:
        reason = "where devices are shared, caps cannot be compared; --bucket-cap-mb CAP measures one anyway"
    return Planned(case=case, num_nodes=nodes, oversubscribed=shared, skip_reason=reason)


def _is_shared(case: Case, machine: Machine, on_a_node: int) -> bool:
    """Tell whether two ranks or replicas of a case would have the same device."""
    used = machine.rank_devices[: case.num_devices]
    if case.spec.rank_per_device and used:
        return len(set(used)) < len(used)
    return on_a_node > (machine.devices_per_process or machine.devices_per_node)


def _find_skip_reason(case: Case, machine: Machine, on_a_node: int, *, shared: bool) -> str | None:
    if (reason := _find_refusal(case)) is not None:
        return reason
    started = len(machine.rank_hosts)
    if started and case.spec.rank_per_device and case.num_devices > started:
        return f"needs {case.num_devices} ranks, the launcher started {started}"
    needs_its_own = case.spec.has_replicas or case.backend.startswith("nccl")
    if machine.device_type == "cuda" and shared and needs_its_own:
        return _explain_too_few(case, machine, on_a_node)
    if case.sync_batchnorm and machine.device_type == "cpu":
        return "SyncBatchNorm needs GPUs"
    return None


def _find_refusal(case: Case) -> str | None:
    """Why a case is measured on no machine: another one is the same, or it cannot be; None where it can."""
    n, parts, caps = case.num_devices, case.num_micro_batches, parse_caps_mib(case.bucket_cap_mb)
    ways = "--find-unused-parameters on or --static-graph on"
    looks_for_unused = case.find_unused_parameters or case.static_graph
    refusals = {
        "DataParallel on one device is the plain module; see single": case.spec.has_replicas and n == 1,
        "on one device it is the plain module; see single": case.spec.is_staged and n == 1,
        f"a batch of {case.global_batch} does not divide into {parts} micro-batches": (
            case.spec.is_staged and case.global_batch % parts > 0
        ),
        f"1F1B keeps {n} devices busy with {n} micro-batches or more": (
            case.spec.is_staged and case.pipeline_schedule == "1f1b" and parts < n
        ),
        "loss scaling skips a step by all gradients, and a stage has its own; --precision bf16": (
            case.spec.is_staged and case.precision == "fp16"
        ),
        f"nothing looks for unused parameters; {ways} measures it": (
            case.skip_all_reduce_unused_params and not looks_for_unused
        ),
        "over gloo PowerSGD hangs while DDP looks for unused parameters: torch sends which those are between "
        "the hook's all-reduces, in another order on each rank; --find-unused-parameters off measures it": (
            case.comm_hook == "powersgd" and case.backend == "gloo" and case.find_unused_parameters and n > 1
        ),
        f"its parameters are {case.mp_policy}; --precision {case.mp_policy} compares it with autocast": (
            case.mp_policy not in ("none", case.precision)
        ),
    }
    of_compiled = {
        "DataParallel cannot replicate a compiled module": case.spec.has_replicas,
        f"{case.mode} is compared uncompiled": case.spec.is_comparator,
        f"CUDA graphs ({case.compile}) overwrite the gradients of earlier micro-batches": (
            case.compile in GRAPH_MODES and case.accumulate > 1
        ),
        "torch's DDPOptimizer refuses a cap below its first bucket of 1 MiB": (
            case.spec.has_buckets and len(caps) == 1 and caps[0] < 1 and case.optimize_ddp == DDP_OPTIMIZER
        ),
    }
    if case.compile != "off":
        refusals |= {f"{why}; --compile off measures it": holds for why, holds in of_compiled.items()}
    return next((why for why, holds in refusals.items() if holds), None)


def _explain_too_few(case: Case, machine: Machine, on_a_node: int) -> str:
    """Return the same for every mode and count of one machine, so that a run says it once."""
    here, seen = machine.devices_per_node, machine.devices_per_process or machine.devices_per_node
    if case.spec.has_replicas and seen < case.num_devices <= here:
        return (
            f"DataParallel needs {case.num_devices} GPUs in one process, and the first rank sees {seen} of "
            f"{here}; with Slurm, give --gpus-per-node or --gres instead of --gpus-per-task"
        )
    if case.spec.rank_per_device:
        here = len(set(machine.rank_devices[: case.num_devices])) or here
    if machine.num_nodes > 1:
        why = "DataParallel works within one machine: " if case.spec.has_replicas else ""
        return f"{why}needs {on_a_node} GPUs per machine, there are {here}"
    return f"more than {format_count(here, 'GPU')}; {SHARING}"


def count_ranks(plan: Sequence[Planned]) -> int:
    """Ranks the job needs: those of the largest case that runs, at least one."""
    return max((p.case.num_ranks for p in plan if not p.skip_reason), default=1)


def hash_plan(plan: Sequence[Planned]) -> str:
    """Identify the sweep: equal for equal cases in equal order."""
    return hashlib.sha256("\n".join(p.case.case_id for p in plan).encode()).hexdigest()[:12]
