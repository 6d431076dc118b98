"""Work that the first rank of a case does for all: what it raises ends the case on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_bench.bench.errors import RAISED_BY_USERS
from ddp_bench.bench.modes import Place
from ddp_bench.bench.recovery.attempt import ELSEWHERE

T = TypeVar("T")


def together(
    place: Place,
    group: dist.ProcessGroup | None,
    work: Callable[[], T],
    *,
    elsewhere: T,
    error: type[Exception] = RuntimeError,
) -> T:
    """What `work` returns on rank 0, and `elsewhere` on the other ranks of `group`.

    What it raises ends the case on all of them, as `error` on the others: a rank that went on alone would
    wait for them.
    """
    found, failure = elsewhere, None
    if place.rank == 0:
        try:
            found = work()
        except RAISED_BY_USERS as raised:  # raised again once the others know
            failure = raised
    if _is_told(failure is not None, place, group):
        raise failure or error(ELSEWHERE)
    return found


def _is_told(failed: bool, place: Place, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return failed
    told = torch.tensor([float(failed)], device=place.device)
    dist.broadcast(told, 0, group)
    return bool(told.item())
