"""The training step, and a block of them with nothing else inside."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...models.data import BatchSource
from ...models.step import make_optimizer
from ...models.workload import Batch, Workload, make_loss_function
from ..modes import Mode
from ..plan.case import Case
from ..results.block_times import DEVICE_ALLOCS, BlockTimes
from .clock import Clock
from .memory import count_device_allocs

LEAD_IN_STEPS = {"cpu": 0, "cuda": 2}
"""Untimed steps of a block by kind of device: a GPU that was idle raises its clock, fills its queue and gets
its memory back from the driver."""

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_autocast(case: Case) -> contextlib.AbstractContextManager[object]:
    """Make a context in which forward and loss compute in the case's precision; it can be entered again."""
    dtype = AUTOCAST_DTYPES.get(case.precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(case.device_type, dtype=dtype)


PHASES = {"data": "_fetch", "forward": "_evaluate", "backward": "_propagate", "optimizer": "_update"}
"""Phases of a step, and the methods that do them; `zero_grad` counts to the optimizer."""


class NonFiniteLossError(ArithmeticError):
    """Training has diverged: what follows would time arithmetic on NaN."""


class Trainer:
    """One rank's training step of one case: the loop a user would write, the same in every mode.

    A proof watches the same code as it takes its steps.
    """

    def __init__(self, case: Case, mode: Mode, workload: Workload, source: BatchSource) -> None:
        self.mode = mode
        self._forward = mode.wrapped
        self._loss, self._source, self._accumulate = make_loss_function(workload), source, case.accumulate
        # A MixedPrecisionPolicy stands in place of autocast.
        self._precision = make_autocast(case) if case.mp_policy == "none" else contextlib.nullcontext()
        # Loss scaling is part of fp16 training, so its cost belongs to the step.
        self._scaler = torch.amp.GradScaler(case.device_type) if case.precision == "fp16" else None
        self._last_loss: Tensor | None = None
        self.num_lead_in = max(LEAD_IN_STEPS[case.device_type], math.ceil(source.num_ahead / case.accumulate))
        """Untimed steps of a block, which also use what was loaded before it."""
        self.optimizer = mode.make_optimizer(partial(make_optimizer, workload, case))
        self._num_steps = 0

    @property
    def loss_scale(self) -> float:
        """Factor on the next step's loss; it falls where a step overflowed and was left out."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def step(self) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.compute_gradients()
        self._update()

    def compute_gradients(self) -> None:
        """Train on `accumulate` micro-batches; gradients synchronise in the last one."""
        for _ in range(self._accumulate - 1):
            with self.mode.no_sync():
                self._train(self._fetch())
        self._train(self._fetch())

    def _fetch(self) -> Batch:
        return self._source.get_batch()

    def _train(self, batch: Batch) -> None:
        if self.mode.train is not None:  # PyTorch's schedule, which autocast leaves alone
            with self._precision:
                self._last_loss = self.mode.train(batch, self._compute_mean_loss)
            return
        loss = self._evaluate(batch)
        self._last_loss = loss.detach()
        self._propagate(loss)

    def _evaluate(self, batch: Batch) -> Tensor:
        with self._precision:
            return self._compute_mean_loss(self._forward, batch)

    def _compute_mean_loss(self, model: Any, batch: Batch) -> Tensor:
        loss = self._loss(model, batch)
        return loss / self._accumulate if self._accumulate > 1 else loss

    def _propagate(self, loss: Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()

    def step_locally(self) -> None:
        """Run the same step without communication: gradients stay local to the rank."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.mode.skip_communication():
            self.compute_gradients()
            self._update()

    @contextlib.contextmanager
    def load_ahead(self) -> Iterator[None]:
        """Within it, processes that load batches work ahead, as in training; else they rest."""
        self._source.resume()
        try:
            yield
        finally:
            self._source.pause()

    def take_lead_in(self, step: Callable[[], None]) -> None:
        """Take the untimed steps that precede those that are looked into."""
        for _ in range(self.num_lead_in):
            step()

    def check_loss(self) -> None:
        """Raise NonFiniteLossError unless the last loss is finite. Waits for the device."""
        if self._last_loss is None:
            return
        loss = float(self._last_loss)
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"loss is {loss} after {self._num_steps} steps")

    def _update(self) -> None:
        self._num_steps += 1
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()

    def release_gradients(self) -> None:
        """Free them, as the next step does first: other cases need the memory meanwhile."""
        self.optimizer.zero_grad(set_to_none=True)

    def hook_phases(
        self, around: Callable[[str], contextlib.ContextDecorator]
    ) -> contextlib.AbstractContextManager[None]:
        """Within it, each phase of a step runs within what `around` makes of its name."""
        return hook_methods((self, method, partial(around, phase)) for phase, method in PHASES.items())

    def close(self) -> None:
        self._source.close()
        self.mode.close()


Hook = tuple[object, str, Callable[[], contextlib.ContextDecorator]]
"""An object, the name of one of its methods, and what makes a context for each call of it."""


@contextlib.contextmanager
def hook_methods(hooks: Iterable[Hook]) -> Iterator[None]:
    """Within it, each call of these methods runs within a context of its own."""
    hooks = list(hooks)
    for owner, method, around in hooks:
        setattr(owner, method, around()(getattr(owner, method)))
    try:
        yield
    finally:
        for owner, method, _ in hooks:
            delattr(owner, method)  # the class's own method shows again


def run_block(
    step: Callable[[], None], num_steps: int, clock: Clock, *, lead_in: int = 0, gpus: Sequence[int] = ()
) -> BlockTimes:
    """Run and time `num_steps` steps after `lead_in` untimed ones. The caller puts a barrier before it.

    With `gpus` the detail tells how often the timed steps asked their driver for memory.
    """
    with pause_gc():
        for _ in range(lead_in):
            step()
        before = count_device_allocs(gpus)
        clock.begin()
        for _ in range(num_steps):
            step()
            clock.mark()
        steps_ms = clock.read_ms()
    detail = {DEVICE_ALLOCS: count_device_allocs(gpus) - before} if gpus else {}
    return BlockTimes(sum(steps_ms), tuple(steps_ms), detail)


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Hold garbage collection back: one in the middle of a step has nothing to do with the case."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
