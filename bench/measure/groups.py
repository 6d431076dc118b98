"""Process groups: made with a limit that the conductor keeps, and asked for what was launched on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""The conductor ends what hangs, and knows what it was; a collective's own limit must not come before it."""


@contextlib.contextmanager
def set_default_group(group: dist.ProcessGroup | None) -> Iterator[None]:
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


def make_group(ranks: range, backend: str) -> dist.ProcessGroup | None:
    """Make the group of these ranks, on them."""
    try:
        made = dist.new_group(list(ranks), backend=backend, timeout=COLLECTIVE_TIMEOUT)
    except RuntimeError as error:
        # Other ranks may have it and wait in it: no rank can use this process group, or another.
        raise dist.DistBackendError(str(error)) from error
    return made if isinstance(made, dist.ProcessGroup) else None


def check_link(ranks: range, backend: str, device: torch.device) -> None:
    """See that these ranks can communicate, in a group that is not kept: a communicator takes GPU memory."""
    group = make_group(ranks, backend)
    if group is not None:
        one = torch.ones((), device=device)
        dist.all_reduce(one, group=group)
        assert one.item() == len(ranks)
        dist.destroy_process_group(group)


def wait_for_work(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Wait for what has been launched on a group and on the device."""
    if group is not None:
        # Gloo's barrier waits for all work launched before it; NCCL's kernels the device waits for.
        with_nccl = dist.get_backend(group).startswith("nccl")
        dist.barrier(group, device_ids=[device.index] if with_nccl else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_launched(group: dist.ProcessGroup | None) -> int | None:
    """Count the collectives that this rank has launched on `group`; None where nothing tells."""
    if group is None:
        return None
    try:
        # Counted at the launch of each collective, by gloo and NCCL alike; there is no public way.
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None
