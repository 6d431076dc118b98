"""What the ranks of a case tell each other in a proof: point to point and on the host.

So nothing of what is proved, no collective and no device, carries what it is compared with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .error_report import PeerFailedError, PeerFullError, is_out_of_memory

Weights = dict[str, Tensor]
"""Parameters, what was added to them, their gradients, or buffers, by name."""

FINE, FAILED, FULL = 0.0, 1.0, 2.0
"""How a rank came to the end of its part; of several ranks the largest counts."""

_waits_for: list[str] = []
"""What the main thread waits for, for the thread that answers the conductor meanwhile."""


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Within, this rank has done its part and waits: who is late is somebody else."""
    _waits_for.append(what)
    try:
        yield
    finally:
        _waits_for.pop()


def waits_for() -> str:
    """Tell what this rank waits for; empty while it works."""
    return _waits_for[-1] if _waits_for else ""


@contextlib.contextmanager
def as_default(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within it, collectives that name no group use `group`, as in a program that its ranks alone run.

    None leaves the default group as it is.
    """
    if group is None:
        yield
        return
    before = dist.group.WORLD
    distributed_c10d._update_default_pg(group)  # no public way
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)


@dataclass(frozen=True)
class Peers:
    """The first `number` ranks of `group`, each of which calls the same methods in the same order."""

    rank: int = 0
    number: int = 1
    group: dist.ProcessGroup | None = None
    """Of gloo; None is the default one."""

    @property
    def part(self) -> int:
        """Whose part of a batch this rank computes: the next rank's, so what depends on the rank shows."""
        return (self.rank + 1) % self.number

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within it, each rank works by itself; at its end all go on, or an error of one ends it for all."""
        try:
            yield
        except Exception as error:
            self.largest(FULL if is_out_of_memory(error) else FAILED)
            raise
        worst = self.largest(FINE)
        if worst == FULL:
            raise PeerFullError("another rank of the case is out of memory")
        if worst:
            raise PeerFailedError("another rank of the case failed")

    def largest(self, value: float) -> float:
        """The largest of all ranks' values, on each of them; NaN where one has that."""
        found = torch.tensor([value], dtype=torch.float64)
        for other in self._on_first(found):
            found = torch.maximum(found, other)
        return float(self.given(found))

    def mean(self, own: Weights, *, measures: bool = False) -> tuple[Weights, Weights]:
        """The mean of all ranks' tensors, and if asked for the largest norm of each; on every rank."""
        means, sizes = Weights(), Weights()
        for name, one in own.items():
            # What goes to another rank goes by the host, in float32 at least.
            fine = one if self.number == 1 else _fine(_sendable(one))
            parts = [*self._on_first(fine)] or [fine]
            assert self.rank or len(parts) == self.number  # each rank's part is in it
            means[name] = self.given(sum(parts[1:], parts[0]) / self.number)
            if measures:
                sizes[name] = self.given(torch.stack([norm_of(part).cpu() for part in parts]).amax())
        return means, sizes

    def given(self, value: Tensor, root: int = 0) -> Tensor:
        """What rank `root` has of a tensor of the same shape and type on all; written into theirs."""
        with waiting_for("the other ranks"):
            if self.rank == root:
                for other in range(self.number):
                    if other != root:
                        dist.send(value, other, group=self.group)
            else:
                dist.recv(value, root, group=self.group)
        return value

    def all_given(self, named: Weights, root: int = 0) -> Weights:
        """The same of several tensors of any types, each with its bits; copies on the host."""
        return {name: self.given(_sendable(one).clone(), root) for name, one in named.items()}

    def own_part(self, named: Weights) -> Weights:
        """Of what belongs to the parts that ranks computed, that of the part which is this rank's own."""
        if self.number == 1:
            return named
        found = Weights()
        with waiting_for("the other ranks"):
            for name, one in named.items():
                sent = dist.isend(_sendable(one), self.part, group=self.group)
                found[name] = torch.empty_like(_sendable(one))
                dist.recv(found[name], (self.rank - 1) % self.number, group=self.group)
                if sent is not None:
                    sent.wait()
        return found

    def _on_first(self, own: Tensor) -> Iterator[Tensor]:
        """On the first rank what each has, its own first; elsewhere it is sent, and nothing comes."""
        if self.rank:
            dist.send(own, 0, group=self.group)
            return
        yield own
        for other in range(1, self.number):
            found = torch.empty_like(own)
            with waiting_for("the other ranks"):
                dist.recv(found, other, group=self.group)
            yield found


ALONE = Peers()
"""A rank that computes by itself."""


def _sendable(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _fine(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def norm_of(tensor: Tensor) -> Tensor:
    """The 2-norm of a tensor of real or complex numbers."""
    # Squares of float32 overflow and vanish.
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    found: Tensor = torch.linalg.vector_norm(tensor.to(wide))
    return found


def on_host(named: Weights) -> Weights:
    """Copy tensors to the host."""
    return {name: one.detach().to("cpu", copy=True) for name, one in named.items()}


def difference(one: Weights, other: Weights) -> Weights:
    """`one` - `other`, in float32 at least."""
    return {name: _fine(one[name]) - _fine(start) for name, start in other.items()}


def norm(weights: Mapping[str, Tensor]) -> float:
    """The 2-norm over all tensors."""
    return float(torch.stack([norm_of(one).cpu() for one in weights.values()] or [torch.zeros(())]).norm())
