"""Timeline of compute and communication in one simulated DDP step.

Gradients become ready, buckets fill, all-reduces queue, both sides slow down. Compute and communication
advance at rates that are constant between events: compute at 1/`slowdown.compute` while an all-reduce is in
flight, an all-reduce at 1/`slowdown.comm` while the backward runs, else at 1. DDP launches bucket k once it
and every bucket before it are ready; all-reduces run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..plan.buckets import BucketLayout


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Factors by which each takes longer while the other runs; 1 is undisturbed."""

    compute: float = 1.0
    comm: float = 1.0
    beside_ms: Callable[[float], float] | None = None
    """An all-reduce of so many bytes, where not all of it is slowed alike; else `comm` times as long."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A step without communication, ms."""

    before_ms: float
    """Milliseconds before the backward: data, forward, and micro-batches that only accumulate."""
    backward_ms: float
    after_ms: float
    """Optimizer."""

    @property
    def total_ms(self) -> float:
        return self.before_ms + self.backward_ms + self.after_ms


def simulate_ms(
    ready_ms: Sequence[float],
    layout: BucketLayout,
    comm_ms: Callable[[float], float],
    compute: Compute,
    *,
    slowdown: Slowdown | None = None,
    copy_ms: float = 0.0,
    residual_ms: float = 0.0,
) -> float:
    """Simulate one step, ms; what it takes beyond `compute` is exposed, compute that is slowed included.

    Args:
        ready_ms: when each gradient is, in an undisturbed backward; none after `compute.backward_ms`.
        layout: the buckets, with the indices of their gradients.
        comm_ms: what an all-reduce of so many bytes takes alone.
        compute: the step without communication.
        slowdown: while both run; undisturbed by default.
        copy_ms: to copy all gradients once, in proportion to their bytes: into a bucket before it is
            launched, as part of the backward, and back when the backward and its all-reduce are over,
            bucket by bucket (DDP without `gradient_as_bucket_view`).
        residual_ms: at the end, whatever the layout; a negative one shortens no more than the waiting.
    """
    slow = slowdown or Slowdown()
    end_ms = compute.backward_ms + copy_ms
    sizes, total_bytes = layout.num_bytes, sum(layout.num_bytes)
    copies_ms = [copy_ms * size / total_bytes for size in sizes]
    # Wall time, and how far an undisturbed backward would be.
    now_ms = progress_ms = ended_ms = filled_ms = copied_ms = 0.0
    done_ms: list[float] = []
    for bucket, size, own_copy_ms in zip(layout.parameters, sizes, copies_ms, strict=True):
        filled_ms, copied_ms = max(filled_ms, *(ready_ms[i] for i in bucket)), copied_ms + own_copy_ms
        alone_ms, reduce_ms = max(min(filled_ms + copied_ms, end_ms) - progress_ms, 0.0), comm_ms(size)
        now_ms, progress_ms = now_ms + alone_ms, progress_ms + alone_ms
        slowed_ms = slow.beside_ms(size) if slow.beside_ms else reduce_ms * slow.comm
        left_ms = (end_ms - progress_ms) * slow.compute
        if slowed_ms < left_ms:
            now_ms, progress_ms = now_ms + slowed_ms, progress_ms + slowed_ms / slow.compute
        else:
            if left_ms > 0 or alone_ms > 0:
                ended_ms = now_ms + max(left_ms, 0.0)
            sent = max(left_ms, 0.0) / slowed_ms if slowed_ms else 1.0
            now_ms += max(left_ms, 0.0) + (1 - sent) * reduce_ms
            progress_ms = end_ms
        done_ms.append(now_ms)
    if progress_ms < end_ms:
        ended_ms = now_ms + end_ms - progress_ms
    # Each is waited for and copied back in turn, the first after the backward.
    back_ms = ended_ms
    for done, own_copy_ms in zip(done_ms, copies_ms, strict=True):
        back_ms = max(back_ms, done) + own_copy_ms
    return compute.before_ms + max(back_ms + residual_ms, compute.backward_ms) + compute.after_ms
