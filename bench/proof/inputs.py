"""Inputs of the first proof: batches of as many rows, and numbers of as many digits, as it needs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...models.checks import check_learned
from ...models.nested import list_tensors, map_tensors, split_rows
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


@dataclass
class ProofInputs:
    """Batches of one workload and the type that its model is proved in."""

    maker: Maker
    why_float32: str = ""
    """The model's error in float64; empty where it runs in it."""
    _num_rows: int = MIN_ROWS
    """Rows that a part should have, once `dtype` is known."""
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
    def dtype(self) -> torch.dtype | None:
        """Float64, or float32 for a model that does not run in it; None, as it was made, for one in neither.

        Raises what the model raises in all, and what is no matter of the dtype: full memory, which float32
        would hide, and a broken device.
        """
        for dtype in _DTYPES:
            try:
                self._num_rows = self._try_batch(dtype)
                break
            except USER_EXCEPTIONS as error:
                if dtype is None or not is_of_the_model(error):
                    raise
                self.why_float32 = self.why_float32 or classify_error(error).reason
        return dtype

    def _try_batch(self, dtype: torch.dtype | None) -> int:
        """Compute a gradient on the least batch; how many rows there should be."""
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
        loss.backward()
        return math.ceil(MIN_ROWS * max(1.0, MIN_VALUES / min(values, default=MIN_VALUES)))

    def share_dtype_and_split(self, case: Case, peers: ProofGroup) -> tuple[torch.dtype | None, BatchSplit]:
        """Return the type and the split of the batch that the first rank finds, on all ranks of the case."""
        found = torch.zeros(2, dtype=torch.int64)
        with peers.join_ranks(), set_default_group(self.maker.alone):
            if not peers.rank:
                found[0], found[1] = _DTYPES.index(self.dtype), self._num_rows
        which, num_rows = peers.broadcast(found).tolist()
        return _DTYPES[which], choose_proof_split(case, num_rows)

    def get_arithmetic_tolerance(self, peers: ProofGroup) -> float:
        """Return the error that the model's own arithmetic may cause, as the first rank sees it."""
        own = 0.0
        with peers.join_ranks(), set_default_group(self.maker.alone):
            if not peers.rank:
                own = TOLERANCES_BY_DTYPE.get(self._coarsest_dtype, TOLERANCE_16_BITS)
        return peers.find_largest(own)

    @functools.cached_property
    def _coarsest_dtype(self) -> torch.dtype:
        """The coarsest type that the model computes in, where gradients pass: it may round to one inside."""
        module = self.maker.make_module(self.dtype)
        with _DtypesSeen() as seen:
            self.maker.compute_loss(module, self.make_batch(MIN_ROWS, self.dtype))
        return max(seen.dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)

    def explain_tolerance(self) -> str:
        """Why the tolerance is not that of float64."""
        if not self.why_float32:
            return ""
        return f"; in {'float32' if self.dtype else 'its own dtype'}, for in float64: {self.why_float32}"

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


class _DtypesSeen(TorchFunctionMode):
    """Notes within it of which floating types results are that have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.dtypes |= {one.dtype for one in list_tensors(result) if one.requires_grad}
        return result


def choose_proof_split(case: Case, num_rows: int) -> BatchSplit:
    """Return how a case splits the batch of its proof: `num_rows` for each part, if it trains on as many."""
    split = split_batch(case)
    parts = split.num_chunks if split.num_sources == 1 else 1
    return replace(split, batch_size=min(num_rows, max(split.batch_size // parts, 1)) * parts)
