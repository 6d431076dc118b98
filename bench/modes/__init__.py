"""Single device, DataParallel and DistributedDataParallel behind one interface."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from bench.modes.base import Mode, Place, SingleMode, Unsupported, devices_of
from bench.modes.compiled import require_compiler
from bench.modes.ddp import DistributedMode
from bench.modes.dp import DataParallelMode
from bench.plan import Case

__all__ = ["Mode", "Place", "Unsupported", "build_mode", "devices_of", "require_compiler"]


def build_mode(
    case: Case,
    module: nn.Module,
    place: Place,
    group: dist.ProcessGroup | None,
    *,
    equal_replicas: bool = False,
) -> Mode:
    """Wrap `module`, already on `place.device`, as the case asks.

    With `equal_replicas` the modules of all ranks are known to hold the same: DDP need not broadcast one.

    Raises Unsupported where the installed torch lacks what the case needs.
    """
    if case.mode == "ddp":
        return DistributedMode(case, module, place, group, equal_replicas=equal_replicas)
    if case.mode == "dp":
        return DataParallelMode(case, module, place)
    return SingleMode(module)
