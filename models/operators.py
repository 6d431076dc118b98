"""Arithmetic and memory traffic of the operators of a forward, counted without running one."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddp_bench.bench.errors import RAISED_BY_USERS
from ddp_bench.models.nested import map_tensors
from ddp_bench.models.workload import Workload, loss_function, make_batch

_MADE_ROWS = 2
"""Rows of the batch that a workload makes; on the meta device it is as long as wanted, at no cost."""

_MOVE_NOTHING = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operators that allocate or rename memory and start no kernel, beside those that declare a view."""


@dataclass(frozen=True)
class OperatorCost:
    """What an operator costs each time, and how often a forward has one of this cost."""

    count: int
    flops: int
    num_bytes: int


def forward_costs(
    workload: Workload, *, batch_size: int, autocast: torch.dtype | None
) -> tuple[OperatorCost, ...]:
    """Count forward and loss of one batch on the meta device; empty where they do not run there.

    FLOPs are those of matrix products, convolutions and attention; what has none is summed in one entry.
    An operator reads every input once and writes every output once, which its kernels do at least. In eval
    mode: the meta device knows dropout and batch statistics as several operators, GPUs as one.

    Args:
        workload: model, batch and loss.
        batch_size: rows of the batch of one device.
        autocast: its dtype, which every float32 tensor then counts as. That is fewer bytes than are moved:
            some operators stay in float32, and weights are cast.
    """
    try:
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
            return _counted(workload, batch_size, autocast)
    except RAISED_BY_USERS:  # a user's model may refuse the meta device in any way
        return ()


def _counted(workload: Workload, batch_size: int, autocast: torch.dtype | None) -> tuple[OperatorCost, ...]:
    made = make_batch(workload, batch_size=_MADE_ROWS, generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        module = workload.module()
    batch = map_tensors(lambda t: t.new_empty((batch_size, *t.shape[1:]), device="meta"), made)
    counter = _Counter(autocast)
    with torch.no_grad(), unfused_encoders(), counter:
        loss_function(workload)(module.eval(), batch)
    return counter.costs()


@contextlib.contextmanager
def unfused_encoders() -> Iterator[None]:
    """Within it, transformer encoders in evaluation run the operators of training, which have known FLOPs.

    They would be one operator for each layer, which has none and which the meta device does not know.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(value=before)


class _Counter(TorchDispatchMode):
    """Counts the operators that are called within it."""

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._autocast = autocast
        self._found: Counter[tuple[int, int]] = Counter()

    def costs(self) -> tuple[OperatorCost, ...]:
        """Of every operator so far, those of equal cost together, the most arithmetic first."""
        moved = sum(count * num_bytes for (flops, num_bytes), count in self._found.items() if not flops)
        calculating = [
            OperatorCost(count, *cost) for cost, count in sorted(self._found.items(), reverse=True) if cost[0]
        ]
        return (*calculating, *([OperatorCost(1, 0, moved)] if moved else []))

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        if not func.is_view and func.overloadpacket not in _MOVE_NOTHING:
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **named, out_val=out) if formula is not None else 0
            self._found[flops, self._bytes((args, named)) + self._bytes(out)] += 1
        return out

    def _bytes(self, values: Any) -> int:
        return sum(self._bytes_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))

    def _bytes_of(self, tensor: Tensor) -> int:
        """Of what is in memory: an expanded tensor has more elements."""
        stored = tensor.untyped_storage().nbytes() // tensor.element_size()
        narrow = self._autocast if tensor.dtype == torch.float32 else None
        return min(tensor.numel(), stored) * (narrow or tensor.dtype).itemsize
