"""Starts the ranks on this machine with PyTorch's own elastic launcher, no shell in between."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

INTERRUPTED_EXIT_CODE = 130


def launch(arguments: Sequence[str], *, num_ranks: int, device_type: str) -> int:
    """Run `python -m bench.run arguments` as `num_ranks` ranks; the exit code of the first that failed."""
    # The agent's own account of a failure repeats what the rank has said already.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if device_type == "cpu":
        # Otherwise DataParallel would find the GPUs of this machine.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "bench.run", *arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return int(failure.exitcode) if failure.exitcode > 0 else 1
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED_EXIT_CODE
    return 0
