"""A case against the plain module, and whether its mode is wrong.

Where both differ, the plain module computes once more: a model that differs from itself tells nothing of the
mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from ..common.errors import USER_EXCEPTIONS
from ..common.numbers import format_short
from ..measure.faults import is_out_of_memory
from ..modes.base import UnusedParametersError
from ..modes.ddp import explain_ddp_wait
from ..results.block_times import NotProved, ProofResult
from .judge import (
    CANCELLED,
    EXACT,
    NO_ERROR,
    PROOF_STEPS,
    TOLERANCE_16_BITS,
    RelativeError,
    Tolerance,
    compute_buffer_error,
    compute_error,
    find_worst,
    judge,
)
from .reference import Computed, Reference, Work
from .weights import compute_norm

T = TypeVar("T")

MAX_NOISE_SHARE = 0.1
"""Two runs of the plain module that differ by more of the limit prove nothing."""

NO_SEED = NotProved(
    reason="it draws random numbers, and with SyncBatchNorm one device draws others",
    remedy="--sync-batchnorm off",
)
NO_GRADIENT = NotProved(
    reason="its gradients are all zero on the batch of the proof",
    remedy="a loss that depends on the parameters from the first step on",
)
BY_RANK = NotProved(
    reason="its gradients depend on the numbers of ranks, and are not those of one device on the whole batch",
    remedy="use the number of a rank only to find its rows among those of all ranks",
)
NO_MEMORY = NotProved(
    reason="there is no memory for the plain module beside it", remedy="a smaller --batch-size"
)


class ProofError(RuntimeError):
    """A mode's gradients, parameters, buffers or state dict differ from the plain module's."""


class Facts(NamedTuple):
    """The norm of the plain module's result; whether it draws random numbers, and asks other ranks.

    Where the norm, of the update or of the parts' gradients, is 0, a mode that does nothing looks right.
    """

    size: float
    draws: bool
    asks: bool


@dataclass(frozen=True)
class ReferenceCheck:
    """A case and the plain module, as each rank of the case calls it."""

    reference: Reference
    work: Work

    @functools.cached_property
    def reference_result(self) -> Computed | None:
        """The result of the plain module; None on a rank without part in it."""
        return self.reference.compute_result(self.work)

    @functools.cached_property
    def on_any(self) -> Facts:
        """The largest of each on any rank."""
        right = self.reference_result or Computed()
        size = compute_norm(right.update if self.work.scales else right.sizes)
        size, draws, asks = self.work.of.peers.find_all_largest(size, right.draws, right.asks)
        return Facts(size, bool(draws), bool(asks))

    def check_use(self) -> None:
        """Raise UnusedParametersError where a rank's part leaves DDP waiting, on all before any waits."""
        right, of = self.reference_result, self.work.of
        with of.peers.join_ranks():
            if right is not None and (waits := explain_ddp_wait(of.case, right.unused)):
                raise UnusedParametersError(waits)

    def prove(
        self,
        found: Computed,
        tolerance: Tolerance,
        depends_on_ranks: Callable[[ReferenceCheck, Computed, Tolerance], bool] = lambda *_: False,
        cause: str = "",
    ) -> ProofResult:
        """Compare with what a mode has found.

        Raises ProofError, which names the likely `cause`, where the mode is wrong.
        """
        closest, error = self._find_closest(found, tolerance)
        is_right = judge(error, tolerance)
        if closest is not self and depends_on_ranks(self, found, tolerance):
            return ProofResult(not_proved=BY_RANK)
        noise = NO_ERROR
        if not is_right and (tolerance.of_update or tolerance.total >= TOLERANCE_16_BITS):
            perturbed = self.reference.compute_result(replace(closest.work, perturbed=True))
            noise = closest.compute_max_error(perturbed, tolerance)
            is_right = judge(error, tolerance, noise)
        if is_right:
            return ProofResult(error=error.total)
        if is_right is None:
            by = format_short(100 * noise.total, 2)
            return ProofResult(
                inconclusive_reason=f"rounding alone changes the update of the reference by {by}%"
            )
        total, of_one = tolerance.compute_limits(noise)
        limit = of_one if error.total <= total else total
        after, to = (f" after {PROOF_STEPS} steps", " to the update") if tolerance.of_update else ("", "")
        wrong = f"{error.describe(total)}{after} (relative{to}; at most {limit:.0e}{tolerance.where}){cause}"
        if not tolerance.of_update:
            tolerance = replace(tolerance, total=total)
        return ProofResult(not_proved=closest.explain_mismatch(error, tolerance, wrong))

    def _find_closest(self, found: Computed, tolerance: Tolerance) -> tuple[ReferenceCheck, RelativeError]:
        """Return the error of `found`, and the comparison that says so.

        Of a model that asks other ranks the answers may depend on their order, as those of a queue of rows
        from all ranks do. Each rank then computes its own part, as in training.
        """
        error, strict = self.compute_max_error(found, tolerance), Tolerance(tolerance.total)
        if not self.on_any.asks or judge(error, strict):
            return self, error
        ordered = replace(self, work=replace(self.work, in_order=True))
        in_order = ordered.compute_max_error(found, tolerance)
        return (ordered, in_order) if judge(in_order, strict) else (self, error)

    def compute_max_error(self, found: Computed | None, tolerance: Tolerance) -> RelativeError:
        """Return the largest error of `found` over all ranks, where so much is allowed."""
        # Coarse arithmetic leaves more where what is added up cancels.
        share = CANCELLED if tolerance.total <= EXACT else 1.0
        right, own = self.reference_result, NO_ERROR
        kind = "parameters" if self.work.scales else "gradients"
        with self.work.of.peers.join_ranks():
            if found is not None and right is not None:
                is_whole = kind == "gradients" or self.work.of.case.spec.holds_whole
                update = {n: one for n, one in right.update.items() if is_whole or n in found.update}
                own = find_worst(
                    compute_error(found.update, update, kind, right.sizes, share),
                    compute_buffer_error(found.buffers, right.buffers),
                )
        return own.find_largest(self.work.of.peers)

    def explain_mismatch(self, error: RelativeError, tolerance: Tolerance, wrong: str) -> NotProved:
        """Why a case that is off by too much is not proved. Raises ProofError, `wrong`, where it is wrong."""
        case = self.work.of.case
        usual = case.compile == "off" and case.precision == "fp32"
        # One device, eager, with the workload's own optimizer: it is what it is compared with.
        if not (case.mode == "single" and usual and not (case.fused_optimizer or case.channels_last)):
            if case.sync_batchnorm and self.on_any.draws:
                return NO_SEED
            error = self.compute_max_error(
                self.reference.compute_result(self.work, recompute=True), tolerance
            )
            if error.total <= MAX_NOISE_SHARE * tolerance.total:
                raise ProofError(wrong)
        return NotProved(
            reason=f"two runs of the plain module under equal seeds differ by {error.total:.2g}",
            remedy="draw from torch's, Python's or numpy's global generators, and keep nothing between runs",
        )


def report_full_memory(compare: Callable[[], T]) -> T | ProofResult:
    """Return what `compare` returns; where the plain module finds no memory, that the case is not proved."""
    try:
        return compare()
    except USER_EXCEPTIONS as error:
        if not is_out_of_memory(error):
            raise
        return ProofResult(not_proved=NO_MEMORY)
