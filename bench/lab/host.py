"""What `bench.lab` runs on each host: PyTorch's elastic launcher, as `torchrun` runs it, or torchrun itself.

The host's part of the job comes as one line of JSON on standard input. The exit code is the program's own:
torchrun would turn every failure into 1.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from ddp_bench.bench.lab.command import is_bench_run, is_torchrun
from ddp_bench.bench.lab.link import RENDEZVOUS_PORT, HostJob, address, job_exit_code
from ddp_bench.bench.run.agent import run_ranks

MOST_RESTARTS = 100
"""Of `bench.run`, whose ranks go on where those before them died; those of other programs stay dead.

More than are used: a run gives up by itself when its ranks die twice in a row without progress.
"""


def run(job: HostJob) -> int:
    """Start this host's ranks, wait for the whole job, and return the exit code of this host's part."""
    if is_torchrun(job.command):
        os.execvp(job.command[0], job.command)
    config = LaunchConfig(
        min_nodes=job.num_hosts,
        max_nodes=job.num_hosts,
        nproc_per_node=job.ranks_per_host,
        run_id=job.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{address(0)}:{RENDEZVOUS_PORT}",
        rdzv_configs={"is_host": job.host == 0},
        local_addr=address(job.host),
        max_restarts=MOST_RESTARTS if is_bench_run(job.command) else 0,
    )
    try:
        failures = run_ranks(config, job.command, stop_signal=signal.SIGTERM)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except (RendezvousError, DistError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        print(f"the hosts lost each other: {why}", file=sys.stderr)
        return 1
    in_order = sorted(failures.items(), key=lambda item: item[1].timestamp)
    for rank, failure in in_order:
        if failure.exitcode < 0:
            print(f"rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
    return job_exit_code([failure.exitcode for _, failure in in_order])


def main() -> int:
    """Run the job that standard input describes; none comes if the lab is gone already."""
    # the elastic agent logs every failure as a page of its own; the program has said what is wrong
    logging.disable(logging.ERROR)
    text = sys.stdin.readline()
    return run(HostJob(**json.loads(text))) if text else 1


if __name__ == "__main__":
    sys.exit(main())
