"""Whether the loss is a mean over rows of equal weight: where not, modes train differently."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.distributed as dist

from ...models.nested import cut
from ...models.step import float32_precision
from ..case import Case
from ..errors import RAISED_BY_USERS
from ..modes.base import gradients_of
from .distance import difference, off_by_buffers
from .error_report import report_of
from .groups import num_launched
from .making import generators
from .peers import Weights, as_default, norm
from .proof_inputs import ProofInputs, proven_split
from .reference import buffers_of, on_host


@dataclass
class SplitEffect:
    """How far the gradient of a batch's parts is from that of all rows at once; keeps what it computed."""

    inputs: ProofInputs
    alone: dist.ProcessGroup | None
    """The default process group of a rank that computes alone."""
    _known: dict[tuple[int, int], Weights] = field(default_factory=dict)

    def of(self, case: Case) -> float | None:
        """The effect of how a case splits its batch, relative; of a mean over equal rows it is rounding.

        To be asked on the first rank, after the case's proof. In evaluation, for batch norm has rows depend
        on each other, and dropout differs; None for a model that does not compute its loss in it, or draws,
        changes buffers or asks other ranks.
        """
        num_parts = proven_split(case, 1).num_rows
        num_rows = max(case.batch_per_device // num_parts, 1) * num_parts
        with float32_precision("fp32", self.inputs.maker.device), as_default(self.alone):
            parts, whole = (self._evaluated(num_rows, number) for number in (num_parts, 1))
        if not parts or not whole:
            return None
        length = norm(whole)
        return norm(difference(parts, whole)) / length if length else math.nan

    def _evaluated(self, num_rows: int, num_parts: int) -> Weights:
        """The mean of the parts' gradients in evaluation; empty where they tell nothing."""
        key = (num_rows, num_parts)
        if key in self._known:
            return self._known[key]
        inputs = self.inputs
        module = inputs.maker.module(inputs.dtype, refers=True)
        in_training = [part for part in module.modules() if part.training]
        module.eval()
        before, buffers, launched = generators(), buffers_of(module), num_launched(self.alone)
        try:
            for part in cut(inputs.batch(num_rows, inputs.dtype), num_parts):
                (inputs.maker.loss(module, part) / num_parts).backward()
        except RAISED_BY_USERS as error:
            if report_of(error).restart:
                raise
            module.zero_grad()
        tells = any(one.grad is not None for one in module.parameters()) and generators() == before
        tells = tells and launched == num_launched(self.alone)
        tells = tells and not off_by_buffers(buffers_of(module), buffers).total
        self._known[key] = on_host(gradients_of(module)) if tells else {}
        for part in in_training:
            part.training = True
        inputs.maker.take_back(module)
        return self._known[key]
