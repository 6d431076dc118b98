"""How both proofs end: what a mode has found is right, wrong, or nobody knows.

Beside it stands what the plain module comes to. Where the two differ, the plain module computes once more:
a model that differs from itself tells nothing of the mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..case import Case
from ..errors import RAISED_BY_USERS
from ..modes.base import UnusedParametersError
from ..modes.ddp import why_ddp_waits
from .distance import Off, larger, off_by, off_by_buffers
from .error_report import is_out_of_memory
from .messages import NotProved, Shown
from .reference import Computed, Subject

T = TypeVar("T")

OF_LIMIT = 0.1
"""Two runs of the plain module that differ by more of the limit prove nothing."""

AMPLIFIED = 3
"""A case may be off by so many times what rounding alone does to the plain module; most seen: 1.5."""

NO_SEED = NotProved(
    reason="it draws random numbers, and with SyncBatchNorm one device draws others",
    remedy="--sync-batchnorm off",
)
NO_MEMORY = NotProved(
    reason="there is no memory for the plain module beside it", remedy="a smaller --batch-size"
)


def two_runs_differ(off: float) -> NotProved:
    """Of a model that draws or computes otherwise each time."""
    return NotProved(
        reason=f"two runs of the plain module under equal seeds differ by {off:.2g}",
        remedy="draw from torch's, Python's or numpy's global generators, and keep nothing between runs",
    )


class ProofError(RuntimeError):
    """A mode's gradients, parameters, buffers or state dict differ from the plain module's."""


@dataclass(frozen=True)
class Comparison:
    """A case and the plain module, as each rank of the case calls it."""

    of: Subject
    reference: Callable[..., Computed | None]
    """Gives what the plain module comes to; None on a rank without part in it.

    `repeated` computes it once more, `again` as something that differs by rounding alone.
    """

    @functools.cached_property
    def right(self) -> Computed | None:
        """What it comes to."""
        return self.reference()

    @functools.cached_property
    def draws(self) -> bool:
        """Whether the model or its loss draws random numbers on any rank."""
        return bool(self.of.peers.largest(self.right is not None and self.right.draws))

    def off(self, found: Computed | None, *, share: float = 0.0) -> Off:
        """How far `found` is from it on any rank; `share` is of what is added up, as in `off_by`."""
        right, own = self.right, Off()
        if found is not None and right is not None:
            own = off_by(found.gradients, right.gradients, "gradients", right.sizes, share)
            own = larger(own, off_by(found.update, right.update, "parameters"))
            own = larger(own, off_by_buffers(found.buffers, right.buffers))
        return own.among(self.of.peers)

    def why_off(self, error: Off, limit: float, wrong: str, *, share: float = 0.0) -> NotProved:
        """Why a case that is off by too much is not proved. Raises ProofError, `wrong`, where it is wrong."""
        if is_plain(self.of.case):
            return two_runs_differ(error.total)
        if self.of.case.sync_batchnorm and self.draws:
            return NO_SEED
        differ = self.off(self.reference(repeated=True), share=share).total
        if differ <= OF_LIMIT * limit:
            raise ProofError(wrong)
        return two_runs_differ(differ)


def check_use(with_plain: Comparison) -> None:
    """Raise UnusedParametersError where a rank's part leaves DDP waiting, on all ranks before any waits."""
    of, right = with_plain.of, with_plain.right
    with of.peers.together():
        if right is not None and (waits := why_ddp_waits(of.case, right.unused)):
            raise UnusedParametersError(waits)


def unless_memory_is_full(compare: Callable[[], T]) -> T | Shown:
    """What `compare` returns; where the plain module finds no memory, that the case is not proved."""
    try:
        return compare()
    except RAISED_BY_USERS as error:
        if not is_out_of_memory(error):
            raise
        return Shown(not_proved=NO_MEMORY)


def is_plain(case: Case) -> bool:
    """Whether a case is what it is compared with: one device, eager, with the workload's own optimizer."""
    return (
        case.mode == "single"
        and case.compile == "off"
        and case.precision == "fp32"
        and not (case.fused_optimizer or case.channels_last)
    )
