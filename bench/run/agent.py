"""PyTorch's elastic agent, told which failures are worth a restart."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from bench.recovery.failures import FAILURE_ENV, is_restartable


class Agent(LocalElasticAgent):
    """Restarts ranks that died, not those that ended with a code of their own, and tells how."""

    def __init__(self, spec: WorkerSpec, *, stop_signal: signal.Signals) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self._stop_signal = stop_signal

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            os.environ[FAILURE_ENV] = json.dumps(codes)
            if not is_restartable(codes):
                self._remaining_restarts = 0
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **named: Any) -> None:  # noqa: ARG002 - torch's signature, which differs between versions
        super()._shutdown(self._stop_signal, *more, **named)

    def stop(self) -> None:
        """End the ranks whatever they do."""
        self._stop_signal = signal.SIGKILL
        self._shutdown()


def run_ranks(
    config: LaunchConfig, arguments: Sequence[str], *, stop_signal: signal.Signals
) -> dict[int, ProcessFailure]:
    """Run `python arguments` as the ranks of this host; by rank the failures they ended with, if any.

    A signal to this process goes on to the ranks as `stop_signal` and raises torch's SignalException here.
    """
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
    )
    agent = Agent(spec, stop_signal=stop_signal)
    try:
        result = agent.run()
    except BaseException:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        agent.stop()
        raise
    finally:
        handler.shutdown()
    return dict(result.failures) if result.is_failed() else {}
