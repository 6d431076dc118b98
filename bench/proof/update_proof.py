"""The second proof before timing: the first steps of the warm-up train as the plain module would.

They are steps of what is timed: compiled, in the run's precision, with the case's hook and optimizer, on its
own batches. Parameters and buffers after them must be those of `bench/proof/reference.py`, on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from ..common.numbers import short
from ..measure.memory import release_memory
from ..measure.timed import Hook, Trainer, hooked
from ..plan.case import Case
from ..results.block_times import ProofResult
from .comparison import AMPLIFIED, MOST_OF_ONE, Comparison, Off, unless_memory_is_full
from .making import begin_draws
from .misuse import STEPS, steps_in_backward
from .proof import Prover
from .reference import Computed, Subject, changed_weights
from .weights import Weights, difference, on_host

PROOF_STEPS = 2
"""Steps that are proven: the second uses the optimizer's state, and PowerSGD compresses from the third."""

TOLERANCES = {"fp32": 1e-2, "tf32": 1e-1, "bf16": 2e-1, "fp16": 1e-1}
"""Largest error by precision. Seen on CPU cores (ResNet-20 and -18, 32 x 32 pixels, batch 8 and 16): compiled
2e-3 in fp32 and 9e-2 in bf16; eager, in another memory format, 4e-3, 9e-2, and 4e-2 in fp16; TF32 has fp16's
10 bits. Eager cases are exact. A ResNet-18 that rounds its way past a ReLU is off by 4e-2 in fp32 and 6e-1 in
bf16: then `AMPLIFIED` decides."""

HOOK_TOLERANCES = {"none": 0.0, "powersgd": 0.0, "fp16": 1e-1, "bf16": 2e-1}
"""The same by communication hook, where that is more; seen: 3e-2 with fp16, 6e-2 with bf16."""

MOST_TELLING = 0.25
"""An error above it that rounding may have made tells nothing: without momentum the second step is off by
0.31 where the gradients of both steps are alike, and other faults of training by more."""


@dataclass
class FirstSteps:
    """Watches the first steps of a case's warm-up on one rank; random numbers begin as the reference's do."""

    case: Case
    trainer: Trainer
    seed: int
    part: int
    """Part of the batch that this rank trains on."""
    keeps: bool = True
    """True where they are compared."""
    weights: Weights | None = None
    """Parameters after the steps, of those that train or changed."""
    start: Weights = field(default_factory=dict)
    """The same before the steps."""
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
        """Look at a step of the warm-up; every rank of the case calls it after each."""
        if not self.keeps:
            return
        self._micro = 0
        self.scales += (self.trainer.loss_scale,)
        is_last = self.case.comm_hook == "powersgd" and len(self.scales) > PROOF_STEPS
        if is_last or self.num_taken == PROOF_STEPS:
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


def prove_update(steps: FirstSteps, of: Subject, prover: Prover) -> ProofResult:
    """Compare what `steps` kept, on every rank: ‖θ - θ_ref‖ / ‖θ_ref - θ_0‖. Raises ProofError."""
    if steps.weights is None or not steps.num_taken:
        return ProofResult(why_silent="loss scaling left all of them out")
    try:
        return unless_memory_is_full(partial(_compared, steps, of, prover))
    finally:
        release_memory(prover.place.device)


def _compared(steps: FirstSteps, of: Subject, prover: Prover) -> ProofResult:
    case, with_plain = of.case, Comparison(of, partial(prover.reference.update, of, steps.scales))
    assert steps.weights is not None
    if not with_plain.moves:
        return ProofResult(why_silent="its optimizer changes no parameter in them")
    update = difference(steps.weights, {name: prover.maker.start[name] for name in steps.weights})
    tolerance = max(TOLERANCES[case.precision], HOOK_TOLERANCES[case.comm_hook])
    with_plain, error = with_plain.closest(Computed(update=update, buffers=steps.buffers), tolerance)
    if error.total <= tolerance and not _is_one_off(error, tolerance):
        return ProofResult(error=error.total)
    noise = with_plain.off(with_plain.reference(again=True))
    hook = "" if case.comm_hook == "none" else f" with the {case.comm_hook} hook"
    if wrong := beyond_rounding(error, tolerance, noise, f"{case.precision}{hook}"):
        wrong += (STEPS if any(steps.stepped) else "") + prover.likely_cause
        return ProofResult(not_proved=with_plain.why_off(error, tolerance, wrong))
    return within_rounding(error, tolerance, noise)


def beyond_rounding(error: Off, tolerance: float, noise: Off, what: str) -> str:
    """Say what is wrong where rounding alone, which changes the update by `noise`, does less; else empty."""
    allowed = max(tolerance, AMPLIFIED * noise.total)
    is_one_off = _is_one_off(error, tolerance) and error.of_one > AMPLIFIED * noise.of_one
    is_nan = math.isnan(error.total) and not math.isnan(noise.total)
    if not (error.total > allowed or is_one_off or is_nan):
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


def _is_one_off(error: Off, tolerance: float) -> bool:
    """Tell whether a single parameter is wrong; 16 bits round some by as much."""
    return tolerance <= TOLERANCES["fp32"] and error.of_one > MOST_OF_ONE
