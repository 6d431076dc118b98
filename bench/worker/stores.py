"""Stores at which ranks meet: of their own machine, or a launcher's."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # the stub lacks them
from torch.distributed.rendezvous import rendezvous

from ..common.errors import UsageError
from ..common.process import note_waiting
from ..measure.groups import COLLECTIVE_TIMEOUT
from .messages import LOOPBACK, Begin

CONNECT_TIMEOUT = timedelta(seconds=10)
"""A store that torch's agent has opened before it started the ranks answers sooner, or the agent is gone."""

ADDRESS_KEY = "ddp-bench/conductor"
"""Key of the conductor's address in the launcher's store; of the latest attempt, for it is kept."""


def open_store() -> tuple[Store, int]:
    """Open a store for the ranks of this machine; it and its port."""
    listener = socket.create_server((LOOPBACK, 0))  # by itself it would listen on every interface
    port = int(listener.getsockname()[1])
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def join_default_group(asked: Begin, number: int, store: Store | None) -> Store:
    """Have all ranks meet in the default group; the store at which they did."""
    if asked.port:  # otherwise a launcher has set them, each host's own number of ranks too
        sizes = {"WORLD_SIZE": str(asked.world_size), "LOCAL_WORLD_SIZE": str(asked.local_world_size)}
        os.environ |= {**sizes, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(asked.port)}
    store = store or TCPStore(LOOPBACK, asked.port, is_master=False)
    with note_waiting("the other ranks"):
        dist.init_process_group(
            "gloo",
            store=PrefixStore(asked.meeting, store),
            rank=number,
            world_size=asked.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    return store


def join_store() -> Store:
    """Join the store of torchrun or srun. Raises UsageError for a port that is taken, and for no store."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Store = next(rendezvous("env://", timeout=CONNECT_TIMEOUT if is_open else COLLECTIVE_TIMEOUT))[
            0
        ]
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise UsageError(f"{where} is already in use; choose another port with MASTER_PORT") from None
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"the ranks cannot meet at {where}: {first}; check MASTER_ADDR and the network"
        ) from None
    return store
