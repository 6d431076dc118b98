"""Makes the modules of a run, each by the workload's own function, all with the same weights.

Copies of one module would lose hooks of parameters, and many modules cannot be copied.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.data import BatchSource, Drawn, Share, make_seed, open_source
from ...models.workload import (
    Batch,
    Workload,
    check_loss,
    has_rows,
    make_batch,
    make_loss_function,
    make_module,
)
from ..common.errors import UsageError
from ..modes.base import collect_tensors
from ..plan.case import Case, split_batch
from .weights import Weights


class Maker:
    """Makes one module after another. The first one's parameters and buffers are those of all."""

    def __init__(
        self,
        workload: Workload,
        seed: int,
        device: torch.device,
        *,
        data_workers: int = 0,
        alone: dist.ProcessGroup | None = None,
        num_outputs: int | None = None,
    ) -> None:
        """`data_workers` are loader processes of a rank, with a folder: the augmentation depends on them.

        `alone` is the default process group where the module is computed by one rank alone, `num_outputs` as
        in `open_source`.
        """
        self._num_outputs = num_outputs
        self.workload, self.seed, self.device = workload, seed, device
        self.data_workers, self.alone = data_workers, alone
        self._unused: nn.Module | None = (first := self._make_seeded())
        self.start: Weights = {name: one.detach().clone() for name, one in collect_tensors(first).items()}

    def open_source(
        self, case: Case, part: int, device: torch.device, drawn: Drawn | None = None
    ) -> BatchSource:
        """Open the source of a part of a case's batches; those in `drawn` are not drawn again."""
        split = split_batch(case)
        share = Share(
            batch_size=split.batch_size,
            rank=part,
            world_size=split.num_sources,
            device=device,
            seed=self.seed,
            num_workers=self.data_workers,
        )
        return open_source(self.workload, case.data, share, drawn=drawn, outputs=self._num_outputs)

    @functools.cached_property
    def has_rows(self) -> bool:
        """True where a batch can be split; where not, each part is made by itself."""
        return has_rows(self.workload)

    def make_batch(self, size: int, *part: int) -> Batch:
        """Make the seeded batch of a proof on the host, or the part with these numbers by itself."""
        generator = torch.Generator().manual_seed(make_seed(self.seed, *part) if part else self.seed)
        return make_batch(self.workload, batch_size=size, generator=generator)

    def compute_loss(self, model: Any, batch: Batch) -> Tensor:
        """Compute the workload's loss. Raises UsageError where it is none to train on."""
        found = make_loss_function(self.workload)(model, batch)
        check_loss(self.workload, found)
        return found

    def make_module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Make a module with the weights `start`, floating ones as `dtype` if it is given.

        Raises UsageError where the function makes modules of other shapes from call to call.
        """
        module, self._unused = self._unused or self._make_seeded(), None
        own = collect_tensors(module)
        shapes, others = describe_state(own), describe_state(self.start)
        if shapes != others:
            odd = min(shapes.items() ^ others.items())[0]
            raise UsageError(
                f"`module` of workload {self.workload.name} makes {odd} of another shape from call to call; "
                "make it depend on torch's, Python's and numpy's random state only"
            )
        for name, one in own.items():
            if one.layout == torch.strided:
                one.data.copy_(self.start[name])
        # `to` with a dtype would drop imaginary parts.
        module.to(self.device)._apply(lambda one: set_precision(one, dtype))
        return module

    def _make_seeded(self) -> nn.Module:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        return make_module(self.workload)


def begin_draws(*numbers: int) -> None:
    """Start all generators that a model may draw from, on all devices, in a state of these numbers."""
    seed = make_seed(*numbers)
    torch.manual_seed(seed >> 1)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def get_generator_states() -> object:
    """Return the states of the generators that a model may draw from: equal where nothing was drawn."""
    of_torch = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    name, keys, *more = np.random.get_state()
    of_numpy = (name, np.asarray(keys).tobytes(), *more)
    return [state.numpy().tobytes() for state in of_torch], random.getstate(), of_numpy


def describe_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the shapes of a state dict's tensors, and the types of what else it holds."""
    return {name: tuple(one.shape) if isinstance(one, Tensor) else type(one) for name, one in state.items()}


def set_precision(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor with floating and complex numbers in the precision of `dtype`, if given."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)
