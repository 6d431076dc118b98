"""FSDP2 and `replicate`: blocks of parameters that are gathered, or reduced, together.

`fully_shard` has every rank hold a shard of each parameter and gather a block's for as long as it computes.
`replicate`, DDP's successor in torch's composable API, leaves the parameters whole and all-reduces a block's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate  # `replicate` there is DDP
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..plan.case import Case
from .base import Mode, Place

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class BlockwiseMode(Mode):
    """One rank of a case of `fsdp` or `replicate`; every rank of `group` builds it at the same time.

    Each block is a group of parameters, the rest of the model another, as in PyTorch's tutorial. Parameters
    lie in the default memory format: torch takes no other.
    """

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        place: Place,
        group: dist.ProcessGroup | None,
    ) -> None:
        assert group is not None  # the ranks that build it are its members
        wrap: Callable[..., Any] = replicate
        if case.mode == "fsdp":
            # Torch's own choice gives all blocks back but the root, which the backward needs first.
            own_choice = case.reshard_after_forward
            wrap = fully_shard if own_choice else partial(fully_shard, reshard_after_forward=False)
        wrap = partial(wrap, mesh=DeviceMesh.from_group(group, place.device.type))
        module = module.to(memory_format=torch.contiguous_format)
        for block in find_blocks(module):
            _wrap(wrap, block, case)
        own = next((p.dtype for p in module.parameters()), None)
        _wrap(wrap, module, case, output_dtype=own)  # for the loss, as under autocast
        super().__init__(module)

    def gather_weights(self) -> dict[str, Tensor]:
        return self.gather_full(
            {n: one.detach() for n, one in super().gather_weights().items() if one.requires_grad}
        )

    def gather_full(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: one.full_tensor() if isinstance(one, DTensor) else one for n, one in own.items()}


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """List a model's blocks: outermost members of its lists that have parts, of classes that come again.

    So transformers are wrapped by layer and ResNets by residual block, whatever these are called.
    """
    counts = Counter(map(type, _find_members(module)))
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for one in _find_members(module):
        if counts[type(one)] > 1 and one not in inside:
            found.append(one)
            inside.update(one.modules())
    return found


def _find_members(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the lists in a model, outermost first, that have parts and are no plain lists themselves."""
    lists = (one for one in module.modules() if isinstance(one, LISTS))
    for one in itertools.chain.from_iterable(each.children() for each in lists):
        if type(one) not in LISTS and next(one.children(), None) is not None:
            yield one


def _wrap(
    wrap: Callable[..., Any], module: nn.Module, case: Case, output_dtype: torch.dtype | None = None
) -> None:
    """Make a group of the parameters of `module` that no block within it has."""
    if case.mp_policy == "none":
        wrap(module)
        return
    # Batch norm keeps its statistics, and takes weights of no other type beside them.
    norms = [one for one in module.modules() if isinstance(one, _BatchNorm) and not hasattr(one, "unshard")]
    if norms and norms != [module]:
        wrap(norms, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    # What is proved in float64 stays so: the same groups, without the rounding.
    own = {p.dtype for p in module.parameters()}
    param_dtype, reduce_dtype = (None, None) if torch.float64 in own else (torch.bfloat16, torch.float32)
    wrap(module, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype))
