"""Watches the first steps of a trainer, which a proof compares with those of the plain module."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..common.numbers import short
from ..measure.timed import Hook, Trainer, hooked
from ..plan.case import Case
from ..results.block_times import ProofResult
from .comparison import AMPLIFIED, MOST_OF_ONE, Off
from .making import begin_draws
from .misuse import steps_in_backward
from .reference import changed_weights
from .weights import Weights, gradient_of, on_host

PROOF_STEPS = 2
"""Steps that are proven: the second uses the optimizer's state, and PowerSGD compresses from the third."""

UPDATE_TOLERANCES = {"fp32": 1e-2, "tf32": 1e-1, "bf16": 2e-1, "fp16": 1e-1}
"""Largest error by precision. Seen on CPU cores (ResNet-20 and -18, 32 x 32 pixels, batch 8 and 16): compiled
2e-3 in fp32 and 9e-2 in bf16; eager, in another memory format, 4e-3, 9e-2, and 4e-2 in fp16; TF32 has fp16's
10 bits. Eager cases are exact. A ResNet-18 that rounds its way past a ReLU is off by 4e-2 in fp32 and 6e-1 in
bf16: then `AMPLIFIED` decides."""

HOOK_TOLERANCES = {"none": 0.0, "powersgd": 0.0, "fp16": 1e-1, "bf16": 2e-1}
"""The same by communication hook, where that is more; seen: 3e-2 with fp16, 6e-2 with bf16."""

MOST_TELLING = 0.25
"""An error above it that rounding may have made tells nothing: without momentum the second step is off by
0.31 where the gradients of both steps are alike, and other faults of training by more."""


class TakeGradients(Optimizer):
    """An optimizer that puts gradients in the place of parameters: a watched step tells every bit of them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__([{"params": list(parameters)}], {})  # a stage of a pipeline may have none

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        """Leave in each parameter that trains its gradient, zeros where it has none."""
        for one in self.param_groups[0]["params"]:
            if one.requires_grad:
                one.copy_(gradient_of(one))


@dataclass
class FirstSteps:
    """Watches the first steps of a trainer on one rank; random numbers begin as the reference's do."""

    case: Case
    trainer: Trainer
    seed: int
    part: int
    """Part of the batch that this rank trains on."""
    num_steps: int = PROOF_STEPS
    keeps: bool = True
    """True where they are compared."""
    weights: Weights | None = None
    """Parameters after the steps, of those that train or changed."""
    start: Weights = field(default_factory=dict)
    """The same before the steps; without any, what changed and does not train is left out."""
    buffers: Weights = field(default_factory=dict)
    stepped: list[bool] = field(default_factory=list)
    """True for each backward that changed parameters."""

    def __post_init__(self) -> None:
        self.scales: tuple[float, ...] = (self.trainer.loss_scale,)
        self._micro = 0
        self.until_over = contextlib.ExitStack()
        """Contexts that end with the steps that are compared."""
        if self.keeps:
            trained = [one for one in self.trainer.mode.module.parameters() if one.requires_grad]
            watched = partial(steps_in_backward, trained, self.stepped)
            hooks: list[Hook] = [(self.trainer, "_train", self._begun), (self.trainer, "_propagate", watched)]
            self.until_over.enter_context(hooked(hooks))

    @contextlib.contextmanager
    def _begun(self) -> Iterator[None]:
        begin = partial(begin_draws, self.seed, len(self.scales) - 1, self._micro, self.part)
        self._micro += 1
        begin()
        with self.trainer.mode.draws_from(begin):
            yield

    def after_step(self) -> None:
        """Look at a step; every rank of the case calls it after each."""
        if not self.keeps:
            return
        self._micro = 0
        self.scales += (self.trainer.loss_scale,)
        is_last = self.case.comm_hook == "powersgd" and len(self.scales) > self.num_steps
        if is_last or self.num_taken == self.num_steps:
            weights = self.trainer.mode.weights()
            tells_frozen = self.case.spec.holds_whole
            self.weights = changed_weights(weights, self.start) if tells_frozen else on_host(weights)
            self.buffers = on_host(self.trainer.mode.buffers())
            self.end()

    def end(self) -> None:
        """Let random numbers go on as they will."""
        self.until_over.close()
        self.keeps = False

    @property
    def num_taken(self) -> int:
        """Steps that loss scaling did not leave out."""
        return sum(after >= scale for scale, after in itertools.pairwise(self.scales))


def beyond_rounding(error: Off, tolerance: float, noise: Off, what: str) -> str:
    """Say what is wrong where rounding alone, which changes the update by `noise`, does less; else empty."""
    allowed = max(tolerance, AMPLIFIED * noise.total)
    one_off = is_one_off(error, tolerance) and error.of_one > AMPLIFIED * noise.of_one
    is_nan = math.isnan(error.total) and not math.isnan(noise.total)
    if not (error.total > allowed or one_off or is_nan):
        return ""
    limit = MOST_OF_ONE if error.total <= allowed else allowed
    said = f"{error.said(allowed)} after {PROOF_STEPS} steps"
    return f"{said} (relative to the update; at most {limit:.0e} in {what})"


def within_rounding(error: Off, tolerance: float, noise: Off) -> ProofResult:
    """Report an error that rounding may have made: nothing where rounding is large."""
    if error.total <= min(max(tolerance, AMPLIFIED * noise.total), MOST_TELLING):
        return ProofResult(error=error.total)
    by = short(100 * noise.total, 2)
    return ProofResult(why_silent=f"rounding alone changes the update of the reference by {by}%")


def is_one_off(error: Off, tolerance: float) -> bool:
    """Tell whether a single parameter is wrong; 16 bits round some by as much."""
    return tolerance <= UPDATE_TOLERANCES["fp32"] and error.of_one > MOST_OF_ONE
