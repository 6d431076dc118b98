"""A workload: everything that is trained, identical in every mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from bench.errors import UsageError, UserCodeError
from bench.settings import MOST_UNITS

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets; dimension 0 is the batch in both."""

_UNIT = re.compile(r"[^\s/,]+")


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum 0.9, the optimizer of the ResNet papers."""
    return SGD(parameters, lr=0.01, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, batch maker, loss and optimizer: the same in `single`, `dp` and `ddp`.

    `image_size` is the height and width of an image in pixels, where the inputs are images.
    """

    name: str
    module: Callable[[], nn.Module]
    """Makes a fresh module, initialised from torch's global random state."""
    batch: Callable[[int, torch.Generator], Batch]
    """Makes a batch on the host from a batch size and a CPU generator."""
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    """Maps outputs and targets to a scalar, the mean over the batch."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """Gives a module as layers, each called with what the one before it returned: what can be split over
    devices. An `nn.Sequential` needs none."""
    image_size: int | None = None
    channels_last: bool = False
    """Whether `make_module` and `make_batch` give weights and images (N, C, H, W) in that memory format."""
    unit: str = "samples"
    """What throughput counts, a plural noun: `images`, `tokens`."""
    units_per_sample: int = 1
    """How many of them a row of the batch holds; of a language model the sequence length."""


def layers_of(workload: Workload, module: nn.Module) -> list[nn.Module]:
    """Give the layers of a module of the workload in their order; none where it is no sequence."""
    if workload.layers is not None:
        return list(workload.layers(module))
    return list(module) if isinstance(module, nn.Sequential) else []


def check_unit(workload: Workload) -> None:
    """Raise UsageError unless `unit` is one printable word and `units_per_sample` a count."""
    unit, how_many = workload.unit, workload.units_per_sample
    if not isinstance(unit, str) or not _UNIT.fullmatch(unit) or not unit.isprintable():
        raise UsageError(
            f"`unit` of workload {workload.name} is {unit!r}; give a plural noun in one word, without slash "
            "or comma, such as tokens"
        )
    if type(how_many) is not int or not 1 <= how_many <= MOST_UNITS:
        raise UsageError(
            f"`units_per_sample` of workload {workload.name} is {how_many!r}; give a whole number from 1 to "
            f"{MOST_UNITS:,d}, such as the sequence length"
        )


def one_line(exc: BaseException) -> str:
    """Type and message of an exception, on one line."""
    return " ".join(f"{type(exc).__name__}: {exc}".split()).removesuffix(":")


def make_module(workload: Workload) -> nn.Module:
    """Make a fresh module of the workload.

    Raises UserCodeError where the workload's own code raises and UsageError where it makes no module.
    """
    try:
        module = workload.module()
    except Exception as exc:
        raise UserCodeError(
            f"the module of workload {workload.name} cannot be made: {one_line(exc)}"
        ) from exc
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"`module` of workload {workload.name} returned {type(module).__name__}; return an nn.Module"
        )
    return module.to(memory_format=torch.channels_last) if workload.channels_last else module


def make_batch(workload: Workload, *, batch_size: int, generator: torch.Generator) -> Batch:
    """Make one host batch and check that it is a pair of tensors with `batch_size` rows each.

    Raises UserCodeError where the workload's own code raises and UsageError where the batch is malformed.
    """
    try:
        batch = workload.batch(batch_size, generator)
    except Exception as exc:
        raise UserCodeError(
            f"workload {workload.name} cannot make a batch of {batch_size}: {one_line(exc)}"
        ) from exc
    if not _is_batch(batch, batch_size):
        raise UsageError(
            f"`batch` of workload {workload.name} returned {_describe(batch)} for batch size {batch_size}; it"
            f" must return (inputs, targets), two tensors with {batch_size} rows each"
        )
    return in_format(workload, batch)


def in_format(workload: Workload, batch: Batch) -> Batch:
    """Bring the images of a batch into the workload's memory format; other inputs stay as they are."""
    inputs, targets = batch
    if not workload.channels_last or inputs.ndim != 4:
        return batch
    return inputs.contiguous(memory_format=torch.channels_last), targets


def _is_batch(batch: object, batch_size: int) -> bool:
    return (
        isinstance(batch, tuple)
        and len(batch) == 2
        and all(isinstance(part, Tensor) and part.shape[:1] == (batch_size,) for part in batch)
    )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"
    return type(value).__name__
