"""How far what was found is from what is right: over all tensors, and for each by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .peers import Peers, Weights, norm, norm_of

OF_ONE, MOST_OF_ONE = 10, 0.5
"""A single tensor may be off by so many times the tolerance, and by so much at most."""

FLOOR = 1e-2
"""Of the norm over all: to less than it no tensor's error is relative, for some gradients are noise."""

CANCELLED = 1e-5
"""Of what is added up: to less than it no error is relative, for what cancels leaves its rounding."""


@dataclass(frozen=True)
class Off:
    """A relative error over all tensors, and the largest of a single one."""

    total: float = 0.0
    of_one: float = 0.0
    name: str = ""
    """Of the single one."""
    kind: str = "gradients"

    def is_within(self, allowed: float) -> bool:
        """Whether both are small enough; NaN never is."""
        return self.total <= allowed and self.of_one <= min(OF_ONE * allowed, MOST_OF_ONE)

    def said(self, allowed: float) -> str:
        """Which numbers are off by how much, beyond what is allowed."""
        if not self.total <= allowed:
            return f"{self.kind} differ from those of single by {self.total:.2g}"
        return f"{self.kind} of {self.name} differ from those of single by {self.of_one:.2g}"

    def among(self, peers: Peers) -> Off:
        """The largest on any of the ranks, on each of them."""
        total, of_one = peers.largest(self.total), peers.largest(self.of_one)
        return Off(total, of_one, self.name or "a parameter", self.kind)


def off_by(
    found: Weights,
    right: Weights,
    kind: str,
    sizes: Weights | None = None,
    share: float = 0.0,
) -> Off:
    """How far `found` is from `right`, a sum of what has the norms `sizes`; relative.

    To `right`, or to a share of those norms where that is more: what cancels leaves its rounding. `kind` says
    what both are.
    """
    lengths = {
        name: max(float(norm_of(one)), share * float((sizes or {}).get(name, 0.0)))
        for name, one in right.items()
    }
    return _relative(difference({name: found[name] for name in right}, right), lengths, kind)


def off_by_buffers(found: Weights, right: Weights) -> Off:
    """How far buffers are from the right ones, of those that both have; what is not finite does not count."""
    ours, theirs = (
        {n: torch.nan_to_num(one.double(), 0.0, 0.0, 0.0) for n, one in some.items() if not one.is_complex()}
        for some in (found, right)
    )
    both = [n for n in theirs if n in ours]
    if any(ours[n].shape != theirs[n].shape for n in both):
        return Off(torch.inf, kind="buffers")
    lengths = {n: float(norm_of(theirs[n])) for n in both}
    return _relative({n: ours[n] - theirs[n] for n in both}, lengths, "buffers")


def larger(one: Off, other: Off) -> Off:
    """The one of the two that is larger, NaN being the largest."""
    return one if not one.total <= other.total else other


def difference(one: Weights, other: Weights) -> Weights:
    """`one` - `other`, in float32 at least."""
    return {name: one[name].to(_fine(start)) - start.to(_fine(start)) for name, start in other.items()}


def _relative(apart: Weights, lengths: dict[str, float], kind: str) -> Off:
    total, length = norm(apart), math.hypot(*lengths.values())
    singles = {
        name: _over(float(norm_of(one)), max(lengths[name], FLOOR * length)) for name, one in apart.items()
    }
    worst = max(singles, key=lambda name: singles[name], default="")
    return Off(_over(total, length), singles.get(worst, 0.0), worst, kind)


def _over(off: float, length: float) -> float:
    return 0.0 if off == 0 else off / length if length else math.inf


def _fine(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
