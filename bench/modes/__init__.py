"""Single device, DP, DDP and what is compared with them, behind one interface."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ..plan.case import Case
from .base import Mode, Place, Stages, Unsupported, list_devices
from .compiled import require_compiler
from .ddp import DistributedMode
from .dp import DataParallelMode

__all__ = ["Mode", "Place", "Stages", "Unsupported", "build_mode", "list_devices", "require_compiler"]


def build_mode(
    case: Case,
    module: nn.Module,
    place: Place,
    group: dist.ProcessGroup | None,
    *,
    stages: Stages | None = None,
) -> Mode:
    """Wrap `module`, already on `place.device`, as the case asks; every rank of `group` calls it together.

    The modules of all ranks hold the same, so none is broadcast. `stages` says how to split it over the
    devices, where the mode does. Raises Unsupported where the torch
    that is installed lacks what the case needs.
    """
    if case.spec.has_buckets:
        return DistributedMode(case, module, place, group)
    if case.spec.has_replicas:
        return DataParallelMode(case, module, place)
    # Neither is imported by a run without it: they take a part of a second.
    if case.spec.is_composable:
        from .fsdp import BlockwiseMode

        return BlockwiseMode(case, module, place, group)
    if case.spec.is_staged:
        from .pipeline import PipelineMode

        return PipelineMode(case, module, stages, place, group)
    return Mode(module)
