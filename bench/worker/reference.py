"""Trains the plain module, eagerly in one process, on the batches of all ranks of a case.

What a case's parameters have to be after a few steps: the proof in `bench/worker/update_proof.py` compares.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from ...models.data import BatchSource, open_source
from ...models.nested import chunk, join, map_tensors
from ...models.workload import Batch, Loss, Workload, loss_function
from ..case import Case, Split, split_of
from ..measure.timed import AUTOCAST_DTYPES, autocast_of

Weights = dict[str, Tensor]
"""Trainable parameters, what was added to them, or their gradients, by name."""

PERTURBED = 32 * 2.0**-23
"""So much, relatively, parameters are shifted to see what rounding does: 32 times float32's own, for one more
or less lets single units of a ReLU pass, by chance."""


@dataclass
class Reference:
    """Trains a workload's plain module as its author would on one device; keeps what came of it."""

    workload: Workload
    template: nn.Module
    """Its parameters are where training begins; never trained itself."""
    device: torch.device
    seed: int
    """Of the batches."""
    num_workers: int = 0
    """Loader processes of every rank, with a folder of images: the augmentation depends on them."""
    switched_off: tuple[type[nn.Module], ...] = ()
    """Kinds of modules in evaluation beside dropout: those that draw random numbers."""

    def __post_init__(self) -> None:
        self._loss = loss_function(self.workload)
        self._known: dict[tuple[object, ...], Weights] = {}

    def update(self, case: Case, scales: tuple[float, ...], *, again: bool = False) -> Weights:
        """What the steps of a case add to the parameters.

        Args:
            case: whose batches, split and precision are taken.
            scales: what the loss of each step was multiplied by, and of the one that came next; where it
                fell, the step was left out.
            again: train in a way that is the same but for rounding and random numbers: parameters shifted
                by `PERTURBED`, samples in reverse, gradients rounded as the case's hook does.
        """
        key = (split_of(case), case.precision, case.data, scales, again and case.comm_hook, again)
        if key not in self._known:
            with _random_state(int(again), self.device):
                self._known[key] = self._train(case, scales, again=again)
        return self._known[key]

    def _train(self, case: Case, scales: Sequence[float], *, again: bool) -> Weights:
        module = copy.deepcopy(self.template).to(self.device)
        switch_off(module, *self.switched_off)
        if again:
            _perturb(module)
        start = weights_of(module)
        optimizer = self.workload.optimizer(list(module.parameters()))
        split = split_of(case)
        with self._opened(case, split) as sources:
            for scale, next_scale in itertools.pairwise(scales):
                optimizer.zero_grad(set_to_none=True)
                for _ in range(split.accumulate):
                    batches = [source.next() for source in sources]
                    self._add_gradients(case, module, batches, scale, again=again)
                rounded = AUTOCAST_DTYPES.get(case.comm_hook) if again else None
                _average_gradients(module, split.num_losses, scale, rounded)
                if next_scale >= scale:
                    optimizer.step()
        return difference(weights_of(module), start)

    def _add_gradients(
        self, case: Case, module: nn.Module, batches: Sequence[Batch], scale: float, *, again: bool
    ) -> None:
        def loss_of(model: Any, part: Batch) -> Tensor:
            batch = map_tensors(lambda tensor: (tensor.flip(0) if again else tensor).to(self.device), part)
            with autocast_of(case):
                return self._loss(model, batch)

        for loss in losses(loss_of, module, batches, split_of(case)):
            (loss / case.accumulate * scale).backward()

    @contextlib.contextmanager
    def _opened(self, case: Case, split: Split) -> Iterator[list[BatchSource]]:
        """What every rank of the case fetches its batches from, on the host."""
        with contextlib.ExitStack() as opened:
            sources = []
            for rank in range(split.num_sources):
                source = open_source(
                    self.workload,
                    data=case.data,
                    batch_size=split.batch_size,
                    rank=rank,
                    world_size=split.num_sources,
                    device=torch.device("cpu"),
                    seed=self.seed,
                    num_workers=self.num_workers,
                )
                opened.callback(source.close)
                sources.append(source)
            yield sources


def losses(loss: Loss, module: nn.Module, batches: Sequence[Batch], split: Split) -> Iterator[Tensor]:
    """Give each loss of a micro-batch in turn, of what every rank has fetched; their mean is trained on.

    All begin with the same buffers, and the first rank comes last: its buffers stay, as DDP's do.
    """
    model = _Gathered(module, split.num_chunks) if split.gathered else module
    buffers = list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    for part in reversed(_parts(batches, split)):
        with torch.no_grad():
            for buffer, was in zip(buffers, before, strict=True):
                buffer.copy_(was)
        yield loss(model, part)


def switch_off(module: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    """Put dropout, and modules of `kinds`, into evaluation, not their parts; those that were in training."""
    # Attention drops weights without a module for it.
    off = (_DropoutNd, nn.MultiheadAttention, *kinds)
    found = [m for m in module.modules() if isinstance(m, off) and m.training]
    for part in found:
        part.training = False
    return found


def drawing_kinds(forward: Callable[[], object]) -> tuple[type[nn.Module], ...]:
    """Types of the modules that draw random numbers in `forward`, but for those of which a part does.

    Told by the generators' states: gradients of two forwards may be equal by chance.
    """
    found: list[type[nn.Module]] = []
    entered: list[tuple[object, int]] = []

    def enter(*_: object) -> None:
        entered.append((_generators(), len(found)))

    def leave(module: nn.Module, *_: object) -> None:
        before, num_found = entered.pop()
        if len(found) == num_found and _generators() != before:
            found.append(type(module))

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave):
        forward()
    return tuple(dict.fromkeys(found))


def _generators() -> object:
    """The states of the generators that a model may draw from."""
    of_torch = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    of_numpy = pickle.dumps(np.random.get_state())  # the one that models draw from
    return [state.numpy().tobytes() for state in of_torch], random.getstate(), of_numpy


def weights_of(module: nn.Module) -> Weights:
    """Copy the trainable parameters to the host."""
    return {
        name: one.detach().to("cpu", copy=True)
        for name, one in module.named_parameters()
        if one.requires_grad
    }


def difference(one: Weights, other: Weights) -> Weights:
    """`one` - `other`, in float32 at least."""
    return {name: one[name].to(_fine(start)) - start.to(_fine(start)) for name, start in other.items()}


def norm(weights: Weights) -> float:
    """The 2-norm over all parameters."""
    # Squares of float32 overflow and vanish.
    return float(torch.stack([tensor.double().norm() for tensor in weights.values()]).norm())


def _fine(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _parts(batches: Sequence[Batch], split: Split) -> list[Batch]:
    """What each loss sees, from what every rank has fetched; the first rank's first."""
    if split.joined:
        return [join(batches)]
    if split.gathered:
        return list(batches)
    return [part for batch in batches for part in chunk(batch, split.num_chunks)]


class _Gathered(nn.Module):
    """A module that sees its batch in chunks and joins their outputs, as the replicas of DataParallel do.

    Every chunk begins with the same buffers, and those of the first one stay. The backward computes each
    forward again: no more than one chunk's activations are held at a time.
    """

    def __init__(self, module: nn.Module, num_chunks: int) -> None:
        super().__init__()
        self.module = module
        self._num_chunks = num_chunks

    def forward(self, *inputs: Any, **named: Any) -> Any:
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        after: list[dict[str, Tensor]] = []

        def run(*arguments: Any, **more: Any) -> Any:
            # Replicas cast weights of their own: a cast that they shared would sum gradients in 16 bits.
            torch.clear_autocast_cache()
            own = {name: buffer.clone() for name, buffer in before.items()}
            outputs = functional_call(self.module, own, arguments, more)
            after.append(own)
            return outputs

        chunks = chunk((inputs, named), self._num_chunks)
        outputs = [checkpoint(run, *arguments, use_reentrant=False, **more) for arguments, more in chunks]
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(after[0][name])
        return join(outputs)


@torch.no_grad()
def _perturb(module: nn.Module) -> None:
    for parameter in filter(Tensor.is_floating_point, module.parameters()):
        size = max(PERTURBED, torch.finfo(parameter.dtype).eps)
        parameter.mul_(1 + size * torch.randn_like(parameter))


def _average_gradients(module: nn.Module, number: int, scale: float, rounded: torch.dtype | None) -> None:
    """Divide summed gradients; a hook would have rounded them while they were scaled."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            mean = parameter.grad.div_(number)
            parameter.grad = (mean if rounded is None else mean.to(rounded).to(mean.dtype)).div_(scale)


@contextlib.contextmanager
def _random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Within, random numbers begin at `seed`; after it they go on as if nothing had been drawn."""
    is_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if is_gpu else []):
        torch.default_generator.manual_seed(seed)
        if is_gpu:
            torch.cuda.manual_seed(seed)
        yield
