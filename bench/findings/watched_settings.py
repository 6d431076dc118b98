"""Says which settings of a watched training cost time, and which line or argument to change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ..common.numbers import format_count, format_number
from ..common.text import escape_controls
from ..machine.watched import Measured, WatchedSetting
from ..stats.interval import Interval
from .verdicts import MIN_SHARE, Saving

COMMON_SETTINGS = ("buffers", "loader")
"""Settings that every training has: they are told from `MIN_SHARE` of the step on."""

PACKAGES = {
    "transformers": "TrainingArguments",
    "accelerate": "DistributedDataParallelKwargs, one of Accelerator's kwargs_handlers",
    "lightning": "DDPStrategy",
}
"""Classes that take DDP's arguments, of packages that wrap a model for their users."""

REDUCED = "reduced"
"""Value of `unused` where the cost holds the all-reduce of which parameters were used."""

TRAINER_NAMES = {"forward_sync_buffers": "ddp_broadcast_buffers"}
"""Names of TrainingArguments that are not made of a prefix and the argument's own name."""


class SettingsAdvice(NamedTuple):
    """Changes of a training's settings that are worth trying."""

    savings: tuple[Saving, ...] = ()
    """Settings whose cost was measured, the largest first."""
    unmeasured: tuple[tuple[str, str], ...] = ()
    """Settings whose cost was not measured, or not told from noise, each with its remedy."""


def make_interval(found: Measured) -> Interval:
    """Turn what a manifest holds into an interval."""
    ends = (math.nan if end is None else end for end in (found.low, found.high))
    return Interval(found.estimate, *ends)


def conclude_settings(
    found: Iterable[WatchedSetting], exposed_ms: Interval | None, step_ms: float
) -> SettingsAdvice:
    """Conclude what settings cost; `exposed_ms` is what communication adds to a step of `step_ms`."""
    savings, unmeasured = list[Saving](), list[tuple[str, str]]()
    for one in found:
        cost = make_interval(one.cost_ms) if one.cost_ms else None
        if one.name == "micro-steps" and exposed_ms is not None and one.of:
            cost = exposed_ms.scale(one.amount / one.of)
        what, remedy = map(escape_controls, _describe(one))
        least_ms = MIN_SHARE * step_ms if one.name in COMMON_SETTINGS else 0.0
        if cost is not None and cost.low > 0 and cost.estimate >= least_ms:
            savings.append(Saving(cost, what, remedy))
        elif one.name not in COMMON_SETTINGS:
            is_bounded = cost is not None and math.isfinite(cost.high)
            bound = f" (at most {format_number(max(cost.high, 0.0), 2)} ms)" if cost and is_bounded else ""
            unmeasured.append((f"{what}{bound}", remedy))
    return SettingsAdvice(tuple(sorted(savings, key=lambda one: -one.ms.estimate)), tuple(unmeasured))


def _describe(one: WatchedSetting) -> tuple[str, str]:
    """Name what takes the time, and what to try against it."""
    at, amount = f" ({one.line})" if one.line else "", one.amount
    workers = f"more than {amount}" if amount else "2"
    return {
        "micro-steps": (
            f"averaging gradients {format_count(amount, 'time')} before an accumulation is complete",
            f"no_sync() around forward and backward of every micro-step but the last{at}",
        ),
        "unused": (
            "the search for unused parameters, of which there are none ("
            + ("the upper end with" if one.value == REDUCED else "without")
            + " the all-reduce of which were used)",
            _name_argument(one, "find_unused_parameters", "False", "ddp_"),
        ),
        "buffers": (
            "DDP's broadcast of buffers",
            f"{_name_argument(one, one.value, 'False', 'ddp_')}, if ranks may keep buffers of their own",
        ),
        "loader": (
            f"waiting for a loader with {format_count(amount, 'worker')} on each rank (the lower end where "
            "workers find no free core)",
            _name_argument(one, "num_workers", workers, "dataloader_"),
        ),
        "pinning": (
            "copying batches to the GPU from memory that is not pinned",
            _name_argument(one, "pin_memory", "True", "dataloader_"),
        ),
        "epoch": (
            f"the same order of samples in {amount} epochs, for the sampler's epoch is never set",
            f"sampler.set_epoch(epoch) before each pass over the DataLoader{at}",
        ),
        "data-parallel": (
            f"nn.DataParallel, which trains on {amount} GPUs from one process",
            f"DistributedDataParallel, started by torchrun with a process for each GPU{at}",
        ),
        "threads": (
            f"{amount} threads of operators on {format_count(one.of, 'core')}",
            f"OMP_NUM_THREADS={one.value} before the launcher, or torch.set_num_threads({one.value})",
        ),
        "host": (
            f"a host that queues work more slowly than its GPU does it, in parts of {amount}% of a step",
            "a larger batch, torch.compile, or less Python and fewer .item() calls in a step",
        ),
        "debug": (f"the checks of TORCH_DISTRIBUTED_DEBUG={one.value}", "TORCH_DISTRIBUTED_DEBUG=OFF"),
    }.get(one.name, (one.name, ""))


def _name_argument(one: WatchedSetting, name: str, value: str, prefix: str) -> str:
    """Name an argument of DDP or of a loader where the user can set it; `prefix` is that of a Trainer."""
    is_of_ddp, package = prefix == "ddp_", one.made_by
    if package == "transformers":
        name = TRAINER_NAMES.get(name, f"{prefix}{name}")
    if package in PACKAGES and (is_of_ddp or package == "transformers"):
        return f"{name}={value} in {PACKAGES[package]}"
    at = f" ({one.line})" if one.line else ""
    return f"{name}={value} in {'DistributedDataParallel' if is_of_ddp else 'DataLoader'}{at}"
