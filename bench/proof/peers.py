"""Messages between the ranks of a case in a proof.

Ranks speak point to point and on the host: so nothing of what is proved, no collective and no device, carries
what it is compared with. A rank speaks to three others at most of the first rank's binary tree, so its memory
and traffic do not grow with the number of ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.process import note_waiting
from ..measure.faults import PeerFailedError, PeerFullError, is_out_of_memory
from .weights import Weights, compute_tensor_norm, raise_precision

MEETS, FINE, FAILED, FULL = -1.0, 0.0, 1.0, 2.0
"""Words of a rank within its part, where it goes on with the others, and at its end; the largest counts."""

MAX_NAME_BYTES = 256
"""Bytes of a name that ranks tell each other; a longer one is cut."""


@dataclass(frozen=True)
class ProofGroup:
    """The first `world_size` ranks of `group`, each of which calls the same methods in the same order."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    """Process group of gloo; None is the default one."""
    shift: int = 1
    """Number of ranks that the part lies further which a rank computes."""

    @property
    def part(self) -> int:
        """The part of a batch that this rank computes: the next rank's, so what depends on the rank shows."""
        return (self.rank + self.shift) % self.world_size

    @contextlib.contextmanager
    def join_ranks(self) -> Iterator[None]:
        """Within it, each rank works by itself; at its end all go on, or an error of one ends it for all."""
        try:
            yield
        except _ToldError as error:
            raise error.cause from None
        except Exception as error:
            self._check_agreement(FULL if is_out_of_memory(error) else FAILED)
            raise
        if (failed := self._check_agreement(FINE)) is not None:
            raise failed

    def meet(self) -> None:
        """Within `together`, go on where all other ranks come to the same place; raise where one does not."""
        if (failed := self._check_agreement(MEETS)) is not None:
            raise _ToldError(failed)

    def _check_agreement(self, value: float) -> PeerFailedError | None:
        """Say `value` to the other ranks; the error of this one where another says something else."""
        worst, least = self.find_all_largest(value, -value)
        if worst == FULL:
            return PeerFullError("another rank of the case is out of memory")
        if worst >= FAILED:
            return PeerFailedError("another rank of the case failed")
        if worst != -least:
            return PeerFailedError("the ranks call the model another number of times, and DDP would hang")
        return None

    def find_largest(self, value: float) -> float:
        """Find the largest of all ranks' values, on each of them; NaN where one has that."""
        return self.find_all_largest(value)[0]

    def find_all_largest(self, *values: float) -> list[float]:
        """Find the same of several values, each by itself."""
        found = self._combine_ranks(torch.tensor(values, dtype=torch.float64), torch.maximum)
        largest: list[float] = self.broadcast(found).tolist()
        return largest

    def find_worst(self, value: float, name: str) -> tuple[float, str]:
        """Find the largest of all ranks' values, NaN before all others, and the name its rank gives it."""
        content = name.encode()[:MAX_NAME_BYTES].ljust(MAX_NAME_BYTES)
        own = torch.tensor([value, *content], dtype=torch.float64)
        larger = partial(max, key=lambda one: (math.isnan(one[0]), float(one[0])))
        largest, *content_of_worst = self.broadcast(self._combine_ranks(own, larger)).tolist()
        return largest, bytes(map(int, content_of_worst)).decode(errors="ignore").strip()

    def average_tensors(self, own: Weights, *, measures: bool = False) -> tuple[Weights, Weights]:
        """Return the mean of all ranks' tensors, and if asked for the largest norm of each; on every rank."""
        means, sizes = Weights(), Weights()
        for name, one in own.items():
            # What goes to another rank goes by the host, in float32 at least.
            sent = one if self.world_size == 1 else raise_precision(_make_sendable(one))
            means[name] = self._combine_ranks(sent, torch.add) / self.world_size
        for one in means.values():  # by now later ones are under way
            self.broadcast(one)
        if measures and own:
            norms = torch.stack([compute_tensor_norm(one).cpu() for one in own.values()])
            sizes = dict(zip(own, self.broadcast(self._combine_ranks(norms, torch.maximum)), strict=True))
        return means, sizes

    def broadcast(self, value: Tensor, root: int = 0) -> Tensor:
        """Return rank `root`'s tensor, of the same shape and type on all; it is written into theirs."""
        above, below = self._find_tree(root)
        with note_waiting("the other ranks"):
            for other in above:
                dist.recv(value, other, group=self.group)
            for other in below:
                dist.send(value, other, group=self.group)
        return value

    def broadcast_all(self, named: Weights, root: int = 0) -> Weights:
        """Return the same of several tensors of any types, each with its bits; copies on the host."""
        return {name: self.broadcast(_make_sendable(one).clone(), root) for name, one in named.items()}

    def exchange_parts(self, named: Weights) -> Weights:
        """Return this rank's own part of what belongs to the parts that ranks computed."""
        if self.part == self.rank:
            return named
        found = Weights()
        with note_waiting("the other ranks"):
            for name, one in named.items():
                sent = dist.isend(_make_sendable(one), self.part, group=self.group)
                found[name] = torch.empty_like(_make_sendable(one))
                dist.recv(found[name], (self.rank - self.shift) % self.world_size, group=self.group)
                if sent is not None:
                    sent.wait()
        return found

    def _combine_ranks(self, found: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Combine what ranks have found: all on the first one, elsewhere this rank and those below it."""
        above, below = self._find_tree()
        with note_waiting("the other ranks"):
            for other in below:
                received = torch.empty_like(found)
                dist.recv(received, other, group=self.group)
                found = combine(found, received)
            for other in above:
                dist.send(found, other, group=self.group)
        return found

    def _find_tree(self, root: int = 0) -> tuple[list[int], list[int]]:
        """Find the rank above this one in a binary tree, none of `root`, and the two or fewer below it."""
        place = (self.rank - root) % self.world_size
        above = [(place - 1) // 2] if place else []
        below = [one for one in (2 * place + 1, 2 * place + 2) if one < self.world_size]
        above, below = ([(one + root) % self.world_size for one in some] for some in (above, below))
        return above, below


class _ToldError(Exception):
    """Another rank failed, and all ranks have heard of it."""

    def __init__(self, cause: PeerFailedError) -> None:
        super().__init__(str(cause))
        self.cause = cause


ALONE = ProofGroup()
"""A rank that computes by itself."""


def _make_sendable(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
