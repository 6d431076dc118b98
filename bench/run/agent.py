"""PyTorch's elastic agent, told which failures are worth a restart, and where its ranks meet.

PyTorch's own rendezvous for one machine listens on every network interface; this one on 127.0.0.1 alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from ddp_bench.bench.cluster.process import ignore_signals
from ddp_bench.bench.recovery.failures import FAILURE_ENV, is_restartable

BACKEND = "bench-loopback"
"""What `LaunchConfig` calls the rendezvous of a run on one machine."""

ADDRESS = "127.0.0.1"
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class Agent(LocalElasticAgent):
    """Restarts ranks that died, not those that ended with a code of their own, and tells how."""

    def __init__(self, spec: WorkerSpec, *, stop_signal: signal.Signals) -> None:
        super().__init__(spec, no_logs())
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


def no_logs() -> DefaultLogsSpecs:
    """Torch's logs of the ranks, nowhere: otherwise each run leaves an empty folder for them."""
    return DefaultLogsSpecs(log_dir=os.devnull)


def run_ranks(
    config: LaunchConfig, command: Sequence[str], *, stop_signal: signal.Signals
) -> dict[int, ProcessFailure]:
    """Run `command` as the ranks of this host; by rank the failures they ended with, if any.

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
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
    )
    agent = Agent(spec, stop_signal=stop_signal)
    try:
        result = agent.run()
    except BaseException as error:
        ignore_signals()
        agent.stop()
        stopped = _signalled(error)
        if stopped is not None:
            raise stopped from None
        raise
    finally:
        handler.shutdown()
    return dict(result.failures) if result.is_failed() else {}


def _signalled(error: BaseException | None) -> SignalException | KeyboardInterrupt | None:
    """The exception of a signal that `error` followed from, if any.

    Where a signal comes while torch's `metrics.prof` takes the time, an UnboundLocalError hides it: the
    `finally` there needs that time.
    """
    while error is not None and not isinstance(error, SignalException | KeyboardInterrupt):
        error = error.__context__
    return error


class LoopbackRendezvous(RendezvousHandler):
    """Where the ranks of one machine meet: its launcher holds the one store, through restarts too."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False
        listener = socket.socket()
        listener.bind((ADDRESS, 0))
        listener.listen()
        self._port: int = listener.getsockname()[1]
        self._store = TCPStore(
            ADDRESS,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to the launcher's store instead of opening their own."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """The only node is always complete."""
        if self._closed:
            raise RendezvousClosedError
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is left to others."""
        self._closed = True
        return True


def use_loopback() -> str:
    """Keep gloo's and NCCL's connections on this machine, and name the rendezvous for `LaunchConfig`.

    What the environment says of interfaces is for ranks on several machines: it would open ports to these.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[name] = INTERFACE
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    # A function of its own: a name may be registered twice with the same one only.
    return LoopbackRendezvous(parameters.run_id)
