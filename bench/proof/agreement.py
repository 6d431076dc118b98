"""Looks, after the rounds, whether DDP still averages the gradients of all parameters that train.

What begins to train after the proof, as a layer that is unfrozen later, is in no bucket: ranks part silently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..measure.timed import Trainer
from .peers import ProofGroup

NO_GRADIENT = -1

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


def find_differing_gradients(trainer: Trainer, peers: ProofGroup) -> tuple[str, ...]:
    """Compute the gradients of a step; name what has another gradient than on the first rank.

    Every rank of the case calls it. Weights may differ, for local steps were measured; averages may not.
    """
    trainer.release_gradients()
    with peers.join_ranks(), trainer.mode.enter_steps():
        trainer.compute_gradients()
    named = dict(trainer.mode.module.named_parameters())
    sums = torch.stack([_compute_checksum(one.grad) for one in named.values()])
    trainer.release_gradients()
    of_first = peers.broadcast(sums.clone())
    differs = (sums != of_first).tolist()
    return tuple(name for name, does in zip(named, differs, strict=True) if does)


def _compute_checksum(gradient: Tensor | None) -> Tensor:
    """Compute the sum of a tensor's bits, on the host."""
    if gradient is None:
        return torch.tensor(NO_GRADIENT)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.contiguous().view(BITS[real.element_size()]).sum(dtype=torch.int64).cpu()
