"""Inputs of the first proof: batches of as many rows, and numbers of as many digits, as it needs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from ...models.checks import check_learned, list_graph_nodes
from ...models.nested import map_tensors, split_rows
from ...models.workload import Batch
from ..common.errors import USER_EXCEPTIONS
from ..measure.faults import classify_error, is_of_the_model
from ..measure.groups import set_default_group
from ..measure.timed import make_autocast
from ..plan.case import BatchSplit, Case, split_batch
from .judge import TOLERANCE_16_BITS
from .making import Maker, begin_draws, set_precision
from .peers import ProofGroup
from .reference import Fetch, Subject, Work

MIN_ROWS = 2
"""Rows of each part at least, if the case trains on as many: losses between rows need two."""

MIN_VALUES = 8
"""Values of a channel that batch norm sees at least: of two it makes 1 and -1, whatever they are."""

TOLERANCES_BY_DTYPE = {torch.float64: 0.0, torch.float32: 1e-3}
"""Error that a model's own arithmetic may cause, by the coarsest type in it: float32 has 7 digits, of
which long sums cost some. 16 bits have `TOLERANCE_16_BITS`."""

_DTYPES = (torch.float64, torch.float32, None)


class Arithmetic(NamedTuple):
    """The numbers that a model is proved in."""

    dtype: torch.dtype | None
    """Float64, or float32 for a model that does not run in it; None, as it was made, for one in neither."""
    num_rows: int
    """Rows that a part should have."""
    tolerance: float
    """Error that the model's own arithmetic may cause: it may round inside."""
    why_float32: str = ""
    """The model's error in float64, on the first rank; empty where it runs in it."""


@dataclass
class ProofInputs:
    """Batches of one workload, in the arithmetic that its model is proved in."""

    maker: Maker
    _settled: set[int] = field(default_factory=set)
    """Rows of the batches that the model has seen as it trains."""

    def compute_first_loss(self, case: Case, peers: ProofGroup, num_rows: int) -> None:
        """Compute the loss of a small batch as it is trained, before the model sees float64.

        What user's code keeps from its first call, such as a table or the first loss, is then of the type of
        training, and the same on all ranks, each of which calls this.
        """
        if not peers.find_largest(num_rows not in self._settled):
            return
        with peers.join_ranks():
            module = self.maker.make_module()
            begin_draws(self.maker.seed)
            try:
                with make_autocast(case):
                    self.maker.compute_loss(module, self.make_batch(num_rows, None))
            except USER_EXCEPTIONS as error:
                if classify_error(error).restart:
                    raise  # what else is wrong, the proof finds
        self._settled.add(num_rows)

    @functools.cached_property
    def arithmetic(self) -> Arithmetic:
        """The finest arithmetic that the model runs in, as the first rank finds it.

        Raises what the model raises in all, and what is no matter of the dtype: full memory, which float32
        would hide, and a broken device.
        """
        why = ""
        for dtype in _DTYPES:
            try:
                return self._try_batch(dtype)._replace(why_float32=why)
            except USER_EXCEPTIONS as error:
                if dtype is None or not is_of_the_model(error):
                    raise
                why = why or classify_error(error).reason
        raise AssertionError

    def _try_batch(self, dtype: torch.dtype | None) -> Arithmetic:
        """Compute a gradient on the least batch: how many rows there should be, and how it rounds."""
        values: list[float] = []

        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if isinstance(module, _BatchNorm) and inputs and inputs[0].ndim > 1:
                values.append(inputs[0].numel() / inputs[0].shape[1])

        module = self.maker.make_module(dtype)
        hook = register_module_forward_pre_hook(enter)
        try:
            begin_draws(self.maker.seed)
            loss = self.maker.compute_loss(module, self.make_batch(MIN_ROWS, dtype))
        finally:
            hook.remove()
        check_learned(self.maker.workload, module, loss)
        tolerance = TOLERANCES_BY_DTYPE.get(_find_coarsest_dtype(loss), TOLERANCE_16_BITS)
        loss.backward()
        num_rows = math.ceil(MIN_ROWS * max(1.0, MIN_VALUES / min(values, default=MIN_VALUES)))
        return Arithmetic(dtype, num_rows, tolerance)

    def share_arithmetic(self, peers: ProofGroup) -> Arithmetic:
        """Return what the first rank finds on all ranks of the case, each of which calls this."""
        own = Arithmetic(None, 0, 0.0)
        with peers.join_ranks(), set_default_group(self.maker.alone):
            if not peers.rank:
                own = self.arithmetic
        told = torch.tensor([_DTYPES.index(own.dtype), own.num_rows, own.tolerance], dtype=torch.float64)
        which, num_rows, tolerance = peers.broadcast(told).tolist()
        return Arithmetic(_DTYPES[int(which)], int(num_rows), tolerance, own.why_float32)

    def make_work(self, of: Subject, split: BatchSplit, dtype: torch.dtype | None) -> Work:
        """Return the gradient of the batch, split so, as what a proof computes."""

        def open_part(part: int, _: object) -> Fetch:
            return partial(self.make_part, split, dtype, part)

        return Work(of, split, self.maker.compute_loss, open_part, dtype=dtype)

    def make_part(self, split: BatchSplit, dtype: torch.dtype | None, part: int, micro: int) -> Batch:
        """Make a part of a micro-batch, of a joined one the whole, made anew for each use."""
        if not self.maker.has_rows:
            return self.make_batch(split.batch_size, dtype, micro, part)
        whole = split_rows(self.make_batch(split.num_rows, dtype), split.accumulate)[micro]
        return whole if split.joined else split_rows(whole, split.num_sources)[part]

    def make_batch(self, size: int, dtype: torch.dtype | None, *part: int) -> Batch:
        """One global batch on the device, floating tensors as `dtype`, integers and masks as they are.

        With numbers of a part it is that part, of a batch that cannot be split.
        """
        made = self.maker.make_batch(size, *part)
        return map_tensors(lambda one: set_precision(one.to(self.maker.device), dtype), made)


def _find_coarsest_dtype(loss: Tensor) -> torch.dtype:
    """Find the coarsest type that gradients pass through on the way from the loss to the parameters."""
    edges = [(loss.grad_fn, loss.output_nr)]
    edges += [edge for node in list_graph_nodes(loss) for edge in node.next_functions]
    # Of a result that no edge reaches, such as indices, the metadata has torch's default dtype.
    dtypes: set[torch.dtype] = {
        node._input_metadata[output].dtype.to_real()
        for node, output in edges
        if node is not None and not hasattr(node, "variable")
    }
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def choose_proof_split(case: Case, num_rows: int) -> BatchSplit:
    """Return how a case splits the batch of its proof: `num_rows` for each part, if it trains on as many."""
    split = split_batch(case)
    parts = split.num_chunks if split.num_sources == 1 else 1
    return replace(split, batch_size=min(num_rows, max(split.batch_size // parts, 1)) * parts)
