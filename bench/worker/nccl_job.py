"""A rank of the short job that NCCL is asked in: processes of their own, for its log slows what is timed.

It sends a message of each size once. The ranks of the run start one each, which meet in the run's store.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # the stub lacks them

from ..nccl import VARIABLES
from ..package import own_command
from ..process import end_with
from .messages import AskNccl

LIMIT_S = 60.0
"""Torch is imported and communicators are set up in less, or there is no answer."""


def log_of(asked: AskNccl, device: torch.device) -> str:
    """What NCCL writes of this rank in the job, on `device`; empty where it did not come to its end."""
    own = {**os.environ, **VARIABLES}
    own.pop("NCCL_DEBUG_FILE", None)  # its log goes to standard output otherwise
    how = (asked.name, str(asked.num_ranks), str(device), asked.backend, *map(str, asked.sizes))
    job = own_command("-m", __spec__.name, *how)
    try:
        done = subprocess.run(
            job, env=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def main(name: str, num_ranks: str, device: str, backend: str, *sizes: str) -> None:
    """Send the messages."""
    end_with(os.getppid())
    where = torch.device(device)
    limit = timedelta(seconds=LIMIT_S)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(name, TCPStore(address, port, is_master=False, timeout=limit))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend, store=store, rank=int(os.environ["RANK"]), world_size=int(num_ranks), timeout=limit
    )
    for size in sizes:
        dist.all_reduce(torch.zeros(int(size) // 4, device=where))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # past the destructors, which may wait for ranks that have gone


if __name__ == "__main__":
    main(*sys.argv[1:])
