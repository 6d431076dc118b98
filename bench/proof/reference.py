"""Computes and trains the plain module, eagerly, on what a case trains on: the proofs compare with it.

Each rank computes the part of the next one, on one device and by nothing but the workload's own functions;
ranks add up what all have found.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.nested import join, map_tensors
from ...models.workload import Batch, Loss
from ..measure.groups import count_launched, set_default_group
from ..measure.timed import AUTOCAST_DTYPES, make_autocast
from ..modes import Stages
from ..plan.case import BatchSplit, Case, split_batch
from .forwards import BufferSharing, yield_losses
from .making import Maker, begin_draws, describe_state, get_generator_states
from .peers import ALONE, ProofGroup
from .weights import Weights, copy_to_host, get_gradient, subtract_weights

MAX_KEPT_BYTES = 2**30
"""Results are kept for later cases while they take less; of more, the last gradient and update alone."""

PERTURBATION = 32 * 2.0**-23
"""Relative shift of parameters, to see what rounding does: 32 times float32's own, for one more
or less lets single units of a ReLU pass, by chance."""

Fetch = Callable[[int], Batch]
"""Gives the batch of a micro-batch: of the part that a rank computes, or of all where they are joined."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A case as one of its ranks proves it."""

    case: Case
    stages: Stages | None = None
    """Split of the model, for a case that splits it."""
    peers: ProofGroup = ALONE
    """The ranks of the case."""

    @property
    def sources(self) -> ProofGroup | None:
        """The ranks that compute a part of the reference; None for one that has no part in it."""
        if self.case.num_batches > 1 and not self.case.sync_batchnorm:
            return self.peers
        return None if self.peers.rank else ALONE

    @property
    def shares_buffers(self) -> bool:
        """True where DDP sends the first rank's buffers before forwards."""
        return self.case.spec.has_buckets and self.case.sync_buffers and self.peers.world_size > 1


@dataclass(frozen=True)
class Computed:
    """The result of a gradient or of steps, of the plain module or a mode."""

    update: Weights = field(default_factory=dict)
    """Gradients, averaged over the parts, or what steps add to parameters that train or changed."""
    sizes: Weights = field(default_factory=dict)
    """The largest norm of each gradient among the parts."""
    buffers: Weights = field(default_factory=dict)
    """After them, those of this rank's own part of the batch."""
    state: dict[str, Any] = field(default_factory=dict)
    """The shapes in its state dict."""
    draws: bool = False
    """True where this rank's part drew random numbers."""
    unused: tuple[str, ...] = ()
    """Parameters that have got no gradient of it."""
    asks: bool = False
    """True where the model or its loss asked other ranks, by collectives."""


@dataclass(frozen=True)
class Work:
    """The steps of a proof: one for each of `scales` but the last, or without any the gradient of a batch."""

    of: Subject
    split: BatchSplit
    loss: Loss
    opened: Callable[[int, contextlib.ExitStack], Fetch]
    """Source from which a part is fetched, until the stack is closed."""
    scales: tuple[float, ...] = ()
    """Factors on the loss of each step, and of the next; where they fall, the step was left out."""
    dtype: torch.dtype | None = None
    alternates: bool = False
    """True where the losses of parts have alternating signs: what all parts have in common cancels."""
    evaluates: bool = False
    """True where the module is in evaluation mode; what comes of it is not kept."""
    perturbed: bool = False
    """True where all is the same but for rounding: parameters shifted by `PERTURBATION`, gradients rounded
    as by the case's hook."""
    in_order: bool = False
    """True where each rank computes its own part."""

    def get_sign(self, micro: int, part: int) -> int:
        """Return the sign of the loss of a part of a micro-batch."""
        return (-1) ** (micro + part) if self.alternates else 1

    def get_key(self, peers: ProofGroup) -> tuple[object, ...]:
        """Return what its result depends on, where these ranks compute it."""
        case, of = self.of.case, self.of
        how = (case.precision, case.data, self.perturbed and case.comm_hook)
        shape = (peers.world_size, peers.shift, of.shares_buffers, of.stages and of.stages.by_device)
        return (self.split, self.scales, self.alternates, *how, *shape)


@dataclass
class Reference:
    """Computes with a workload's plain module as its author would on one device; keeps what came of it."""

    maker: Maker
    _known: dict[tuple[object, ...], Computed] = field(default_factory=dict)

    def compute_result(self, work: Work, *, recompute: bool = False) -> Computed | None:
        """Return the result of the plain module; None on a rank that computes no part of it.

        Each of the case's ranks calls it; where it raises on one, it raises on all, also on those without a
        part, which would wait for the others' next word. `recompute`: once more, though it is known.
        """
        with work.of.peers.join_ranks():
            if (peers := work.of.sources) is None:
                return None
            if work.in_order:
                peers = replace(peers, shift=0)
            with set_default_group(self.maker.alone if peers.world_size == 1 else None):
                if work.evaluates:
                    return self._run(work, peers)
                key = work.get_key(peers)
                if recompute or peers.find_largest(key not in self._known):
                    self._make_room(key)
                    self._known[key] = self._run(work, peers)
                return self._known[key]

    def _make_room(self, key: tuple[object, ...]) -> None:
        """Forget gradients before others are computed, or updates, where all together take much memory."""
        self._known.pop(key, None)
        held = [part for one in self._known.values() for part in (one.update, one.buffers)]
        if sum(one.nbytes for part in held for one in part.values()) > MAX_KEPT_BYTES:
            same_kind = [other for other in self._known if bool(other[1]) == bool(key[1])]
            for other in same_kind:
                del self._known[other]

    def _run(self, work: Work, peers: ProofGroup) -> Computed:
        of, split, scales, draws = work.of, work.split, work.scales, False
        launched = 0
        with contextlib.ExitStack() as closing:
            with peers.join_ranks():
                module = self.maker.make_module(work.dtype)
                if work.evaluates:
                    module.eval()
                if work.perturbed:
                    _perturb(module)
                start = self.maker.start
                before = (
                    start | copy_changed_weights(dict(module.named_parameters()), start) if scales else {}
                )
                buffers = BufferSharing(module, peers) if of.shares_buffers else None
                optimizer = self.maker.workload.optimizer(list(module.parameters())) if scales else None
                fetch = work.opened(peers.part, closing)
            for step, (scale, next_scale) in enumerate(itertools.pairwise(scales or (1.0, 1.0))):
                module.zero_grad(set_to_none=True)
                with peers.join_ranks():
                    for micro in range(split.accumulate):
                        if buffers is not None:
                            buffers.is_last_micro = micro == split.accumulate - 1
                        batch = fetch(micro)
                        begin = partial(begin_draws, self.maker.seed, step, micro, peers.part)
                        begin()
                        states, before_losses = get_generator_states(), count_launched(dist.group.WORLD) or 0
                        factor = work.get_sign(micro, peers.part) * scale
                        for one in yield_losses(work.loss, module, batch, split, begin, of.stages):
                            (one / (split.num_losses * split.accumulate) * factor).backward()
                            draws = draws or get_generator_states() != states
                        launched += (count_launched(dist.group.WORLD) or 0) - before_losses
                named = dict(module.named_parameters())
                unused = tuple(name for name, one in named.items() if one.requires_grad and one.grad is None)
                # A forward may let more parameters train, and on one rank alone.
                trains = peers.find_all_largest(*(one.requires_grad for one in named.values()))
                with peers.join_ranks():
                    pairs = zip(named.items(), trains, strict=True)
                    gradients = {name: get_gradient(one) for (name, one), does in pairs if does}
                found, sizes = peers.average_tensors(gradients, measures=not scales)
                if optimizer is not None:
                    with peers.join_ranks():
                        _set_gradients(module, found, scale, of.case.comm_hook if work.perturbed else "none")
                        if next_scale >= scale:
                            optimizer.step()
        with peers.join_ranks():
            if scales:
                after = copy_changed_weights(dict(module.named_parameters()), before)
                update = subtract_weights(after, {name: before[name] for name in after})
            else:
                update = copy_to_host(found)
        return Computed(
            update=update,
            sizes=copy_to_host(sizes),
            buffers=peers.exchange_parts(copy_buffers(module)),
            state=describe_state(module.state_dict()),
            draws=draws,
            unused=unused,
            asks=launched > 0,
        )


def make_training(maker: Maker, of: Subject, scales: tuple[float, ...]) -> Work:
    """Return the steps of a case's training under these scales, in its precision and on its own batches."""
    split = split_batch(of.case)

    def compute_loss(model: Any, batch: Batch) -> Tensor:
        with make_autocast(of.case):
            return maker.compute_loss(model, batch)

    def open_sources(own: int, closing: contextlib.ExitStack) -> Fetch:
        sources = []
        for part in range(split.num_sources) if split.joined else [own]:
            sources.append(maker.open_source(of.case, part, torch.device("cpu")))
            closing.callback(sources[-1].close)

        def fetch(_: int) -> Batch:
            found = [source.get_batch() for source in sources]
            return map_tensors(lambda one: one.to(maker.device), join(found) if found[1:] else found[0])

        return fetch

    return Work(of, split, compute_loss, open_sources, scales)


def copy_changed_weights(named: Mapping[str, Tensor], start: Weights) -> Weights:
    """Copy those of the parameters `named` to the host that train, or are no longer as in `start`."""
    return copy_to_host(
        {n: one for n, one in named.items() if one.requires_grad or _is_different(one, start.get(n))}
    )


def _is_different(one: Tensor, other: Tensor | None) -> bool:
    host = one.detach().cpu()
    return other is not None and not torch.equal(host.nan_to_num(), other.to(host.dtype).nan_to_num())


def copy_buffers(module: nn.Module) -> Weights:
    """Copy the buffers of numbers to the host."""
    return copy_to_host({name: one for name, one in module.named_buffers() if one.layout == torch.strided})


@torch.no_grad()
def _perturb(module: nn.Module) -> None:
    begin_draws(0)
    for parameter in module.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            size = max(PERTURBATION, torch.finfo(parameter.dtype).eps)
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
