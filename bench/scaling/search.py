"""The uniform caps to try, and the step that no layout can beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from bench.layout import BucketCaps
from bench.scaling.timeline import Compute

CostMs = Callable[[float], float]
"""Bytes on the wire to ms."""

UNIFORM_CAPS = (
    BucketCaps(),
    *(BucketCaps((cap,)) for cap in (0.0, 0.5, 1.0, 2.0, 4.0, 5.0, 8.0, 10.0, 16.0, 25.0, 32.0, 50.0, 64.0)),
    *(BucketCaps((cap,)) for cap in (100.0, 200.0)),
)


def lower_bound_ms(
    num_bytes: Sequence[int],
    ready_ms: Sequence[float],
    comm_ms: CostMs,
    compute: Compute,
    *,
    copy_ms: float = 0.0,
    wire_share: float = 1.0,
) -> float:
    """The least step that any layout can reach: compute and communication each at full speed.

    From parameter k on, everything is sent after k is ready and copied, so the backward lasts at least until
    then plus the least time in which the rest can be sent; for the last parameter that is its own all-reduce.
    It is copied back after that, and all of them are after the last gradient is ready.
    """
    least = _least_comm(num_bytes, comm_ms, wire_share)
    sent_ms = max(launch + least[k] for k, launch in enumerate(_launch_ms(num_bytes, ready_ms, copy_ms)))
    last_ms = max(compute.backward_ms + 2 * copy_ms, sent_ms + copy_ms * num_bytes[-1] / sum(num_bytes))
    return compute.before_ms + last_ms + compute.after_ms


def _launch_ms(num_bytes: Sequence[int], ready_ms: Sequence[float], copy_ms: float) -> list[float]:
    """By k, how far the backward is when the gradients up to k are ready and copied into their buckets."""
    total = sum(num_bytes)
    return [
        ready + copy_ms * copied / total
        for ready, copied in zip(accumulate(ready_ms, max), accumulate(num_bytes), strict=True)
    ]


def _least_comm(num_bytes: Sequence[int], comm_ms: CostMs, wire_share: float) -> list[float]:
    """By k, the least time in which the gradients from k on can be sent, over all ways to cut them."""
    count = len(num_bytes)
    sent = [0, *accumulate(num_bytes)]
    least = [math.inf] * count + [0.0]
    for k in range(count - 1, -1, -1):
        # The first bucket may have begun before k: what it holds of the rest still has to go out.
        least[k] = min(
            comm_ms((sent[end] - sent[k]) * wire_share) + least[end] for end in range(k + 1, count + 1)
        )
    return least
