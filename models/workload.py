"""A workload: everything that is trained, identical in every mode."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.optim import SGD, Optimizer

from ..bench.common.errors import USER_EXCEPTIONS, UsageError, UserCodeError
from ..bench.plan.settings import MAX_UNITS
from .nested import CONSTANT_TYPES, describe, list_leaves, list_tensors, map_tensors

Batch = Any
"""Tensors in any nesting of tuples, lists, dicts and objects. Mostly a pair (inputs, targets)."""

Loss = Callable[[Callable[..., Any], Batch], Tensor]
"""Maps model and batch to a scalar."""

EXPECTED = {
    "module": "module() and returns a new nn.Module",
    "batch": "batch(batch_size, generator) and returns (inputs, targets)",
    "loss": "loss(outputs, targets) and returns a scalar tensor, the mean over the rows",
    "batch_loss": "batch_loss(model, batch) and returns a scalar tensor, the mean over the rows",
    "optimizer": "optimizer(parameters) and returns a torch.optim.Optimizer",
    "layers": "layers(module) and returns its layers in order, each an nn.Module",
}
"""Call and return value of each function of a workload, for error messages."""

TRIAL_SIZES = (2, 4)
"""Batch sizes that tell whether tensors have a row for each sample: at one of them channels may look so."""

_REQUIRED: Any = None
"""Default of a field that has to be given: its absence is told in words of the workload."""

_UNIT = re.compile(r"[^\s/,]+")


def make_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum 0.9, the optimizer of the ResNet papers."""
    return SGD(parameters, lr=0.01, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, batch maker, loss and optimizer: the same in every mode.

    `image_size` is the height and width of an image in pixels, where the inputs are images. Raises UsageError
    where a function is missing, or both losses are given.
    """

    name: str = ""
    module: Callable[[], nn.Module] = _REQUIRED
    """Makes a fresh module, initialised from torch's global random state."""
    batch: Callable[[int, torch.Generator], Batch] = _REQUIRED
    """Makes a batch on the host from a batch size and a CPU generator, and from nothing else: not from the
    rank, its environment or an earlier call, for every rank makes the batch of the proof, and it has to be
    the same one.

    It returns (inputs, targets). Inputs go to the module: a tensor as one argument, a tuple as positional
    ones, a dict as keyword arguments. With `batch_loss` the batch is any nesting of tuples, lists, dicts and
    objects with tensors; None, numbers and strings may stand beside them. Where each tensor has `batch_size`
    rows in dimension 0, a batch can be split; where not, as of graphs, `dp` is skipped."""
    loss: Callable[[Any, Any], Tensor] = functional.cross_entropy
    """Maps outputs and targets to a scalar, best the mean over rows of equal weight.

    DDP averages the means of the ranks. Where a loss masks tokens and divides by the number of those that are
    left, the rows of a rank with few of them weigh more: DDP's gradient is then not that of `single`, and a
    caution says so. Average within each row first, then over the rows, and they are the same."""
    batch_loss: Callable[[Callable[..., Any], Batch], Tensor] | None = None
    """Maps model and batch to the same scalar, instead of `loss`, for a batch of any shape.

    It calls the model that it is given, which is the mode's wrapper. In `dp` a scalar that the module itself
    computes comes back as one value for each device: take its mean."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = make_sgd
    """Makes the optimizer of a list of parameters: all of the module's, in `fsdp` as shards, in a pipeline
    those of one stage."""
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """Gives a module as layers, each called with what the one before it returned: what can be split over
    devices. An `nn.Sequential` needs none."""
    image_size: int | None = None
    channels_last: bool = False
    """True where `make_module` and `make_batch` give weights and images (N, C, H, W) in channels_last."""
    unit: str = "samples"
    """Unit that throughput counts, a plural noun: `images`, `tokens`."""
    units_per_sample: int = 1
    """Units in a row of the batch; of a language model the sequence length."""

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a Workload has no name; give it one, such as Workload(name='mine', …)")
        for field in ("module", "batch"):
            if getattr(self, field) is None:
                raise UsageError(f"workload {self.name} has no `{field}`: it is called as {EXPECTED[field]}")
        if self.batch_loss is not None and self.loss not in (None, functional.cross_entropy):
            raise UsageError(
                f"workload {self.name} has `loss` and `batch_loss`; keep loss(outputs, targets) for a batch "
                "(inputs, targets), or batch_loss(model, batch) for any other"
            )


def make_loss_function(workload: Workload) -> Loss:
    """Return the workload's loss as a function of model and batch, whichever of the two it has."""
    if workload.batch_loss is not None:
        return workload.batch_loss
    loss = workload.loss

    def compute_pair_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
        inputs, targets = batch
        arguments, named = split_arguments(inputs)
        return loss(model(*arguments, **named), targets)

    return compute_pair_loss


def split_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that a module is called with for the inputs of a pair."""
    if isinstance(inputs, dict):
        return (), inputs
    is_several = isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence)
    return (inputs if is_several else (inputs,)), {}


def list_layers(workload: Workload, module: nn.Module) -> list[nn.Module]:
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
    if type(how_many) is not int or not 1 <= how_many <= MAX_UNITS:
        raise UsageError(
            f"`units_per_sample` of workload {workload.name} is {how_many!r}; give a whole number from 1 to "
            f"{MAX_UNITS:,d}, such as the sequence length"
        )


def format_error(exc: BaseException) -> str:
    """Type and message of an exception, on one line."""
    return " ".join(f"{type(exc).__name__}: {exc}".split()).removesuffix(":")


@contextlib.contextmanager
def report_user_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Within it the user's code runs: what it raises becomes a UserCodeError, `what` and why in one line."""
    try:
        yield
    except UsageError:
        raise  # a Workload says itself what it lacks
    except USER_EXCEPTIONS as exc:
        raise UserCodeError(f"{what}: {format_error(exc)}{remedy}") from exc


def make_module(workload: Workload) -> nn.Module:
    """Make a fresh module of the workload.

    Raises UserCodeError where the workload's own code raises and UsageError where it makes no module.
    """
    with report_user_errors(f"the module of workload {workload.name} cannot be made"):
        module = workload.module()
    if not isinstance(module, nn.Module):
        raise make_result_error(workload, "module", module)
    return module.to(memory_format=torch.channels_last) if workload.channels_last else module


def make_batch(workload: Workload, *, batch_size: int = 2, generator: torch.Generator | None = None) -> Batch:
    """Make one host batch and check its shape: a pair for `loss`, and rows where other batches have them.

    Without a `generator` it is always the same. Two samples: some models squeeze away a batch of one.
    Raises UserCodeError where the workload's own code raises and UsageError where the batch is malformed.
    """
    batch = _call_batch(workload, batch_size, generator)
    wrong = _explain_batch_error(workload, batch)
    if not wrong and not _has_rows(batch, batch_size) and has_rows(workload):
        wrong = f"it must return tensors with {batch_size} rows each, in dimension 0, as for smaller batches"
    if wrong:
        raise UsageError(
            f"`batch` of workload {workload.name} returned {describe(batch)} for batch size {batch_size};"
            f" {wrong}"
        )
    return apply_memory_format(workload, batch)


def has_rows(workload: Workload) -> bool:
    """Tell whether each tensor of a batch has a row for each sample in dimension 0, by which it can be split.

    Graphs, bags, packed sequences and lists of images have none, nor have sparse and nested tensors.
    """
    return all(_has_rows(_call_batch(workload, size, None), size) for size in TRIAL_SIZES)


def _call_batch(workload: Workload, batch_size: int, generator: torch.Generator | None) -> Batch:
    with report_user_errors(f"workload {workload.name} cannot make a batch of {batch_size}"):
        return workload.batch(batch_size, generator or torch.Generator().manual_seed(0))


def _has_rows(batch: Batch, number: int) -> bool:
    return all(
        one.layout == torch.strided and not one.is_nested and one.shape[:1] == (number,)
        for one in list_tensors(batch)
    )


def make_result_error(workload: Workload, field: str, result: object) -> UsageError:
    """Make the error of a function of the workload that returned something else than it should."""
    returned = f"`{field}` of workload {workload.name} returned {describe(result)}"
    return UsageError(f"{returned}; it is called as {EXPECTED[field]}")


def check_loss(workload: Workload, loss: object) -> None:
    """Raise UsageError unless `loss`, what the workload's loss returned, can be trained with."""
    field = "loss" if workload.batch_loss is None else "batch_loss"
    if isinstance(loss, Tensor) and loss.ndim == 1 and workload.batch_loss is not None:
        raise UserCodeError(  # it fails DP alone
            f"{make_result_error(workload, field, loss)}; in dp a loss that the module computes has one "
            "value for each device: take its mean()"
        )
    if not isinstance(loss, Tensor) or loss.ndim:
        raise make_result_error(workload, field, loss)
    if not loss.requires_grad:
        raise UsageError(
            f"`{field}` of workload {workload.name} returned a tensor without gradient; compute it from what"
            " the model returns, without detach(), item() or no_grad()"
        )


def is_pair_of_tensors(batch: Batch) -> bool:
    """Tell whether a batch is two tensors, such as images and their classes."""
    return isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)


def apply_memory_format(workload: Workload, batch: Batch) -> Batch:
    """Bring the images of a batch into the workload's memory format; all else stays as it is."""
    if not workload.channels_last:
        return batch
    if workload.batch_loss is not None:
        return map_tensors(_apply_channels_last, batch)
    inputs, targets = batch
    return map_tensors(_apply_channels_last, inputs), targets


def _apply_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if is_image(tensor) else tensor


def is_image(tensor: Tensor) -> bool:
    """Tell whether a tensor has the shape (N, C, H, W), and is no mask."""
    return tensor.ndim == 4 and tensor.dtype != torch.bool


def _explain_batch_error(workload: Workload, batch: object) -> str:
    """Say what to return instead; empty where the batch is as it should be."""
    if workload.batch_loss is None:
        if not isinstance(batch, tuple) or len(batch) != 2:
            return (
                "it must return (inputs, targets), or the workload needs batch_loss(model, batch), which"
                " takes a batch of any shape"
            )
        parts = {"inputs": batch[0], "targets": batch[1]}
    else:
        parts = {"batch": batch}
    for name, part in parts.items():
        try:
            tensors = list_tensors(map_tensors(lambda tensor: tensor, part))
        except USER_EXCEPTIONS as error:
            why = "it refers to itself" if isinstance(error, RecursionError) else error
            return f"{name} in these containers cannot be made anew ({why}): return plain dicts and lists"
        known = (Tensor, *CONSTANT_TYPES)
        odd = [leaf for leaf in list_leaves(part) if not isinstance(leaf, known) and not list_tensors(leaf)]
        if odd:
            return (
                f"{describe(odd[0])} can be neither split nor moved to a device: it must return tensors in"
                " tuples, lists, dicts and objects"
            )
        if not tensors:
            return f"it must return {name} as tensors"
    return ""
