"""Check that the loss is a mean over rows of equal weight: where it is none, modes train differently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...models.nested import map_tensors
from ...models.step import set_float32_precision
from ...models.workload import Batch
from ..common.errors import USER_EXCEPTIONS
from ..measure.faults import classify_error
from ..plan.case import BatchSplit
from .inputs import ProofInputs, choose_proof_split
from .judge import compute_error
from .making import begin_draws
from .peers import ALONE
from .reference import Reference, Subject

MIN_REPEATED = 1e-3
"""A smaller effect is rounding, or too small to matter."""

MAX_NOISE = 0.1
"""Share of the effect: where the plain module differs from itself by more of it, it tells nothing."""


class SplitEffect:
    """Compares the reference of cases with the plain module on whole batches, in evaluation mode.

    In training, batch norm has rows depend on each other, and dropout differs.
    """

    def __init__(self, inputs: ProofInputs, reference: Reference) -> None:
        self._inputs, self._reference = inputs, reference
        self._known: dict[object, float | None] = {}

    def measure_effect(self, of: Subject) -> float | None:
        """Return the relative error of the gradient that a case averages against one device's on all rows.

        For a loss that is a mean over rows of equal weight it is rounding. Every rank of the case asks, after
        its proof. None for a batch without rows, where the model computes no loss in evaluation, or where the
        gradient of the whole batch depends on the draw, or on what the module has seen before.
        """
        if not self._inputs.maker.has_rows:
            return None
        dtype = self._inputs.share_arithmetic(of.peers).dtype
        num_parts = choose_proof_split(of.case, 1).num_rows
        split = choose_proof_split(of.case, max(of.case.batch_per_device // num_parts, 1))
        if split.num_forwards * split.accumulate == 1:
            return 0.0
        key = split, of.peers.world_size, of.stages and of.stages.by_device
        if of.peers.find_largest(key not in self._known):
            try:
                with set_float32_precision("fp32", self._inputs.maker.device):
                    self._known[key] = self._compute_effect(of, split, dtype)
            except USER_EXCEPTIONS as error:
                if classify_error(error).restart:
                    raise
                self._known[key] = None
        return self._known[key]

    def _compute_effect(self, of: Subject, split: BatchSplit, dtype: torch.dtype | None) -> float | None:
        parts = self._reference.compute_result(
            replace(self._inputs.make_work(of, split, dtype), evaluates=True)
        )
        with of.peers.join_ranks():
            if of.peers.rank or parts is None:
                return None
            one_device, all_rows = replace(of, stages=None, peers=ALONE), BatchSplit(1, split.num_rows)
            work = replace(self._inputs.make_work(one_device, all_rows, dtype), evaluates=True)
            whole = self._reference.compute_result(work)
            assert whole is not None  # it is alone
            effect = compute_error(parts.update, whole.update, "gradients").total
            if effect <= MIN_REPEATED:
                return effect
            once_more = self._reference.compute_result(replace(work, loss=self._compute_second_loss))
            assert once_more is not None
            noise = compute_error(once_more.update, whole.update, "gradients").total
            return effect if noise <= MAX_NOISE * effect else None

    def _compute_second_loss(self, model: Any, batch: Batch) -> Tensor:
        """Compute the loss of a model that has seen the batch, with other draws."""
        maker = self._inputs.maker
        maker.compute_loss(model, map_tensors(Tensor.clone, batch))
        begin_draws(maker.seed + 1)
        return maker.compute_loss(model, batch)
