"""Relative errors of a case, and those that show it to be wrong.

An error is over all tensors, and for each by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .peers import ProofGroup
from .weights import Weights, compute_norm, compute_tensor_norm, subtract_weights

TENSOR_TOLERANCE_FACTOR, MAX_TENSOR_ERROR = 10, 0.5
"""A single tensor may be off by so many times the tolerance, and by so much at most."""

MIN_NORM_SHARE = 1e-2
"""Share of the norm over all: to less than it no tensor's error is relative, for some gradients are noise."""

EXACT, CANCELLED = 1e-9, 1e-5
"""Limits of exact proofs: where no more than the first is allowed, no error is relative to less than
the second of what is added up: what cancels leaves its rounding."""

MAX_AMPLIFICATION = 3
"""A case may be off by so many times what rounding alone does to the plain module; most seen: 1.5."""

PROOF_STEPS = 2
"""Steps that are proven: the second uses the optimizer's state, and PowerSGD compresses from the third."""

GRADIENT_TOLERANCES = {"none": EXACT, "powersgd": EXACT, "fp16": 2e-3, "bf16": 2e-2}
"""Largest relative gradient error by communication hook, in float64; fp16 and bf16 hooks round what they
send (half their last mantissa bit is 2^-11 and 2^-8), PowerSGD compresses only from its third step."""

TOLERANCE_16_BITS, MAX_IN_16_BITS = 2e-2, 0.25
"""Largest gradient error of a model that computes in 16 bits where rounding alone does no more, and where it
does: 8 bits of bf16 cost 3% on ResNet-20 and 13% on ResNet-50, in eval mode."""

UPDATE_TOLERANCES = {"fp32": 1e-2, "tf32": 1e-1, "bf16": 2e-1, "fp16": 1e-1}
"""Largest error by precision. Seen on CPU cores (ResNet-20 and -18, 32 x 32 pixels, batch 8 and 16): compiled
2e-3 in fp32 and 9e-2 in bf16; eager, in another memory format, 4e-3, 9e-2, and 4e-2 in fp16; TF32 has fp16's
10 bits. Eager cases are exact. A ResNet-18 that rounds its way past a ReLU is off by 4e-2 in fp32 and 6e-1 in
bf16: then `MAX_AMPLIFICATION` decides."""

HOOK_TOLERANCES = {"none": 0.0, "powersgd": 0.0, "fp16": 1e-1, "bf16": 2e-1}
"""The same by communication hook, where that is more; seen: 3e-2 with fp16, 6e-2 with bf16."""

MAX_CONCLUSIVE_ERROR = 0.25
"""An error above it that rounding may have made tells nothing: without momentum the second step is off by
0.31 where the gradients of both steps are alike, and other faults of training by more."""


@dataclass(frozen=True)
class RelativeError:
    """A relative error over all tensors, and the largest of a single one."""

    total: float = 0.0
    of_one: float = 0.0
    kind: str = "gradients"
    """Kind of the tensors that are off by the total."""
    one: str = ""
    """Kind and name of the single one."""

    def describe(self, limit: float) -> str:
        """Say which numbers are off by how much, beyond the limit of all tensors or that of one."""
        kind, _, name = self.one.partition(" ")
        if not self.total <= limit:
            where = f", most in {name}" if kind == self.kind else ""
            return f"{self.kind} differ from those of single by {self.total:.2g}{where}"
        return f"{kind} of {name or 'a parameter'} differ from those of single by {self.of_one:.2g}"

    def find_largest(self, peers: ProofGroup) -> RelativeError:
        """Find the largest errors on any of the ranks, on each of them, with what is off there."""
        total, kind = peers.find_worst(self.total, self.kind)
        of_one, one = peers.find_worst(self.of_one, self.one)
        return RelativeError(total, of_one, kind, one)


NO_ERROR = RelativeError()


@dataclass(frozen=True)
class Tolerance:
    """The largest relative error of gradients, or of what steps add to parameters."""

    total: float
    """Over all tensors."""
    of_update: bool = False
    where: str = ""
    """The arithmetic that it is for, in words."""

    def compute_limits(self, noise: RelativeError) -> tuple[float, float]:
        """Return the largest errors over all tensors, and of one, where rounding alone makes `noise`."""
        amplified = MAX_AMPLIFICATION * noise.total
        if not self.of_update:
            total = max(self.total, min(amplified, MAX_IN_16_BITS))
            return total, min(TENSOR_TOLERANCE_FACTOR * total, MAX_TENSOR_ERROR)
        of_one = math.inf  # 16 bits round single ones by any amount
        if self.total <= UPDATE_TOLERANCES["fp32"]:
            of_one = max(MAX_AMPLIFICATION * noise.of_one, MAX_TENSOR_ERROR)
        return max(self.total, amplified), of_one


def judge(error: RelativeError, tolerance: Tolerance, noise: RelativeError = NO_ERROR) -> bool | None:
    """Tell whether a case is right, where rounding alone makes `noise`; None where that leaves it open."""
    total, of_one = tolerance.compute_limits(noise)
    is_nan = math.isnan(error.total) and not (tolerance.of_update and math.isnan(noise.total))
    if error.total > total or error.of_one > of_one or is_nan:
        return False
    return True if error.total <= min(total, MAX_CONCLUSIVE_ERROR) else None


def find_worst(*errors: RelativeError) -> RelativeError:
    """Return the largest error over all tensors of a kind, and the largest of a single one of any kind."""
    total = max(errors, key=lambda one: (math.isnan(one.total), one.total))
    single = max(errors, key=lambda one: (math.isnan(one.of_one), one.of_one))
    return RelativeError(total.total, single.of_one, total.kind, single.one)


def compute_error(
    found: Weights, right: Weights, kind: str, sizes: Weights | None = None, share: float = 0.0
) -> RelativeError:
    """Return the relative error of `found` against `right`, a sum of what has the norms `sizes`.

    The error is relative to `right`, or to a share of those norms where that is more: what cancels leaves its
    rounding. `kind` says what both are. What one of them lacks is zero.
    """
    sizes = sizes or {}
    found, right = (
        {**some, **{n: torch.zeros_like(one) for n, one in other.items() if n not in some}}
        for some, other in ((found, right), (right, found))
    )
    lengths = {
        n: max(float(compute_tensor_norm(one)), share * float(sizes.get(n, 0.0))) for n, one in right.items()
    }
    return _compute_relative(subtract_weights(found, right), lengths, kind)


def compute_buffer_error(found: Weights, right: Weights) -> RelativeError:
    """Return the error of the buffers that both have; what is not finite does not count."""
    ours, theirs = (
        {n: torch.nan_to_num(one.double(), 0.0, 0.0, 0.0) for n, one in some.items() if not one.is_complex()}
        for some in (found, right)
    )
    both = [n for n in theirs if n in ours]
    if any(ours[n].shape != theirs[n].shape for n in both):
        return RelativeError(torch.inf, kind="buffers")
    lengths = {n: float(compute_tensor_norm(theirs[n])) for n in both}
    return _compute_relative({n: ours[n] - theirs[n] for n in both}, lengths, "buffers")


def _compute_relative(apart: Weights, lengths: dict[str, float], kind: str) -> RelativeError:
    total, length = compute_norm(apart), math.hypot(*lengths.values())
    singles = {
        n: _divide_error(float(compute_tensor_norm(one)), max(lengths[n], MIN_NORM_SHARE * length))
        for n, one in apart.items()
    }
    worst = max(singles, key=lambda name: singles[name], default="")
    return RelativeError(_divide_error(total, length), singles.get(worst, 0.0), kind, f"{kind} {worst}")


def _divide_error(off: float, length: float) -> float:
    return 0.0 if off == 0 else off / length if length else math.inf
