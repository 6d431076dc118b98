"""Starts what the ranks are forks of, while the launcher still imports torch; so this cannot ask torch."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from ddp_bench.bench.cluster.process import is_rank, rank_variables
from ddp_bench.bench.gpus import gpus
from ddp_bench.bench.run.fork_server import ForkServer, fork_server
from ddp_bench.bench.settings import Settings


def forks(settings: Settings, module: str, *, wanted: bool) -> AbstractContextManager[ForkServer | None]:
    """A server that imports `module`, which the ranks need, and the model's code; None in a rank."""
    if is_rank() or not wanted:
        return nullcontext()
    device_type = "cpu" if settings.device == "cpu" or not gpus() else "cuda"
    # The first one starts threads where OMP_NUM_THREADS asks for some: then there is nothing to fork.
    modules = ["numpy", module]
    if settings.workload is None and settings.arch != "resnet20":
        modules.append("torchvision.models")
    return fork_server(modules, rank_variables(os.environ, device_type))
