"""Process groups, how ranks meet in them, and tensors by name."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]  # the stub lacks them
from torch.distributed.rendezvous import rendezvous

from ..errors import UsageError
from .messages import LOOPBACK, NO_GROUP, Begin

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""The conductor ends what hangs, and knows what it was; a collective's own limit must not come before it."""

CONNECT_LIMIT = timedelta(seconds=10)
"""A store that torch's agent has opened before it started the ranks answers sooner, or the agent is gone."""

ADDRESS_KEY = "ddp-bench/conductor"
"""Where the launcher's store holds the address of the conductor; of the latest attempt, for it is kept."""

_waits_for: list[str] = []
"""What the main thread waits for, for the thread that answers the conductor meanwhile."""


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Within, this rank has done its part and waits: who is late is somebody else."""
    _waits_for.append(what)
    try:
        yield
    finally:
        _waits_for.pop()


def waits_for() -> str:
    """Tell what this rank waits for; empty while it works."""
    return _waits_for[-1] if _waits_for else ""


@contextlib.contextmanager
def as_default(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within it, collectives that name no group use `group`, as in a program that its ranks alone run.

    None leaves the default group as it is.
    """
    if group is None:
        yield
        return
    before = dist.group.WORLD
    distributed_c10d._update_default_pg(group)  # no public way
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)


def opened_store() -> tuple[Store, int]:
    """Open a store for the ranks of this machine; it and its port."""
    listener = socket.create_server((LOOPBACK, 0))  # by itself it would listen on every interface
    port = int(listener.getsockname()[1])
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def meet(asked: Begin, number: int, store: Store | None) -> Store:
    """Have all ranks meet in the default group; the store at which they did."""
    if asked.port:  # otherwise a launcher has set them, each host's own number of ranks too
        sizes = {"WORLD_SIZE": str(asked.world_size), "LOCAL_WORLD_SIZE": str(asked.local_world_size)}
        os.environ |= {**sizes, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(asked.port)}
    store = store or TCPStore(LOOPBACK, asked.port, is_master=False)
    with waiting_for("the other ranks"):
        dist.init_process_group(
            "gloo",
            store=PrefixStore(asked.meeting, store),
            rank=number,
            world_size=asked.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    return store


def joined_store() -> Store:
    """Join the store of torchrun or srun. Raises UsageError for a port that is taken, and for no store."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Store = next(rendezvous("env://", timeout=CONNECT_LIMIT if is_open else COLLECTIVE_TIMEOUT))[0]
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise UsageError(f"{where} is already in use; choose another port with MASTER_PORT") from None
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"the ranks cannot meet at {where}: {first}; check MASTER_ADDR and the network"
        ) from None
    return store


def new_group(ranks: range, backend: str) -> dist.ProcessGroup | None:
    """The group of these ranks, on them."""
    try:
        made = dist.new_group(list(ranks), backend=backend, timeout=COLLECTIVE_TIMEOUT)
    except RuntimeError as error:
        # Other ranks may have it and wait in it: no rank can use this process group, or another.
        raise dist.DistBackendError(str(error)) from error
    return made if isinstance(made, dist.ProcessGroup) else None


def check_link(ranks: range, backend: str, device: torch.device) -> None:
    """See that these ranks can communicate, in a group that is not kept: a communicator takes GPU memory."""
    group = new_group(ranks, backend)
    if group is not None:
        one = torch.ones((), device=device)
        dist.all_reduce(one, group=group)
        assert one.item() == len(ranks)
        dist.destroy_process_group(group)


def finish(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Wait for what has been launched on a group and on the device."""
    if group is not None:
        # Gloo's barrier waits for all work launched before it; NCCL's kernels the device waits for.
        with_nccl = dist.get_backend(group).startswith("nccl")
        dist.barrier(group, device_ids=[device.index] if with_nccl else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_launched(group: dist.ProcessGroup | None) -> int | None:
    """How many collectives this rank has launched on `group`; None where the backend does not tell."""
    if group is None:
        return NO_GROUP
    try:
        # Counted at the launch of each collective, by gloo and NCCL alike; there is no public way.
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


Weights = dict[str, Tensor]
"""Parameters, what was added to them, their gradients, or buffers, by name."""


def fine(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def norm_of(tensor: Tensor) -> Tensor:
    """The 2-norm of a tensor of real or complex numbers."""
    # Squares of float32 overflow and vanish.
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    found: Tensor = torch.linalg.vector_norm(tensor.to(wide))
    return found


def on_host(named: Weights) -> Weights:
    """Copy tensors to the host."""
    return {name: one.detach().to("cpu", copy=True) for name, one in named.items()}


def difference(one: Weights, other: Weights) -> Weights:
    """`one` - `other`, in float32 at least."""
    return {name: fine(one[name]) - fine(start) for name, start in other.items()}


def norm(weights: Mapping[str, Tensor]) -> float:
    """The 2-norm over all tensors."""
    return float(torch.stack([norm_of(one).cpu() for one in weights.values()] or [torch.zeros(())]).norm())
