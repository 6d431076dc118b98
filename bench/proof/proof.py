"""The proof before timing: the first steps of every mode are those that one device would take.

First the gradients of one step on one seeded global batch, in training and in float64 where the model allows:
those that the mode averages must equal the mean of those that the plain module has of the same parts of the
batch, from the same random numbers, and its state dict must be such as the plain module's. Then the first
steps of what is timed: compiled, in the run's precision, with the case's hook and optimizer, on its own
batches. Parameters and buffers after them must be the plain module's, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...models.data import BatchSource
from ...models.step import float32_precision
from ...models.workload import Batch, Workload, one_line
from ..common.errors import RAISED_BY_USERS
from ..measure.faults import hint_of, is_of_the_model
from ..measure.memory import release_memory
from ..measure.timed import Trainer
from ..modes import Place, Stages, Unsupported, build_mode
from ..plan.case import STAND_IN, Case, Split
from ..results.block_times import ProofResult
from .comparison import AMPLIFIED, BY_RANK, EXACT, NO_GRADIENT, Comparison, ProofError, unless_memory_is_full
from .first_steps import (
    HOOK_TOLERANCES,
    UPDATE_TOLERANCES,
    FirstSteps,
    TakeGradients,
    beyond_rounding,
    is_one_off,
    within_rounding,
)
from .inputs import IN_16_BITS, LEAST_ROWS, ProofInputs
from .making import Maker, shapes_of
from .misuse import STEPS, outside_of_wrapper, why_wrong
from .peers import Peers
from .reference import Computed, Reference, Subject, Work
from .split_effect import MIN_REPEATED, SplitEffect
from .stages import Splitter
from .weights import Weights, difference

TOLERANCES = {"none": EXACT, "powersgd": EXACT, "fp16": 2e-3, "bf16": 2e-2}
"""Largest relative gradient error by communication hook, in float64; fp16 and bf16 hooks round what they
send (half their last mantissa bit is 2^-11 and 2^-8), PowerSGD compresses only from its third step."""

VANISHING = 1e-12
"""Norm of gradients of alternating signs that may be no more than rounding."""

MOST_IN_16_BITS = 0.25
"""Largest gradient error, even where the mode computes in 16 bits and the proof cannot use float64: 8 bits
of bf16 cost 3% on ResNet-20 and 13% on ResNet-50, in eval mode."""

NOT_STOOD_IN = (
    "DP as emulated on CPU cores does not take this model, which nn.DataParallel on GPUs may; both split "
    "each tensor of the inputs, those of lists too, along dimension 0"
)


def why_rows_are_needed(case: Case) -> str:
    """Say what of a case splits or joins batches; empty where each rank trains on what `batch` returns."""
    if case.spec.has_replicas:
        return "nn.DataParallel scatters a batch along dimension 0"
    if case.num_micro_batches > 1:
        return "a pipeline splits a batch along dimension 0"
    if case.sync_batchnorm and case.num_devices > 1:
        return "with SyncBatchNorm one device would have to see the batches of all ranks as one"
    return ""


class _PartSource(BatchSource):
    """The micro-batches of one part of a proof's batch; `micro` is the number of the last one."""

    def __init__(self, fetch: Callable[[int], Batch]) -> None:
        self._fetch, self.micro = fetch, -1

    def next(self) -> Batch:
        self.micro += 1
        return self._fetch(self.micro)


class Prover:
    """Proves one case after another for one workload; keeps the reference gradients it has computed."""

    draws = False
    """True where the model of the case that was proved last, or its loss, draws random numbers."""
    likely_cause = ""
    """Likely cause of gradients that differ: what the loss of the case proved last did past the wrapper."""

    def __init__(
        self,
        workload: Workload,
        place: Place,
        seed: int,
        *,
        data_workers: int = 0,
        control: dist.ProcessGroup | None = None,
        alone: dist.ProcessGroup | None = None,
        num_outputs: int | None = None,
    ) -> None:
        """`control` is what ranks speak through in a proof (None: the default group); others as in Maker."""
        self.place, self._control = place, control
        self.maker = Maker(
            workload, seed, place.device, data_workers=data_workers, alone=alone, num_outputs=num_outputs
        )
        self.splitter = Splitter(self.maker)
        self._is_given = place.rank == 0
        """True where its modules have the first rank's weights."""
        self.forget()

    def forget(self) -> None:
        """Give back the memory of what cases are compared with: copies of the model, some in float64."""
        self.inputs, self.reference = ProofInputs(self.maker), Reference(self.maker)
        self.split_effect = SplitEffect(self.inputs, self.reference)

    def peers(self, case: Case) -> Peers:
        """The ranks of a case, each of which asks: from then on modules have the first one's weights."""
        found = Peers(self.place.rank, case.num_ranks, self._control)
        if found.number > 1 and found.largest(not self._is_given):
            self.maker.start, self._is_given = found.all_given(self.maker.start), True
        return found

    def subject(self, case: Case, stages: Stages | None = None) -> Subject:
        """The case as it is proved; each of its ranks asks."""
        return Subject(case=case, stages=stages, peers=self.peers(case))

    def prove(self, case: Case, group: dist.ProcessGroup | None, stages: Stages | None = None) -> ProofResult:
        """Relative gradient error ‖g - g_single‖ / ‖g_single‖ of this case.

        Every rank of the case calls it together, and finds the same. Raises ProofError where the error
        exceeds the tolerance, UnusedParametersError where DDP would wait for ever. A model that does not run
        in float64 is proven in float32 without TF32, whose 10 bits would use up the tolerance.
        """
        if (why := why_rows_are_needed(case)) and not self.maker.has_rows:
            raise Unsupported(f"{why}, and tensors of this batch have no row for each sample")
        with float32_precision("fp32", self.place.device):
            of = self.subject(case, stages)
            self.inputs.settle(case, of.peers, LEAST_ROWS)
            dtype, split = self.inputs.agreed(case, of.peers)
            self.inputs.settle(case, of.peers, split.batch_size // split.num_chunks)
            work = self._work(split, dtype)
            with_plain = Comparison(of, partial(self.reference.computed, of, work))
            try:
                full = unless_memory_is_full(with_plain.check_use)
                if full is None and with_plain.size <= VANISHING:
                    # A loss of all ranks' rows is the same on each: with other signs its gradients cancel.
                    work = self._work(split, dtype, alternates=False)
                    with_plain = Comparison(of, partial(self.reference.computed, of, work))
                    full = unless_memory_is_full(with_plain.check_use)
                found = self._of_mode(of, group, work)
            except RAISED_BY_USERS as error:
                if case.impl != STAND_IN or not is_of_the_model(error):
                    raise
                whole = replace(split, num_chunks=1, gathered=False)
                # An error of the model's own comes first.
                self.reference.computed(of, self._work(whole, dtype))
                raise Unsupported(f"{NOT_STOOD_IN}: {one_line(error)}{hint_of(error)}") from error
            if full is not None:
                return full
            return unless_memory_is_full(partial(self._compared, with_plain, found, dtype))

    def prove_update(self, steps: FirstSteps, of: Subject) -> ProofResult:
        """Compare what `steps` kept, on every rank: ‖θ - θ_ref‖ / ‖θ_ref - θ_0‖. Raises ProofError."""
        if steps.weights is None or not steps.num_taken:
            return ProofResult(why_silent="loss scaling left all of them out")
        try:
            return unless_memory_is_full(partial(self._update_compared, steps, steps.weights, of))
        finally:
            release_memory(self.place.device)

    def _depends_on_ranks(self, shifted: Comparison, found: Computed, allowed: float) -> bool:
        """Tell whether gradients, not buffers alone, are others where another rank computes a part.

        That may be right, as where one rank's rows are sent to all; one device on the whole batch tells.
        """
        if shifted.off(replace(found, buffers={}), allowed).is_within(allowed):
            return False
        effect = self.split_effect.of(shifted.of)
        is_off = not shifted.of.peers.rank and (effect is None or effect > MIN_REPEATED)
        return bool(shifted.of.peers.largest(is_off))

    def _work(self, split: Split, dtype: torch.dtype | None, *, alternates: bool = True) -> Work:
        alternates = alternates and not split.joined

        def signed(model: Any, batch: Batch, micro: int, part: int) -> Tensor:
            # They alternate, so that what all parts have in common cancels.
            return self.maker.loss(model, batch) * ((-1) ** (part + micro) if alternates else 1)

        def opened(part: int, _: object) -> Callable[[int], Batch]:
            return partial(self.inputs.part, split, dtype, part)

        return Work(split, signed, opened, dtype=dtype, alternates=alternates)

    def _of_mode(self, of: Subject, group: dist.ProcessGroup | None, work: Work) -> Computed:
        # The module's own arithmetic, which the steps that are timed need not have.
        case = replace(of.case, precision="fp32", fused_optimizer=False, zero_optimizer=False)
        part = case.part_of(self.place.rank)
        source = _PartSource(partial(self.inputs.part, replace(work.split, joined=False), work.dtype, part))

        def loss(model: Any, batch: Batch) -> Tensor:
            return work.loss(model, batch, micro=source.micro, part=part)

        workload = replace(
            self.maker.workload, loss=functional.cross_entropy, batch_loss=loss, optimizer=TakeGradients
        )
        with of.peers.together():
            module = self.maker.module(work.dtype)
        mode = build_mode(case, module, self.place, group, stages=of.stages)
        trainer = Trainer(case, mode, workload, source)
        steps = FirstSteps(case, trainer, self.maker.seed, part, num_steps=1)
        try:
            if of.shares_buffers and of.peers.rank:
                with torch.no_grad():
                    for buffer in filter(Tensor.is_floating_point, mode.module.buffers()):
                        buffer.add_(1)  # the first rank's have to come
            with mode.explained():
                with of.peers.together(), outside_of_wrapper(mode) as called:
                    trainer.step()
                self.likely_cause = why_wrong(called)
                steps.after_step()
                assert steps.weights is not None  # it was the only step
                return Computed(
                    gradients=steps.weights, buffers=steps.buffers, state=shapes_of(mode.state_dict())
                )
        finally:
            steps.end()
            trainer.close()

    def _compared(self, with_plain: Comparison, found: Computed, dtype: torch.dtype | None) -> ProofResult:
        case, peers, right = with_plain.of.case, with_plain.of.peers, with_plain.right
        odd = sorted(found.state.items() ^ right.state.items(), key=str) if right is not None else []
        if peers.largest(bool(odd)):
            first = f": {odd[0][0]}" if odd else ""
            raise ProofError(f"its state dict is not the plain module's{first}")
        self.draws = with_plain.draws
        narrowed = case.mp_policy != "none" and dtype != torch.float64
        allowed = MOST_IN_16_BITS if narrowed else TOLERANCES[case.comm_hook]
        if not with_plain.size:
            return ProofResult(not_proved=NO_GRADIENT)
        shifted = with_plain
        with_plain, error = shifted.closest(found, allowed)
        if not error.is_within(allowed):
            allowed = max(allowed, self.inputs.allowed(peers))
            with_plain, error = shifted.closest(found, allowed)
        if with_plain is not shifted and self._depends_on_ranks(shifted, found, allowed):
            return ProofResult(not_proved=BY_RANK)
        if allowed >= IN_16_BITS and not error.is_within(allowed):
            noise = with_plain.off(with_plain.reference(again=True), allowed)
            allowed = max(allowed, min(AMPLIFIED * noise.total, MOST_IN_16_BITS))
        if error.is_within(allowed):
            return ProofResult(error=error.total)
        wrong = f"{error.said(allowed)} (relative; at most {allowed:.0e}{self.inputs.less()})"
        wrong += self.likely_cause
        return ProofResult(not_proved=with_plain.why_off(error, allowed, wrong))

    def _update_compared(self, steps: FirstSteps, weights: Weights, of: Subject) -> ProofResult:
        case, with_plain = of.case, Comparison(of, partial(self.reference.update, of, steps.scales))
        if not with_plain.moves:
            return ProofResult(why_silent="its optimizer changes no parameter in them")
        update = difference(weights, {name: self.maker.start[name] for name in weights})
        tolerance = max(UPDATE_TOLERANCES[case.precision], HOOK_TOLERANCES[case.comm_hook])
        with_plain, error = with_plain.closest(Computed(update=update, buffers=steps.buffers), tolerance)
        if error.total <= tolerance and not is_one_off(error, tolerance):
            return ProofResult(error=error.total)
        noise = with_plain.off(with_plain.reference(again=True))
        hook = "" if case.comm_hook == "none" else f" with the {case.comm_hook} hook"
        if wrong := beyond_rounding(error, tolerance, noise, f"{case.precision}{hook}"):
            wrong += (STEPS if any(steps.stepped) else "") + self.likely_cause
            return ProofResult(not_proved=with_plain.why_off(error, tolerance, wrong))
        return within_rounding(error, tolerance, noise)
