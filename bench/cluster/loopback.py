"""Where the ranks of a run on one machine meet: a store that nobody outside that machine can reach.

PyTorch's own rendezvous for one machine listens on every network interface; this one on 127.0.0.1 alone.
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "bench-loopback"
ADDRESS = "127.0.0.1"
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class LoopbackRendezvous(RendezvousHandler):
    """One node; its launcher holds the one store, which the ranks share, through restarts too."""

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
        """Name of the kind of rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """The only node is always complete."""
        if self._closed:
            raise RendezvousClosedError
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self._closed

    def set_closed(self) -> None:
        """End the job."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is left to others."""
        self._closed = True
        return True


def use_loopback() -> str:
    """Keep gloo's and NCCL's connections on this machine, and name the rendezvous for `LaunchConfig`."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, INTERFACE)
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
