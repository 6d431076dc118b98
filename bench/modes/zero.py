"""ZeRO-1: every rank steps its share of the parameters and sends them to the others.

A module of its own, for importing it takes half a second that other cases do without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ...models.step import defaults_of
from .base import Unsupported


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """A `ZeroRedundancyOptimizer` that can be kept from sending."""

    _sends = True

    @contextlib.contextmanager
    def without_communication(self) -> Iterator[None]:
        """Within it, a step updates this rank's parameters alone; the next one after it sends them all."""
        self._sends = False
        try:
            yield
        finally:
            self._sends = True

    def _sync_params(self) -> None:
        if self._sends:
            super()._sync_params()  # type: ignore[misc]  # torch's is not typed


def sharded(plain: Optimizer, group: dist.ProcessGroup | None) -> ShardedOptimizer:
    """Make the same optimizer, its state shared out over `group`; each rank calls this with its own.

    Raises Unsupported where torch cannot, and for step hooks, which another optimizer would not have.
    """
    if plain._optimizer_step_pre_hooks or plain._optimizer_step_post_hooks:
        raise Unsupported("the optimizer has step hooks, which ZeroRedundancyOptimizer drops")
    groups = [dict(group) for group in plain.param_groups]
    try:
        return ShardedOptimizer(groups, type(plain), process_group=group, **defaults_of(plain))
    except (TypeError, ValueError) as error:
        name = type(plain).__name__
        raise Unsupported(f"ZeroRedundancyOptimizer does not take this {name}: {error}") from error
