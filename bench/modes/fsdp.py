"""FSDP2: every rank holds a shard of each parameter, and gathers a block's for as long as it computes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .base import Mode, Place


class ShardedMode(Mode):
    """One rank of an FSDP2 case; every rank of `group` builds it at the same time.

    Each block is a group of parameters that is gathered at once, the rest of the model is another, as in
    PyTorch's tutorial. Parameters are sharded in the default memory format: `fully_shard` takes no other.
    """

    def __init__(
        self,
        module: nn.Module,
        place: Place,
        group: dist.ProcessGroup | None,
        *,
        equal_replicas: bool = False,
    ) -> None:
        assert group is not None  # the ranks that build it are its members
        if not equal_replicas:
            _send_from_first(module, group)
        module = module.to(memory_format=torch.contiguous_format)
        mesh = DeviceMesh.from_group(group, place.device.type)
        for block in blocks_of(module):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        self.wrapped = self.module = module

    def gradients(self) -> dict[str, Tensor]:
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        return {name: _whole(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in trained}

    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(one) for name, one in super().weights().items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: _whole(value) for name, value in self.module.state_dict().items()}


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """List a model's blocks: the outermost members of its sequences and lists that have parts themselves."""
    found: list[nn.Module] = []
    for child in module.children():
        is_list = isinstance(child, nn.ModuleList | nn.Sequential)
        members = list(child.children()) if is_list else []
        blocks = [member for member in members if next(member.children(), None) is not None]
        found += blocks or blocks_of(child)
    return found


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _send_from_first(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the first one's parameters and buffers, as DDP does."""
    for value in (*module.parameters(), *module.buffers()):
        dist.broadcast(value.detach(), group=group, group_src=0)
