"""Check that the loss is a mean over rows of equal weight: where it is none, modes train differently."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ...models.nested import map_tensors
from ...models.step import float32_precision
from ...models.workload import Batch
from ..common.errors import RAISED_BY_USERS
from ..measure.faults import classify_error
from ..plan.case import Split
from .inputs import ProofInputs, proven_split
from .making import begin_draws
from .peers import ALONE
from .reference import Computed, Reference, Subject, Work
from .weights import Weights, difference, norm

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

    def of(self, of: Subject) -> float | None:
        """Return the relative error of the gradient that a case averages against one device's on all rows.

        For a loss that is a mean over rows of equal weight it is rounding. Every rank of the case asks, after
        its proof. None for a batch without rows, where the model computes no loss in evaluation, or where the
        gradient of the whole batch depends on the draw, or on what the module has seen before.
        """
        if not self._inputs.maker.has_rows:
            return None
        dtype, _ = self._inputs.agreed(of.case, of.peers)
        num_parts = proven_split(of.case, 1).num_rows
        split = proven_split(of.case, max(of.case.batch_per_device // num_parts, 1))
        if split.num_forwards * split.accumulate == 1:
            return 0.0
        key = split, of.peers.number, of.stages and of.stages.by_device
        if of.peers.largest(key not in self._known):
            try:
                with float32_precision("fp32", self._inputs.maker.device):
                    self._known[key] = self._computed(of, split, dtype)
            except RAISED_BY_USERS as error:
                if classify_error(error).restart:
                    raise
                self._known[key] = None
        return self._known[key]

    def _computed(self, of: Subject, split: Split, dtype: Any) -> float | None:
        parts = self._reference.computed(of, self._work(split, dtype))
        found = None
        with of.peers.together():
            if not of.peers.rank and parts is not None:
                found = self._against_whole(of, parts, split, dtype)
        return found

    def _against_whole(self, of: Subject, parts: Computed, split: Split, dtype: Any) -> float | None:
        one_device = replace(of, stages=None, peers=ALONE)
        work = self._work(Split(1, split.num_rows), dtype)
        whole = self._reference.computed(one_device, work)
        assert whole is not None  # it is alone
        effect = _apart(parts.gradients, whole.gradients)
        if effect <= MIN_REPEATED:
            return effect
        once_more = self._reference.computed(one_device, replace(work, loss=self._second_loss))
        assert once_more is not None
        noise = _apart(once_more.gradients, whole.gradients)
        return effect if noise <= MAX_NOISE * effect else None

    def _work(self, split: Split, dtype: Any) -> Work:
        def opened(part: int, _: object) -> Any:
            return partial(self._inputs.part, split, dtype, part)

        return Work(split, self._loss, opened, dtype=dtype, evaluates=True)

    def _loss(self, model: Any, batch: Batch, **_: int) -> Tensor:
        return self._inputs.maker.loss(model, batch)

    def _second_loss(self, model: Any, batch: Batch, **_: int) -> Tensor:
        """The loss of a model that has seen the batch, with other draws."""
        self._loss(model, map_tensors(Tensor.clone, batch))
        begin_draws(self._inputs.maker.seed + 1)
        return self._loss(model, batch)


def _apart(found: Weights, right: Weights) -> float:
    length = norm(right)
    return norm(difference(found, right)) / length if length else math.inf
