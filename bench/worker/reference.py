"""Computes and trains the plain module, eagerly, on what a case trains on: the proofs compare with it.

Each rank computes the part of the next one, on one device and by nothing but the workload's own functions;
the first rank adds up what all have found.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.data import open_source
from ...models.nested import join, map_tensors
from ...models.workload import Batch
from ..case import Case, Split, split_of
from ..measure.timed import AUTOCAST_DTYPES, autocast_of
from ..modes import Stages
from ..modes.base import gradients_of
from .distance import difference
from .forwards import losses
from .making import Maker, begin_draws, generators
from .peers import ALONE, Peers, Weights, as_default

PERTURBED = 32 * 2.0**-23
"""So much, relatively, parameters are shifted to see what rounding does: 32 times float32's own, for one more
or less lets single units of a ReLU pass, by chance."""

Fetch = Callable[[int], Batch]
"""Gives the next batch, by micro-batch: of the part that a rank computes, or of all where they are joined."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A case as one of its ranks proves it."""

    case: Case
    stages: Stages | None = None
    """Of a case that splits the model."""
    peers: Peers = ALONE
    """The ranks of the case."""
    alone: dist.ProcessGroup | None = None
    """The default process group of a rank that computes alone."""

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


@dataclass
class Reference:
    """Computes with a workload's plain module as its author would on one device; keeps what came of it."""

    maker: Maker
    num_workers: int = 0
    """Loader processes of every rank, with a folder of images: the augmentation depends on them."""
    _known: dict[tuple[object, ...], Computed] = field(default_factory=dict)

    def gradients(
        self,
        of: Subject,
        split: Split,
        dtype: torch.dtype | None,
        fetch: Fetch,
        *,
        again: bool = False,
        repeated: bool = False,
    ) -> Computed | None:
        """The gradient of one batch, its parts' losses signed by `sign_of`; None without a part in it.

        Each of the case's ranks calls it; `again` and `repeated` are as in `update`.
        """

        def signed(model: Any, batch: Batch, micro: int, part: int) -> Tensor:
            return self.maker.loss(model, batch) * sign_of(split, part, micro)

        def work(peers: Peers) -> Computed:
            return self._run(of, split, peers, (), signed, lambda: fetch, dtype=dtype, again=again)

        return self._kept(of, (split, again), work, repeated=repeated)

    def update(
        self, of: Subject, scales: tuple[float, ...], *, again: bool = False, repeated: bool = False
    ) -> Computed | None:
        """What the steps of a case make of the plain module; None on a rank that computes no part of it.

        Args:
            of: the case whose batches, split and precision are taken; each of its ranks calls this.
            scales: what the loss of each step was multiplied by, and of the one that came next; where it
                fell, the step was left out.
            again: train in a way that is the same but for rounding: parameters shifted by `PERTURBED`,
                gradients rounded as the case's hook does.
            repeated: train once more, though it is known what comes of it.
        """
        case, split = of.case, split_of(of.case)

        def loss(model: Any, batch: Batch, **_: int) -> Tensor:
            with autocast_of(case):
                return self.maker.loss(model, batch)

        def work(peers: Peers) -> Computed:
            with contextlib.ExitStack() as opened:
                fetch = partial(self._opened, opened, case, split, peers)
                return self._run(of, split, peers, scales, loss, fetch, again=again)

        key = (split, case.precision, case.data, scales, again and case.comm_hook, again)
        return self._kept(of, key, work, repeated=repeated)

    def _kept(
        self, of: Subject, key: tuple[object, ...], work: Callable[[Peers], Computed], *, repeated: bool
    ) -> Computed | None:
        peers = of.sources
        if peers is None:
            return None
        key = (*key, peers.number, of.shares_buffers, of.stages and of.stages.by_device)
        if repeated or peers.largest(key not in self._known):
            with as_default(None if peers.number == of.peers.number else of.alone):
                self._known[key] = work(peers)
        return self._known[key]

    def _run(
        self,
        of: Subject,
        split: Split,
        peers: Peers,
        scales: Sequence[float],
        loss_of: Callable[..., Tensor],
        opened: Callable[[], Fetch],
        *,
        dtype: torch.dtype | None = None,
        again: bool = False,
    ) -> Computed:
        """Compute with a module of its own on each of `peers`: a gradient, or a step for each of `scales`."""
        trains = len(scales) > 0
        rounded = AUTOCAST_DTYPES.get(of.case.comm_hook) if again else None
        draws, found, sizes = False, Weights(), Weights()
        unused: tuple[str, ...] = ()
        with peers.together():
            module = self.maker.module(dtype, refers=True)
            if again:
                _perturb(module)
            before = weights_of(module)
            optimizer = self.maker.workload.optimizer(list(module.parameters())) if trains else None
            fetch = opened()
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
                    loss = partial(loss_of, micro=micro, part=peers.part)
                    for one in losses(loss, module, batch, split, begin, of.stages):
                        (one / (split.num_losses * split.accumulate) * scale).backward()
                        draws = draws or generators() != states
            trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
            unused = tuple(name for name, one in trained if one.grad is None)
            found, sizes = peers.mean(gradients_of(module), measures=not trains)
            if optimizer is not None:
                with peers.together():
                    _set_gradients(module, found, scale, rounded)
                    if next_scale >= scale:
                        optimizer.step()
        buffers, state = peers.own_part(buffers_of(module)), shapes_of(module.state_dict())
        update = difference(weights_of(module), before) if trains else {}
        self.maker.take_back(module)
        gradients = {} if trains else on_host(found)
        return Computed(gradients, on_host(sizes), update, buffers, state, draws, unused)

    def _opened(self, opened: contextlib.ExitStack, case: Case, split: Split, peers: Peers) -> Fetch:
        """What the part that this rank computes is fetched from, on the host."""
        sources = []
        for part in range(split.num_sources) if split.joined else [peers.part]:
            source = open_source(
                self.maker.workload,
                data=case.data,
                batch_size=split.batch_size,
                rank=part,
                world_size=split.num_sources,
                device=torch.device("cpu"),
                seed=self.maker.seed,
                num_workers=self.num_workers,
            )
            opened.callback(source.close)
            sources.append(source)

        def fetch(_: int) -> Batch:
            found = [source.next() for source in sources]
            return map_tensors(lambda one: one.to(self.maker.device), join(found) if found[1:] else found[0])

        return fetch


def sign_of(split: Split, part: int, micro: int) -> int:
    """The sign of a part's loss: they alternate, so that what all parts have in common cancels."""
    return 1 if split.joined else (-1) ** (part + micro)


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


def on_host(named: Weights) -> Weights:
    """Copy tensors to the host."""
    return {name: one.detach().to("cpu", copy=True) for name, one in named.items()}


def shapes_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of a state dict's tensors, and the types of what else it holds."""
    return {name: tuple(one.shape) if isinstance(one, Tensor) else type(one) for name, one in state.items()}


@torch.no_grad()
def _perturb(module: nn.Module) -> None:
    begin_draws(0)
    for parameter in module.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            size = max(PERTURBED, torch.finfo(parameter.dtype).eps)
            parameter.mul_(1 + size * torch.randn_like(parameter))


def _set_gradients(module: nn.Module, found: Weights, scale: float, rounded: torch.dtype | None) -> None:
    """Give parameters their gradients, unscaled; a hook would have rounded them while they were scaled."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or (parameter.grad is None and not found[name].any()):
            continue  # no part of the batch has used it
        mean = found[name].to(parameter.device, parameter.dtype)
        if parameter.grad is not None and parameter.grad.is_sparse:
            mean = mean.to_sparse(parameter.grad.sparse_dim())
        parameter.grad = (mean if rounded is None else mean.to(rounded).to(mean.dtype)).div_(scale)
