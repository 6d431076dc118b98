"""The error of a mode's result against that of the plain module, and whether the mode is wrong.

The error is over all tensors, and for each by itself. Where both differ, the plain module computes once more:
a model that differs from itself tells nothing of the mode.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ..common.errors import RAISED_BY_USERS
from ..measure.faults import is_out_of_memory
from ..modes.base import UnusedParametersError
from ..modes.ddp import why_ddp_waits
from ..results.block_times import NotProved, ProofResult
from .peers import Peers
from .reference import Computed, Subject
from .weights import Weights, difference, norm, norm_of

T = TypeVar("T")

OF_ONE, MOST_OF_ONE = 10, 0.5
"""A single tensor may be off by so many times the tolerance, and by so much at most."""

FLOOR = 1e-2
"""Share of the norm over all: to less than it no tensor's error is relative, for some gradients are noise."""

EXACT, CANCELLED = 1e-9, 1e-5
"""Limits of exact proofs: where no more than the first is allowed, no error is relative to less than
the second of what is added up: what cancels leaves its rounding."""

OF_LIMIT = 0.1
"""Two runs of the plain module that differ by more of the limit prove nothing."""

AMPLIFIED = 3
"""A case may be off by so many times what rounding alone does to the plain module; most seen: 1.5."""

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


@dataclass(frozen=True)
class Off:
    """A relative error over all tensors, and the largest of a single one."""

    total: float = 0.0
    of_one: float = 0.0
    name: str = ""
    """Name of the single one."""
    kind: str = "gradients"
    """Kind of the tensors that are off by the total."""
    kind_of_one: str = ""
    """Kind of the single one, where it is another."""

    def is_within(self, allowed: float) -> bool:
        """Tell whether both are small enough; NaN never is."""
        return self.total <= allowed and self.of_one <= min(OF_ONE * allowed, MOST_OF_ONE)

    def said(self, allowed: float) -> str:
        """Say which numbers are off by how much, beyond what is allowed."""
        if not self.total <= allowed:
            where = f", most in {self.name}" if self.kind_of_one in ("", self.kind) else ""
            return f"{self.kind} differ from those of single by {self.total:.2g}{where}"
        kind = self.kind_of_one or self.kind
        return f"{kind} of {self.name} differ from those of single by {self.of_one:.2g}"

    def among(self, peers: Peers) -> Off:
        """The largest errors on any of the ranks, on each of them, with what is off there."""
        total, kind = peers.worst(self.total, self.kind)
        of_one, label = peers.worst(self.of_one, f"{self.kind_of_one or self.kind} {self.name}")
        kind_of_one, _, name = label.partition(" ")
        return Off(total, of_one, name or "a parameter", kind, kind_of_one)


@dataclass(frozen=True)
class Comparison:
    """A case and the plain module, as each rank of the case calls it."""

    of: Subject
    reference: Callable[..., Computed | None]
    """Gives what the plain module comes to; None on a rank without part in it.

    `repeated` computes it once more, `again` as something that differs by rounding alone, `in_order` with
    each rank's own part.
    """

    @functools.cached_property
    def right(self) -> Computed | None:
        return self.reference()

    def closest(self, found: Computed | None, allowed: float) -> tuple[Comparison, Off]:
        """Return the error of `found`, and the comparison that says so.

        Of a model that asks other ranks the answers may depend on their order, as those of a queue of rows
        from all ranks do. Each rank then computes its own part, as in training.
        """
        error = self.off(found, allowed)
        asks = self.of.peers.largest(self.right is not None and self.right.asks)
        if not asks or error.is_within(allowed):
            return self, error
        ordered = replace(self, reference=functools.partial(self.reference, in_order=True))
        if (again := ordered.off(found, allowed)).is_within(allowed):
            return ordered, again
        return self, error

    @functools.cached_property
    def draws(self) -> bool:
        """True where the model or its loss draws random numbers on any rank."""
        return bool(self.of.peers.largest(self.right is not None and self.right.draws))

    @functools.cached_property
    def size(self) -> float:
        """The norm of the parts' gradients: where it is 0, a mode that computes none looks right."""
        return self.of.peers.largest(0.0 if self.right is None else norm(self.right.sizes))

    @functools.cached_property
    def moves(self) -> bool:
        """True where the steps of the plain module change a parameter."""
        return bool(self.of.peers.largest(self.right is not None and norm(self.right.update) != 0))

    def check_use(self) -> None:
        """Raise UnusedParametersError where a rank's part leaves DDP waiting, on all before any waits."""
        right = self.right
        with self.of.peers.together():
            if right is not None and (waits := why_ddp_waits(self.of.case, right.unused)):
                raise UnusedParametersError(waits)

    def off(self, found: Computed | None, allowed: float = 0.0) -> Off:
        """Return the largest error of `found` over all ranks, where so much is allowed."""
        # Coarse arithmetic leaves more where what is added up cancels.
        share = CANCELLED if allowed <= EXACT else 1.0
        right, own = self.right, Off()
        with self.of.peers.together():
            if found is not None and right is not None:
                is_whole = self.of.case.spec.holds_whole
                update = {n: one for n, one in right.update.items() if is_whole or n in found.update}
                own = _worst_of(
                    off_by(found.gradients, right.gradients, "gradients", right.sizes, share),
                    off_by(found.update, update, "parameters"),
                    off_by_buffers(found.buffers, right.buffers),
                )
        return own.among(self.of.peers)

    def why_off(self, error: Off, limit: float, wrong: str) -> NotProved:
        """Why a case that is off by too much is not proved. Raises ProofError, `wrong`, where it is wrong."""
        case = self.of.case
        usual = case.compile == "off" and case.precision == "fp32"
        # One device, eager, with the workload's own optimizer: it is what it is compared with.
        if not (case.mode == "single" and usual and not (case.fused_optimizer or case.channels_last)):
            if case.sync_batchnorm and self.draws:
                return NO_SEED
            error = self.off(self.reference(repeated=True), limit)
            if error.total <= OF_LIMIT * limit:
                raise ProofError(wrong)
        return NotProved(
            reason=f"two runs of the plain module under equal seeds differ by {error.total:.2g}",
            remedy="draw from torch's, Python's or numpy's global generators, and keep nothing between runs",
        )


def unless_memory_is_full(compare: Callable[[], T]) -> T | ProofResult:
    """Return what `compare` returns; where the plain module finds no memory, that the case is not proved."""
    try:
        return compare()
    except RAISED_BY_USERS as error:
        if not is_out_of_memory(error):
            raise
        return ProofResult(not_proved=NO_MEMORY)


def _worst_of(*errors: Off) -> Off:
    """The largest error over all tensors of a kind, and the largest of a single one of any kind."""
    total = max(errors, key=lambda one: (math.isnan(one.total), one.total))
    single = max(errors, key=lambda one: (math.isnan(one.of_one), one.of_one))
    return replace(total, of_one=single.of_one, name=single.name, kind_of_one=single.kind)


def off_by(
    found: Weights, right: Weights, kind: str, sizes: Weights | None = None, share: float = 0.0
) -> Off:
    """Return the relative error of `found` against `right`, a sum of what has the norms `sizes`.

    The error is relative to `right`, or to a share of those norms where that is more: what cancels leaves its
    rounding. `kind` says what both are. What one of them lacks is zero.
    """
    sizes = sizes or {}
    found, right = (
        {**some, **{n: torch.zeros_like(one) for n, one in other.items() if n not in some}}
        for some, other in ((found, right), (right, found))
    )
    lengths = {n: max(float(norm_of(one)), share * float(sizes.get(n, 0.0))) for n, one in right.items()}
    return _relative(difference(found, right), lengths, kind)


def off_by_buffers(found: Weights, right: Weights) -> Off:
    """Return the error of the buffers that both have; what is not finite does not count."""
    ours, theirs = (
        {n: torch.nan_to_num(one.double(), 0.0, 0.0, 0.0) for n, one in some.items() if not one.is_complex()}
        for some in (found, right)
    )
    both = [n for n in theirs if n in ours]
    if any(ours[n].shape != theirs[n].shape for n in both):
        return Off(torch.inf, kind="buffers")
    lengths = {n: float(norm_of(theirs[n])) for n in both}
    return _relative({n: ours[n] - theirs[n] for n in both}, lengths, "buffers")


def _relative(apart: Weights, lengths: dict[str, float], kind: str) -> Off:
    total, length = norm(apart), math.hypot(*lengths.values())
    singles = {n: _over(float(norm_of(one)), max(lengths[n], FLOOR * length)) for n, one in apart.items()}
    worst = max(singles, key=lambda name: singles[name], default="")
    return Off(_over(total, length), singles.get(worst, 0.0), worst, kind)


def _over(off: float, length: float) -> float:
    return 0.0 if off == 0 else off / length if length else math.inf
