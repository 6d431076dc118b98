"""How NCCL sends a run's gradients: transports, and algorithm and protocol by size, read from its own log."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from .manifest import NcclChoices, NcclMessage

VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,TUNING"}
"""What has NCCL write it; transports come under INIT, the rest under TUNING."""

SHARES_GPUS = (2, 30)
"""The version from which several of its ranks may have one GPU, by NCCL_MULTI_RANK_GPU_ENABLE."""

# By the formats in libnccl.so of 2.28.9 and 2.30.7.
_MESSAGE = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+)")
_SYMMETRIC = re.compile(r"AllReduce \[(Symmetric)\]: (\d+) Bytes -> Kernel (\w+)")
_TRANSPORT = re.compile(r"\bvia (P2P/(?:direct pointer|[A-Za-z]+)|SHM|(?:COLL)?NET/\w+)(?:\S*(/GDRDMA))?")


def choices_in(logs: Iterable[str], num_ranks: int) -> NcclChoices | None:
    """What NCCL wrote in the `logs` of all ranks; None where it chose nothing that this can read."""
    transports: set[str] = set()
    messages: set[NcclMessage] = set()
    for line in itertools.chain.from_iterable(log.splitlines() for log in logs):
        if found := _TRANSPORT.search(line):
            transports.add("".join(filter(None, found.groups())))
        elif found := _MESSAGE.search(line):
            messages.add(NcclMessage(bytes=int(found[1]), algorithm=found[2], protocol=found[3]))
        elif found := _SYMMETRIC.search(line):
            messages.add(NcclMessage(bytes=int(found[2]), algorithm=found[1], protocol=found[3]))
    if not messages:
        return None
    by_size = sorted(messages, key=lambda one: (one.bytes, one.algorithm, one.protocol))
    return NcclChoices(num_ranks=num_ranks, transports=tuple(sorted(transports)), messages=tuple(by_size))


def said(messages: Iterable[NcclMessage]) -> str:
    """Messages by size, those in a row that are sent alike together: `1,024 to 65,536 bytes: TREE/LL`."""
    parts = []
    for how, group in itertools.groupby(messages, key=lambda one: f"{one.algorithm}/{one.protocol}"):
        sizes = [f"{one.bytes:,d}" for one in group]
        parts.append(f"{' to '.join(dict.fromkeys((sizes[0], sizes[-1])))} bytes: {how}")
    return ", ".join(parts)
