"""Watches the first steps of a trainer, which a proof compares with those of the plain module.

And what users do in them that DDP does not see, so that a wrong gradient has a likely cause.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from ..measure.timed import Hook, Trainer, hook_methods
from ..modes import Mode
from ..plan.case import Case
from .judge import PROOF_STEPS
from .making import begin_draws
from .reference import copy_changed_weights
from .weights import Weights, copy_to_host, get_gradient

STEPS = "; a hook that steps in the backward runs before DDP averages: step after the backward"


class TakeGradients(Optimizer):
    """An optimizer that puts gradients in the place of parameters: a watched step tells every bit of them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__([{"params": list(parameters)}], {})  # a stage of a pipeline may have none

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - it has no use for one
        """Leave in each parameter that trains its gradient, zeros where it has none."""
        for one in self.param_groups[0]["params"]:
            if one.requires_grad:
                one.copy_(get_gradient(one))


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
        self.micro = -1
        """Number of the micro-batch within the step."""
        self.until_over = contextlib.ExitStack()
        """Contexts that end with the steps that are compared."""
        if self.keeps:
            trained = [one for one in self.trainer.mode.module.parameters() if one.requires_grad]
            watched = partial(note_backward_steps, trained, self.stepped)
            hooks: list[Hook] = [
                (self.trainer, "_train", self._begin_micro_step),
                (self.trainer, "_propagate", watched),
            ]
            self.until_over.enter_context(hook_methods(hooks))

    @contextlib.contextmanager
    def _begin_micro_step(self) -> Iterator[None]:
        self.micro += 1
        begin = partial(begin_draws, self.seed, len(self.scales) - 1, self.micro, self.part)
        begin()
        with self.trainer.mode.seed_parts(begin):
            yield

    def note_step(self) -> None:
        """Look at a step; every rank of the case calls it after each."""
        if not self.keeps:
            return
        self.micro = -1
        self.scales += (self.trainer.loss_scale,)
        is_last = self.case.comm_hook == "powersgd" and len(self.scales) > self.num_steps
        if is_last or self.num_taken == self.num_steps:
            weights = self.trainer.mode.gather_weights()
            tells_frozen = self.case.spec.holds_whole
            self.weights = (
                copy_changed_weights(weights, self.start) if tells_frozen else copy_to_host(weights)
            )
            self.buffers = copy_to_host(self.trainer.mode.collect_buffers())
            self.close()

    def close(self) -> None:
        """Let random numbers go on as they will."""
        self.until_over.close()
        self.keeps = False

    @property
    def num_taken(self) -> int:
        """Steps that loss scaling did not leave out."""
        return sum(after >= scale for scale, after in itertools.pairwise(self.scales))


@contextlib.contextmanager
def note_outside_calls(mode: Mode) -> Iterator[list[str]]:
    """Within it, note the modules that are called while the wrapper's forward is not running, by name."""
    names = {id(part): name for name, part in mode.module.named_modules()}
    called: list[str] = []
    depth = 0

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal depth
        if module is mode.wrapped:
            depth += 1
        elif not depth and id(module) in names:
            called.append(names[id(module)])

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    hooks = (
        register_module_forward_pre_hook(enter),
        mode.wrapped.register_forward_hook(leave, always_call=True),
    )
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def explain_misuse(called: Sequence[str]) -> str:
    """Say why gradients differ where these modules were called past the wrapper; empty without any."""
    if not called:
        return ""
    what = f"{called[0]} of model.module" if called[0] else "model.module"
    return f"; the loss calls {what}, which DDP does not see: call model(…)"


@contextlib.contextmanager
def note_backward_steps(parameters: Sequence[nn.Parameter], found: list[bool]) -> Iterator[None]:
    """Within it is a backward; note whether it, or a hook that follows a gradient, changes parameters."""
    before = [one._version for one in parameters]
    yield
    hooked = any(getattr(one, "_post_accumulate_grad_hooks", None) for one in parameters)
    found.append(hooked or before != [one._version for one in parameters])
