"""Computes and trains the plain module, eagerly, on what a case trains on: the proofs compare with it.

Each rank computes the part of the next one, on one device and by nothing but the workload's own functions;
the first rank adds up what all have found.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...models.nested import chunk, join, map_tensors
from ...models.workload import Batch, Loss
from ..case import Case, Split, split_of
from ..measure.timed import AUTOCAST_DTYPES, autocast_of
from ..modes import Stages
from ..modes.base import gradients_of, tensors_of_module
from ..modes.dp import check_gathered, replica_of
from .groups import ALONE, Peers, Weights, as_default, difference, on_host
from .making import Maker, begin_draws, generators, shapes_of

PERTURBED = 32 * 2.0**-23
"""So much, relatively, parameters are shifted to see what rounding does: 32 times float32's own, for one more
or less lets single units of a ReLU pass, by chance."""

Fetch = Callable[[int], Batch]
"""Gives the batch of a micro-batch: of the part that a rank computes, or of all where they are joined."""

Begin = Callable[..., None]
"""Starts the random numbers of a micro-batch, or of what its further arguments number within it."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A case as one of its ranks proves it."""

    case: Case
    stages: Stages | None = None
    """Of a case that splits the model."""
    peers: Peers = ALONE
    """The ranks of the case."""

    @property
    def sources(self) -> Peers | None:
        """The ranks that compute a part of the reference; None for one that has no part in it."""
        if self.case.num_batches > 1 and not self.case.sync_batchnorm:
            return self.peers
        return None if self.peers.rank else ALONE

    @property
    def shares_buffers(self) -> bool:
        """Whether DDP sends the first rank's buffers, before each forward that follows none of `no_sync`."""
        return self.case.mode == "ddp" and self.case.sync_buffers and self.peers.number > 1


@dataclass(frozen=True)
class Computed:
    """What a gradient or steps, of the plain module or a mode, have come to."""

    gradients: Weights = field(default_factory=dict)
    """Those of one step, averaged over the parts; without any where steps were trained."""
    sizes: Weights = field(default_factory=dict)
    """The largest norm of each among the parts."""
    update: Weights = field(default_factory=dict)
    """What the steps added to its trainable parameters."""
    buffers: Weights = field(default_factory=dict)
    """After them, those of this rank's own part of the batch."""
    state: dict[str, Any] = field(default_factory=dict)
    """The shapes in its state dict."""
    draws: bool = False
    """Whether this rank's part drew random numbers."""
    unused: tuple[str, ...] = ()
    """Parameters that have got no gradient of it."""


@dataclass(frozen=True)
class Work:
    """What is computed for a proof: the gradient of a batch, or a step for each of `scales` but the last."""

    split: Split
    loss: Callable[..., Tensor]
    """Of model, batch, and the numbers `micro` of the micro-batch and `part` of the part."""
    opened: Callable[[int, contextlib.ExitStack], Fetch]
    """What a part is fetched from, until the stack is closed."""
    scales: tuple[float, ...] = ()
    """What the loss of each step was multiplied by, and of the next; where it fell, the step was left out."""
    dtype: torch.dtype | None = None


@dataclass
class Reference:
    """Computes with a workload's plain module as its author would on one device; keeps what came of it."""

    maker: Maker
    _known: dict[tuple[object, ...], Computed] = field(default_factory=dict)

    def update(self, of: Subject, scales: tuple[float, ...], **how: bool) -> Computed | None:
        """What steps with these scales make of the plain module, in the case's precision; as `computed`."""

        def loss(model: Any, batch: Batch, **_: int) -> Tensor:
            with autocast_of(of.case):
                return self.maker.loss(model, batch)

        work = Work(split_of(of.case), loss, partial(self._opened, of.case), scales)
        return self.computed(of, work, **how)

    def computed(
        self, of: Subject, work: Work, *, again: bool = False, repeated: bool = False
    ) -> Computed | None:
        """What the plain module comes to; None on a rank that computes no part of it.

        Each of the case's ranks calls it. `again`: in a way that is the same but for rounding, parameters
        shifted by `PERTURBED` and gradients rounded as the case's hook does. `repeated`: once more, though it
        is known what comes of it.
        """
        peers, case = of.sources, of.case
        if peers is None:
            return None
        how = (case.precision, case.data, again and case.comm_hook)
        shape = (peers.number, of.shares_buffers, of.stages and of.stages.by_device)
        key = (work.split, work.scales, *how, *shape)
        if repeated or peers.largest(key not in self._known):
            with as_default(self.maker.alone if peers.number == 1 else None):
                self._known[key] = self._run(of, work, peers, again=again)
        return self._known[key]

    def _run(self, of: Subject, work: Work, peers: Peers, *, again: bool) -> Computed:
        split, scales, draws = work.split, work.scales, False
        with contextlib.ExitStack() as closing:
            with peers.together():
                module = self.maker.module(work.dtype)
                if again:
                    _perturb(module)
                before = weights_of(module)
                optimizer = self.maker.workload.optimizer(list(module.parameters())) if scales else None
                fetch = work.opened(peers.part, closing)
            for step, (scale, next_scale) in enumerate(itertools.pairwise(scales or (1.0, 1.0))):
                module.zero_grad(set_to_none=True)
                if of.shares_buffers:
                    share_buffers(module, peers)
                with peers.together():
                    for micro in range(split.accumulate):
                        batch = fetch(micro)
                        begin = partial(begin_draws, self.maker.seed, step, micro, peers.part)
                        begin()
                        states = generators()
                        loss = partial(work.loss, micro=micro, part=peers.part)
                        for one in losses(loss, module, batch, split, begin, of.stages):
                            (one / (split.num_losses * split.accumulate) * scale).backward()
                            draws = draws or generators() != states
                trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
                unused = tuple(name for name, one in trained if one.grad is None)
                found, sizes = peers.mean(gradients_of(module), measures=not scales)
                if optimizer is not None:
                    with peers.together():
                        _set_gradients(module, found, scale, of.case.comm_hook if again else "none")
                        if next_scale >= scale:
                            optimizer.step()
        buffers, state = peers.own_part(buffers_of(module)), shapes_of(module.state_dict())
        update = difference(weights_of(module), before) if scales else {}
        gradients = {} if scales else on_host(found)
        return Computed(gradients, on_host(sizes), update, buffers, state, draws, unused)

    def _opened(self, case: Case, own: int, closing: contextlib.ExitStack) -> Fetch:
        split, sources = split_of(case), []
        for part in range(split.num_sources) if split.joined else [own]:
            sources.append(self.maker.source(case, part, torch.device("cpu")))
            closing.callback(sources[-1].close)

        def fetch(_: int) -> Batch:
            found = [source.next() for source in sources]
            return map_tensors(lambda one: one.to(self.maker.device), join(found) if found[1:] else found[0])

        return fetch


def share_buffers(module: nn.Module, peers: Peers) -> None:
    """Give all parts the buffers of the first one, which the last rank computes."""
    found = peers.all_given(dict(module.named_buffers()), root=peers.number - 1)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(found[name])


def weights_of(module: nn.Module) -> Weights:
    """Copy the trainable parameters to the host."""
    return on_host({name: one for name, one in module.named_parameters() if one.requires_grad})


def buffers_of(module: nn.Module) -> Weights:
    """Copy the buffers of numbers to the host."""
    return on_host({name: one for name, one in module.named_buffers() if one.layout == torch.strided})


@torch.no_grad()
def _perturb(module: nn.Module) -> None:
    begin_draws(0)
    for parameter in module.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            size = max(PERTURBED, torch.finfo(parameter.dtype).eps)
            parameter.mul_(1 + size * torch.randn_like(parameter))


def _set_gradients(module: nn.Module, found: Weights, scale: float, hook: str) -> None:
    """Give parameters their gradients, unscaled; a hook would have rounded them while they were scaled."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or (parameter.grad is None and not found[name].any()):
            continue  # no part of the batch has used it
        mean = found[name].to(parameter.device, parameter.dtype)
        if parameter.grad is not None and parameter.grad.is_sparse:
            mean = mean.to_sparse(parameter.grad.sparse_dim())
        parameter.grad = mean.to(AUTOCAST_DTYPES.get(hook, mean.dtype)).to(mean.dtype).div_(scale)


def losses(
    loss: Loss, module: nn.Module, batch: Batch, split: Split, begin: Begin, stages: Stages | None = None
) -> Iterator[Tensor]:
    """Give each loss of one part of a micro-batch in turn; their mean is trained on."""
    if split.gathered:
        yield loss(_Gathered(module, split.num_chunks, begin), batch)
        return
    for number, rows in enumerate(chunk(batch, split.num_chunks)):
        with _stages_begin(module, stages, partial(begin, number)):
            yield loss(module, rows)


@contextlib.contextmanager
def _stages_begin(module: nn.Module, stages: Stages | None, begin: Begin) -> Iterator[None]:
    """Within it, random numbers start anew with the first layer of each stage."""
    with contextlib.ExitStack() as hooked:
        if stages is not None:
            layers, firsts = stages.layers(module), itertools.accumulate((0, *stages.by_device[:-1]))
            for stage, first in enumerate(firsts):
                hook = layers[first].register_forward_pre_hook(lambda *_, stage=stage: begin(stage))
                hooked.callback(hook.remove)
        yield


class _Gathered(nn.Module):
    """A module that sees its batch in chunks and joins their outputs, as the replicas of DataParallel do.

    Every chunk begins with the same buffers and frozen parameters, and those of the first one stay; what else
    a forward changes is lost with its replica. On a GPU the backward computes each forward again: it holds no
    more than one chunk's activations at a time, as each GPU of the case does.
    """

    def __init__(self, module: nn.Module, num_chunks: int, begin: Begin) -> None:
        super().__init__()
        self.module = module
        self._num_chunks = num_chunks
        self._begin = begin

    def forward(self, *inputs: Any, **named: Any) -> Any:
        trained = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        held = {n: one for n, one in tensors_of_module(self.module).items() if n not in trained}
        before = {name: one.detach().clone() for name, one in held.items()}
        after: list[dict[str, Tensor]] = []

        def run(number: int, *arguments: Any, **more: Any) -> Any:
            # Replicas cast weights of their own: a cast that they shared would sum gradients in 16 bits.
            torch.clear_autocast_cache()
            self._begin(number)
            own = {name: buffer.clone() for name, buffer in before.items()}
            after.append(own)
            return replica_of(self.module, {**trained, **own})(*arguments, **more)

        chunks = chunk((inputs, named), self._num_chunks)
        on_gpu = any(one.is_cuda for one in trained.values())
        call = partial(checkpoint, run, use_reentrant=False) if on_gpu else run
        outputs = [call(number, *arguments, **more) for number, (arguments, more) in enumerate(chunks)]
        self._begin(len(chunks))
        with torch.no_grad():
            for name, one in held.items():
                one.resize_(after[0][name].shape).copy_(after[0][name])
        check_gathered(outputs)
        return join(outputs)
