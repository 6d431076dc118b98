"""Calls the plain module as a mode does: forwards in chunks, draws by stage, buffers of the first rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...models.nested import join, split_tensors
from ...models.workload import Batch, Loss
from ..modes import Stages
from ..modes.base import collect_tensors
from ..modes.dp import check_gathered, copy_replica
from ..plan.case import BatchSplit
from .peers import ProofGroup

Begin = Callable[..., None]
"""Starts the random numbers of a micro-batch, or of what its further arguments number within it."""


class BufferSharing:
    """Gives all parts the first one's buffers before the forwards before which DDP sends them.

    They are all that follow one with gradients outside of `no_sync`, and the first: DDP's
    `will_sync_module_buffers()` asks the `require_forward_param_sync` that its last forward has set.
    """

    def __init__(self, module: nn.Module, peers: ProofGroup) -> None:
        self.is_last_micro = True
        """True where the micro-batch is that of DDP's reduction, which no `no_sync` precedes."""
        self._module, self._peers = module, peers
        self._follows_reduction = True
        if dict(module.named_buffers()):
            module.register_forward_pre_hook(self._send_buffers, prepend=True)
            module.register_forward_hook(self._note_reduction)

    def _send_buffers(self, *_: object) -> None:
        if not self._follows_reduction:
            return
        self._peers.meet()
        # The last rank computes the first part, unless each computes its own.
        root = -self._peers.shift % self._peers.world_size
        found = self._peers.broadcast_all(dict(self._module.named_buffers()), root=root)
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.data.copy_(found[name])  # no new version, for autograd may keep the buffer: as DDP

    def _note_reduction(self, *_: object) -> None:
        self._follows_reduction = torch.is_grad_enabled() and self.is_last_micro


def yield_losses(
    loss: Loss, module: nn.Module, batch: Batch, split: BatchSplit, begin: Begin, stages: Stages | None = None
) -> Iterator[Tensor]:
    """Give each loss of one part of a micro-batch in turn; their mean is trained on."""
    if split.gathered:
        yield loss(_Gathered(module, split.num_chunks, begin), batch)
        return
    for number, rows in enumerate(split_tensors(batch, split.num_chunks)):
        with _seed_stages(module, stages, partial(begin, number)):
            yield loss(module, rows)


@contextlib.contextmanager
def _seed_stages(module: nn.Module, stages: Stages | None, begin: Begin) -> Iterator[None]:
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
        held = {n: one for n, one in collect_tensors(self.module).items() if n not in trained}
        before = {name: one.detach().clone() for name, one in held.items()}
        after: list[dict[str, Tensor]] = []

        def run(number: int, *arguments: Any, **more: Any) -> Any:
            # Replicas cast weights of their own: a cast that they shared would sum gradients in 16 bits.
            torch.clear_autocast_cache()
            self._begin(number)
            own = {name: buffer.clone() for name, buffer in before.items()}
            after.append(own)
            return copy_replica(self.module, {**trained, **own})(*arguments, **more)

        chunks = split_tensors((inputs, named), self._num_chunks)
        on_gpu = any(one.is_cuda for one in trained.values())
        call = partial(checkpoint, run, use_reentrant=False) if on_gpu else run
        outputs = [call(number, *arguments, **more) for number, (arguments, more) in enumerate(chunks)]
        self._begin(len(chunks))
        with torch.no_grad():
            for name, one in held.items():
                one.resize_(after[0][name].shape).copy_(after[0][name])
        check_gathered(outputs)
        return join(outputs)
