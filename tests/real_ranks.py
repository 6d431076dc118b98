"""What scripts of ranks see: all names of this file, and by `Cluster` each other."""

import copy  # noqa: F401 - for scripts, and so are others
import json  # noqa: F401
import os
import sys  # noqa: F401
from dataclasses import replace  # noqa: F401
from datetime import timedelta

import torch
import torch.distributed as dist
from held import held, trainer_of  # noqa: F401
from made import case_of  # noqa: F401
from stand_ins import stand_in  # noqa: F401
from torch import nn  # noqa: F401
from torch.nn import functional  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_bench.bench.common.process import get_allowed_cores
from ddp_bench.bench.measure.timed import Trainer  # noqa: F401
from ddp_bench.bench.modes import Place, Unsupported, build_mode  # noqa: F401
from ddp_bench.bench.modes.base import UnusedParametersError, pin_thread  # noqa: F401
from ddp_bench.bench.proof.comparison import ProofError  # noqa: F401
from ddp_bench.bench.proof.making import Maker
from ddp_bench.bench.proof.proof import Prover
from ddp_bench.models.data import Share, open_source  # noqa: F401
from ddp_bench.models.registry import make_resnet_workload  # noqa: F401


def make_prover(workload, place, seed=0, *, control=None, alone=None):
    """Make what proves cases of a workload on this rank; ranks speak through `control`, or all of them."""
    return Prover(Maker(workload, seed, place.device, alone=alone), place, control or dist.group.WORLD)


class Collectives(TorchDispatchMode):
    """Notes what this thread's collectives send: of each the name, and the bytes and type of its tensors."""

    def __init__(self):
        super().__init__()
        self.names, self.num_bytes, self.dtypes = [], [], []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if operation.namespace == "c10d":
            tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
            self.names.append(operation._schema.name.removeprefix("c10d::"))
            self.num_bytes.append(sum(one.nbytes for one in tensors))
            self.dtypes.append(str(tensors[0].dtype) if tensors else "")
        return operation(*arguments, **(options or {}))


class Cluster:
    """This rank and its peers, by the environment that a launcher sets."""

    def __init__(self):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ["LOCAL_RANK"])
        cores, device = get_allowed_cores(), torch.device("cpu")
        pin_thread(cores[local_rank % len(cores)])
        self.place = Place(rank=self.rank, device=device, cores=cores)
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))

    def group(self, num_ranks, backend):
        made = dist.new_group(list(range(num_ranks)), backend=backend, timeout=timedelta(minutes=5))
        return made if isinstance(made, dist.ProcessGroup) else None

    def barrier(self):
        dist.barrier()

    def gather(self, value):
        found = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found
