"""Says what costs a watched training time, by its settings, and which line or argument to change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ..common.numbers import choose_places, format_count, format_interval, format_number, format_to_places
from ..common.text import escape_controls
from ..machine.watched import Measured, WatchedSetting
from ..stats.interval import Interval
from .verdicts import MIN_SHARE

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

MOST = "up to "
"""Beginning of a share of which only the upper limit tells anything."""

BOUNDS = {
    REDUCED: "; the lower end assumes that the search's all-reduce costs as much as all gradients",
    "loader": "; if workers and ranks share cores, the step takes longer than this",
}
"""Meanings of the ends of what a step would take."""


class Cost(NamedTuple):
    """Finding that costs a watched training time, and the change against it."""

    title: str
    fact: str
    """Sentence that says what takes the time."""
    remedy: str
    """Sentence that says what to change, and what a step would take then."""
    ms: Interval | None = None
    """Milliseconds of each step, which are the most that the change saves; None where they are not known."""
    change: str = ""
    """Change to make, as a sentence without its full stop; empty where none is known."""
    after_ms: Interval | None = None
    """Milliseconds that a step would take after the change; None where they are not known."""

    def describe_size(self, step: Interval | None) -> str:
        """Say what the change saves of a step at most; where that is not known, what the cost is."""
        if self.ms is None:
            return "cost not measured"
        share = describe_share(self.ms, step)
        ms = write_estimate(self.ms, self.ms.high if share.startswith(MOST) else self.ms.estimate)
        size = ", ".join(filter(None, (ms, share.removeprefix(MOST))))
        return f"a fix saves up to {size}" if self.after_ms and self.change else f"costs {size}"


def make_interval(found: Measured) -> Interval:
    """Turn what a manifest holds into an interval."""
    ends = (math.nan if end is None else end for end in (found.low, found.high))
    return Interval(found.estimate, *ends)


def write_estimate(found: Interval, ms: float | None = None) -> str:
    """Write the estimate of an interval, or another value of it, with as many places as with its ends."""
    value = found.estimate if ms is None else ms
    return format_to_places(Interval(value, math.nan, math.nan), choose_places(found), "ms")


def describe_share(cost: Interval | None, step: Interval | None) -> str:
    """Say which share of a step a cost is, its most where that is far more; empty where one is not known."""
    if not cost or not step:
        return ""
    share, most = (100 * ms / step.estimate for ms in (cost.estimate, cost.high))
    return f"{MOST}{most:.0f}% of each step" if most > 2 * share + 1 else f"{share:.0f}% of each step"


def predict_step(step: Interval | None, after: Interval | None) -> str:
    """Say what a step would take without a cost; empty where the step is not known."""
    if step is None or after is None:
        return ""
    return f"a step would take {format_interval(after, 'ms')} instead of {write_estimate(step)}"


def conclude_settings(
    found: Iterable[WatchedSetting], exposed_ms: Interval | None, step: Interval | None, load: str = ""
) -> list[Cost]:
    """Conclude what settings cost; `exposed_ms` is what communication adds to a step of `step` ms.

    Those whose cost was not measured, or is not told from noise, have none. `load` says what other programs
    used where that is much: nobody knows then what workers of a loader save.
    """
    costs = list[Cost]()
    for one in found:
        ms = make_interval(one.cost_ms) if one.cost_ms else None
        if one.name == "micro-steps" and exposed_ms is not None and one.of:
            ms = exposed_ms.scale(one.amount / one.of)
        known = ms if ms and ms.low > 0 else None
        takes, then, after_ms = "costs time that was not measured", "", None
        if known:
            takes = f"takes {format_interval(known, 'ms')}, {describe_share(known, step)}"
            if one.name == "loader" and load:
                then = f". How much that saves is not known: {load}"
            elif step:
                after_ms = step.subtract(known)
                then = f": {predict_step(step, after_ms)}{BOUNDS.get(one.value or one.name, '')}"
        elif ms and math.isfinite(ms.high):
            takes = f"takes at most {format_number(max(ms.high, 0.0), 2)} ms of each step"
        fact, change = map(escape_controls, _describe(one, takes))
        change = f"Try {change}"
        is_large = known and step and known.estimate >= MIN_SHARE * step.estimate
        if is_large or one.name not in COMMON_SETTINGS:
            costs.append(Cost(one.name.capitalize(), f"{fact}.", f"{change}{then}.", known, change, after_ms))
    return costs


def _describe(one: WatchedSetting, takes: str) -> tuple[str, str]:
    """Say that a setting `takes` time, and what to change."""
    at, amount = f" ({one.line})" if one.line else "", one.amount
    workers = f"{2 * amount or 2}"
    return {
        "micro-steps": (
            f"Averaging gradients {format_count(amount, 'time')} before an accumulation is complete {takes}",
            f"no_sync() around forward and backward of every micro-step but the last{at}",
        ),
        "unused": (
            f"The search for unused parameters, of which there are none, {takes}",
            _name_argument(one, "find_unused_parameters", "False", "ddp_"),
        ),
        "buffers": (
            f"DDP's broadcast of buffers {takes}",
            f"{_name_argument(one, one.value, 'False', 'ddp_')}, if ranks may keep buffers of their own",
        ),
        "loader": (
            f"Waiting for a DataLoader with {format_count(amount, 'worker')} on each rank {takes}",
            _name_argument(one, "num_workers", workers, "dataloader_"),
        ),
        "pinning": (
            "Batches are copied to the GPU from memory that is not pinned",
            _name_argument(one, "pin_memory", "True", "dataloader_"),
        ),
        "epoch": (
            f"Samples have the same order in {amount} epochs, for the sampler's epoch is never set",
            f"sampler.set_epoch(epoch) before each pass over the DataLoader{at}",
        ),
        "data-parallel": (
            f"One process trains on {amount} GPUs through nn.DataParallel",
            f"DistributedDataParallel, started by torchrun with a process for each GPU{at}",
        ),
        "threads": (
            f"{amount} threads of operators share {format_count(one.of, 'core')}",
            f"OMP_NUM_THREADS={one.value} before the launcher, or torch.set_num_threads({one.value})",
        ),
        "host": (
            "The GPU has done all that its host has queued, and waits for more, at the end of parts that "
            f"make {one.value or f'{amount}%'} of a step",
            "a larger batch, torch.compile, or less Python and fewer .item() calls in a step",
        ),
        "debug": (
            f"TORCH_DISTRIBUTED_DEBUG={one.value} checks the ranks' collectives",
            "TORCH_DISTRIBUTED_DEBUG=OFF",
        ),
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
