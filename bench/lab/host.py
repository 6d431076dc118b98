"""Launcher of `bench.lab` on each host: PyTorch's elastic one, as `torchrun` runs it, or torchrun itself.

The host's part of the job comes as one line of JSON on standard input. The exit code is the program's own:
torchrun would turn every failure into 1.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ..common.errors import ExitCode
from ..common.process import ignore_signals
from .job import RENDEZVOUS_PORT, HostJob, choose_exit_code, is_bench_run, is_torchrun
from .network import get_address

MAX_RESTARTS = 100
"""Restarts of `bench.run`, whose ranks go on where those before them died; those of others stay dead.

More than are used: a run gives up by itself when its ranks die twice in a row without progress.
"""


class Agent(LocalElasticAgent):
    """Restarts ranks that died, not those that ended with a code of their own, such as 2."""

    def __init__(self, spec: WorkerSpec) -> None:
        # Torch's logs of the ranks, nowhere: otherwise each run leaves an empty folder for them.
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self._stop_signal = signal.SIGTERM

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        codes = [failure.exitcode for failure in result.failures.values()]
        if not all(code < 0 or code in (0, ExitCode.START_AGAIN) for code in codes):
            self._remaining_restarts = 0
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **named: Any) -> None:  # noqa: ARG002 - torch's signature, which differs between versions
        super()._shutdown(self._stop_signal, *more, **named)

    def stop(self) -> None:
        """End the ranks whatever they do."""
        self._stop_signal = signal.SIGKILL
        self._shutdown()


def run(job: HostJob) -> int:
    """Start this host's ranks, wait for the whole job, and return the exit code of this host's part."""
    if is_torchrun(job.command):
        os.execvp(job.command[0], job.command)
    try:
        failures = run_ranks(job)
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
    return choose_exit_code([failure.exitcode for _, failure in in_order])


def run_ranks(job: HostJob) -> dict[int, ProcessFailure]:
    """Run a command as the ranks of this host; by rank the failures they ended with, if any.

    A signal to this process goes on to the ranks and raises torch's SignalException here.
    """
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{get_address(0)}:{RENDEZVOUS_PORT}",
            run_id=job.run_id,
            min_nodes=job.num_hosts,
            max_nodes=job.num_hosts,
            local_addr=get_address(job.host),
            is_host=job.host == 0,
        )
    )
    spec = WorkerSpec(
        role="default_role",
        local_world_size=job.ranks_per_host,
        entrypoint=job.command[0],
        args=tuple(job.command[1:]),
        rdzv_handler=handler,
        max_restarts=MAX_RESTARTS if is_bench_run(job.command) else 0,
        monitor_interval=0.1,
        local_addr=get_address(job.host),
    )
    agent = Agent(spec)
    try:
        result = agent.run()
    except BaseException as error:
        ignore_signals()
        agent.stop()
        if stopped := _find_signal(error):
            raise stopped from None
        raise
    finally:
        handler.shutdown()
    return dict(result.failures) if result.is_failed() else {}


def _find_signal(error: BaseException | None) -> SignalException | KeyboardInterrupt | None:
    """Find the exception of a signal that `error` followed from, if any.

    Where a signal comes while torch's `metrics.prof` takes the time, an UnboundLocalError hides it: the
    `finally` there needs that time.
    """
    while error is not None and not isinstance(error, SignalException | KeyboardInterrupt):
        error = error.__context__
    return error


def main() -> int:
    """Run the job that standard input describes; none comes if the lab is gone already."""
    # the elastic agent logs every failure as a page of its own; the program has said what is wrong
    logging.disable(logging.ERROR)
    text = sys.stdin.readline()
    return run(HostJob(**json.loads(text))) if text else 1


if __name__ == "__main__":
    sys.exit(main())
