"""The second proof before timing: the first steps of the warm-up train as the plain module would.

They are steps of what is timed: compiled, in the run's precision, with the case's hook and optimizer, on its
own batches, batch norm in training. The parameters after them must be those of `bench/worker/reference.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..case import Case
from ..findings.numbers import short
from ..measure.memory import release_memory
from ..measure.timed import Trainer
from .messages import UpdateError
from .outcome import is_out_of_gpu_memory
from .proof import ProofError, Prover, loaded
from .reference import Weights, difference, norm, switch_off, weights_of

PROOF_STEPS = 2
"""Steps that are proven: the second uses the optimizer's state, and PowerSGD compresses from the third."""

TOLERANCES = {"fp32": 1e-2, "tf32": 1e-1, "bf16": 2e-1, "fp16": 1e-1}
"""Largest error by precision. Seen on CPU cores (ResNet-20 and -18, 32 x 32 pixels, batch 8 and 16): compiled
2e-3 in fp32 and 9e-2 in bf16; eager, in another memory format, 4e-3, 9e-2, and 4e-2 in fp16; TF32 has fp16's
10 bits. Eager cases are exact. A ResNet-18 that rounds its way past a ReLU is off by 4e-2 in fp32 and 6e-1 in
bf16: then `AMPLIFIED` decides."""

HOOK_TOLERANCES = {"none": 0.0, "powersgd": 0.0, "fp16": 1e-1, "bf16": 2e-1}
"""The same by communication hook, where that is more; seen: 3e-2 with fp16, 6e-2 with bf16."""

AMPLIFIED = 3
"""A case may be off by so many times what rounding alone does to the reference; most seen: 1.5."""

MOST_TELLING = 0.25
"""An error above it that rounding may have made tells nothing: without momentum the second step is off by
0.31 where the gradients of both steps are alike, and other faults of training by more."""


class FirstSteps:
    """Watches the first steps of a case's warm-up on one rank; what draws random numbers is off meanwhile."""

    def __init__(
        self, case: Case, trainer: Trainer, *, keeps: bool, kinds: Sequence[type[nn.Module]] = ()
    ) -> None:
        """`keeps` on the rank that compares; `kinds` of modules are off beside dropout."""
        self.trainer = trainer
        self._keeps = keeps
        self._most = PROOF_STEPS if case.comm_hook == "powersgd" else math.inf
        self.switched_off = switch_off(trainer.mode.module, *kinds)
        self.scales: tuple[float, ...] = (trainer.loss_scale,)
        self.state: dict[str, Any] | None = None
        """What the parameters were then; empty where nothing is kept."""

    def after_step(self) -> None:
        """Look at a step of the warm-up; every rank of the case calls it after each."""
        if self.state is not None:
            return
        self.scales += (self.trainer.loss_scale,)
        if self.num_taken == PROOF_STEPS or len(self.scales) > self._most:
            state = self.trainer.mode.state_dict()
            self.state = {name: _on_host(one) for name, one in state.items()} if self._keeps else {}
            self.end()

    def end(self) -> None:
        for part in self.switched_off:
            part.training = True

    @property
    def num_taken(self) -> int:
        """Steps that loss scaling did not leave out."""
        return sum(after >= scale for scale, after in itertools.pairwise(self.scales))


def prove_update(case: Case, steps: FirstSteps, prover: Prover) -> UpdateError:
    """Compare what `steps` kept, on rank 0. Raises ProofError."""
    if steps.state is None or not steps.num_taken:
        return UpdateError(why_not="loss scaling left all of them out")
    found = weights_of(loaded(prover.template, steps.state))
    try:
        return _compared(case, steps, prover, found)
    except RuntimeError as error:
        if not is_out_of_gpu_memory(error):
            raise
        return UpdateError(why_not="there is no memory for the reference beside the cases")
    finally:
        release_memory(prover.place.device)


def _compared(case: Case, steps: FirstSteps, prover: Prover, found: Weights) -> UpdateError:
    reference = prover.reference.update(case, steps.scales)
    update = difference(found, weights_of(prover.template))
    error = _relative(update, reference)
    tolerance = max(TOLERANCES[case.precision], HOOK_TOLERANCES[case.comm_hook])
    if error <= tolerance:
        return UpdateError(error=error)
    noise = _relative(prover.reference.update(case, steps.scales, again=True), reference)
    hook = "" if case.comm_hook == "none" else f" with the {case.comm_hook} hook"
    return judged(error, tolerance, noise, f"{case.precision}{hook}")


def judged(error: float, tolerance: float, noise: float, what: str) -> UpdateError:
    """What an error above the tolerance means, where rounding alone changes the update by `noise`.

    Raises ProofError where it is more than rounding can do.
    """
    allowed = max(tolerance, AMPLIFIED * noise)
    if error > allowed or (math.isnan(error) and not math.isnan(noise)):
        raise ProofError(
            f"parameters after {PROOF_STEPS} steps differ from those of single by {error:.2g} (relative to "
            f"the update; at most {allowed:.0e} in {what})"
        )
    if error <= min(allowed, MOST_TELLING):
        return UpdateError(error=error)
    return UpdateError(
        why_not="rounding or random numbers alone change the update of the reference by "
        f"{short(100 * noise, 2)}%"
    )


def _relative(update: Weights, reference: Weights) -> float:
    off, length = norm(difference(update, reference)), norm(reference)
    if off == 0:
        return 0.0
    return off / length if length else math.inf


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
