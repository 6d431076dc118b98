"""The proof before timing: the first steps of every mode are those that one device would take.

First the gradients of one step on one seeded global batch, in training and in float64 where the model allows:
those that the mode averages must equal the mean of those that the plain module has of the same parts of the
batch, from the same random numbers, and its state dict must be such as the plain module's. Then the first
steps of what is timed: compiled, in the run's precision, with the case's hook and optimizer, on its own
batches. Parameters and buffers after them must be the plain module's, on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...models.data import HostSource
from ...models.step import set_float32_precision
from ...models.workload import Batch, format_error
from ..common.errors import USER_EXCEPTIONS
from ..measure.faults import find_hint, is_of_the_model
from ..measure.memory import release_memory
from ..measure.timed import Trainer
from ..modes import Place, Stages, Unsupported, build_mode
from ..plan.case import STAND_IN, Case
from ..results.block_times import ProofResult
from .comparison import NO_GRADIENT, ProofError, ReferenceCheck, report_full_memory
from .first_steps import STEPS, FirstSteps, TakeGradients, explain_misuse, note_outside_calls
from .inputs import MIN_ROWS, Arithmetic, ProofInputs, choose_proof_split
from .judge import GRADIENT_TOLERANCES, HOOK_TOLERANCES, MAX_IN_16_BITS, UPDATE_TOLERANCES, Tolerance, judge
from .making import Maker, describe_state
from .peers import ProofGroup
from .reference import Computed, Reference, Subject, Work, make_training
from .split_effect import MIN_REPEATED, SplitEffect
from .stages import Splitter
from .weights import Weights, subtract_weights

MAX_VANISHING_NORM = 1e-12
"""Norm of gradients of alternating signs that may be no more than rounding."""

NO_STAND_IN = (
    "DP as emulated on CPU cores does not take this model, which nn.DataParallel on GPUs may; both split "
    "each tensor of the inputs, those of lists too, along dimension 0"
)


def explain_rows_needed(case: Case) -> str:
    """Say what of a case splits or joins batches; empty where each rank trains on what `batch` returns."""
    if case.spec.has_replicas:
        return "nn.DataParallel scatters a batch along dimension 0"
    if case.num_micro_batches > 1:
        return "a pipeline splits a batch along dimension 0"
    if case.sync_batchnorm and case.num_devices > 1:
        return "with SyncBatchNorm one device would have to see the batches of all ranks as one"
    return ""


class Prover:
    """Proves one case after another for one workload; keeps the reference gradients it has computed."""

    draws = False
    """True where the model of the case that was proved last, or its loss, draws random numbers."""
    likely_cause = ""
    """Likely cause of gradients that differ: what the loss of the case proved last did past the wrapper."""

    def __init__(self, maker: Maker, place: Place, control: dist.ProcessGroup | None = None) -> None:
        """`control` is what ranks speak through in a proof, and no case (None: the default group)."""
        self.maker, self.place, self._control = maker, place, control
        self.splitter = Splitter(maker)
        self._is_given = place.rank == 0
        """True where its modules have the first rank's weights."""
        self.forget()

    def forget(self) -> None:
        """Give back the memory of what cases are compared with: copies of the model, some in float64."""
        self.inputs, self.reference = ProofInputs(self.maker), Reference(self.maker)
        self.split_effect = SplitEffect(self.inputs, self.reference)

    def make_subject(self, case: Case, stages: Stages | None = None) -> Subject:
        """Make the case as it is proved. Each of its ranks asks, and then has the weights of rank 0."""
        peers = ProofGroup(self.place.rank, case.num_ranks, self._control)
        if peers.world_size > 1 and peers.find_largest(not self._is_given):
            self.maker.start, self._is_given = peers.broadcast_all(self.maker.start), True
        return Subject(case=case, stages=stages, peers=peers)

    def prove(self, case: Case, group: dist.ProcessGroup | None, stages: Stages | None = None) -> ProofResult:
        """Relative gradient error ‖g - g_single‖ / ‖g_single‖ of this case.

        Every rank of the case calls it together, and finds the same. Raises ProofError where the error
        exceeds the tolerance, UnusedParametersError where DDP would wait for ever. A model that does not run
        in float64 is proven in float32 without TF32, whose 10 bits would use up the tolerance.
        """
        if (why := explain_rows_needed(case)) and not self.maker.has_rows:
            raise Unsupported(f"{why}, and tensors of this batch have no row for each sample")
        with set_float32_precision("fp32", self.place.device):
            of = self.make_subject(case, stages)
            self.inputs.compute_first_loss(case, of.peers, MIN_ROWS)
            arithmetic = self.inputs.share_arithmetic(of.peers)
            dtype, split = arithmetic.dtype, choose_proof_split(case, arithmetic.num_rows)
            self.inputs.compute_first_loss(case, of.peers, split.batch_size // split.num_chunks)
            try:
                # A loss of all ranks' rows is the same on each: with other signs its gradients cancel.
                for alternates in (not split.joined, False):
                    work = replace(self.inputs.make_work(of, split, dtype), alternates=alternates)
                    with_plain = ReferenceCheck(self.reference, work)
                    full = report_full_memory(with_plain.check_use)
                    if full is not None or with_plain.on_any.size > MAX_VANISHING_NORM:
                        break
                found = self._compute_mode(group, work)
            except USER_EXCEPTIONS as error:
                if case.impl != STAND_IN or not is_of_the_model(error):
                    raise
                whole = replace(split, num_chunks=1, gathered=False)
                # An error of the model's own comes first.
                self.reference.compute_result(self.inputs.make_work(of, whole, dtype))
                raise Unsupported(f"{NO_STAND_IN}: {format_error(error)}{find_hint(error)}") from error
            if full is not None:
                return full
            return report_full_memory(partial(self._compare_case, with_plain, found, arithmetic))

    def prove_update(self, steps: FirstSteps, of: Subject) -> ProofResult:
        """Compare what `steps` kept, on every rank: ‖θ - θ_ref‖ / ‖θ_ref - θ_0‖. Raises ProofError."""
        if steps.weights is None or not steps.num_taken:
            return ProofResult(inconclusive_reason="loss scaling left all of them out")
        try:
            return report_full_memory(partial(self._update_compared, steps, steps.weights, of))
        finally:
            release_memory(self.place.device)

    def _is_rank_dependent(self, shifted: ReferenceCheck, found: Computed, tolerance: Tolerance) -> bool:
        """Tell whether gradients, not buffers alone, are others where another rank computes a part.

        That may be right, as where one rank's rows are sent to all; one device on the whole batch tells.
        """
        if judge(shifted.compute_max_error(replace(found, buffers={}), tolerance), tolerance):
            return False
        of = shifted.work.of
        effect = self.split_effect.measure_effect(of)
        return bool(of.peers.find_largest(not of.peers.rank and (effect is None or effect > MIN_REPEATED)))

    def _compute_mode(self, group: dist.ProcessGroup | None, work: Work) -> Computed:
        # The module's own arithmetic, which the steps that are timed need not have.
        of = work.of
        case = replace(of.case, precision="fp32", fused_optimizer=False, zero_optimizer=False)
        part = case.get_part(self.place.rank)

        def compute_loss(model: Any, batch: Batch) -> Tensor:
            return work.loss(model, batch) * work.get_sign(steps.micro, part)

        workload = replace(
            self.maker.workload,
            loss=functional.cross_entropy,
            batch_loss=compute_loss,
            optimizer=TakeGradients,
        )
        with of.peers.join_ranks():
            module, split = self.maker.make_module(work.dtype), replace(work.split, joined=False)
            batches = [
                self.inputs.make_part(split, work.dtype, part, micro) for micro in range(split.accumulate)
            ]
        source = HostSource(batches, self.place.device)
        mode = build_mode(case, module, self.place, group, stages=of.stages)
        trainer = Trainer(case, mode, workload, source)
        steps = FirstSteps(case, trainer, self.maker.seed, part, num_steps=1)
        try:
            if of.shares_buffers and of.peers.rank:
                with torch.no_grad():
                    for buffer in filter(Tensor.is_floating_point, mode.module.buffers()):
                        buffer.add_(1)  # the first rank's have to come
            with mode.enter_steps():
                with of.peers.join_ranks(), note_outside_calls(mode) as called:
                    trainer.step()
                self.likely_cause = explain_misuse(called)
                steps.note_step()
                assert steps.weights is not None  # it was the only step
                return Computed(
                    update=steps.weights,
                    buffers=steps.buffers,
                    state=describe_state(mode.gather_state_dict()),
                )
        finally:
            steps.close()
            trainer.close()

    def _compare_case(
        self, with_plain: ReferenceCheck, found: Computed, arithmetic: Arithmetic
    ) -> ProofResult:
        of, dtype, right = with_plain.work.of, arithmetic.dtype, with_plain.reference_result
        odd = sorted(found.state.items() ^ right.state.items(), key=str) if right is not None else []
        if of.peers.find_largest(bool(odd)):
            first = f": {odd[0][0]}" if odd else ""
            raise ProofError(f"its state dict is not the plain module's{first}")
        self.draws = with_plain.on_any.draws
        if not with_plain.on_any.size:
            return ProofResult(not_proved=NO_GRADIENT)
        narrowed = of.case.mp_policy != "none" and dtype != torch.float64
        least = MAX_IN_16_BITS if narrowed else GRADIENT_TOLERANCES[of.case.comm_hook]
        kind, why = "float32" if dtype else "its own dtype", arithmetic.why_float32
        tolerance = Tolerance(
            max(least, arithmetic.tolerance), where=why and f"; in {kind}, for in float64: {why}"
        )
        return with_plain.prove(found, tolerance, self._is_rank_dependent, self.likely_cause)

    def _update_compared(self, steps: FirstSteps, weights: Weights, of: Subject) -> ProofResult:
        with_plain = ReferenceCheck(self.reference, make_training(self.maker, of, steps.scales))
        if not with_plain.on_any.size:
            return ProofResult(inconclusive_reason="its optimizer changes no parameter in them")
        update = subtract_weights(weights, {name: self.maker.start[name] for name in weights})
        precision, hook = of.case.precision, of.case.comm_hook
        total = max(UPDATE_TOLERANCES[precision], HOOK_TOLERANCES[hook])
        where = f" in {precision}" + ("" if hook == "none" else f" with the {hook} hook")
        cause = (STEPS if any(steps.stepped) else "") + self.likely_cause
        found, tolerance = Computed(update=update, buffers=steps.buffers), Tolerance(total, True, where)
        return with_plain.prove(found, tolerance, cause=cause)
