"""Simulates one step: gradients become ready, buckets fill, all-reduces queue, both sides slow down.

Compute and communication advance at rates that are constant between events: compute at 1/`slowdown.compute`
while an all-reduce is in flight, an all-reduce at 1/`slowdown.comm` while the backward runs, else at 1.
DDP launches bucket k once it and every bucket before it are ready; all-reduces run one after the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddp_bench.bench.scaling.buckets import Layout


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """How many times longer each takes while the other runs; 1 is undisturbed."""

    compute: float = 1.0
    comm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A step without communication, ms."""

    before_ms: float
    """What precedes the backward: data, forward, and micro-batches that only accumulate."""
    backward_ms: float
    after_ms: float
    """Optimizer."""

    @property
    def total_ms(self) -> float:
        """The step where nothing is communicated."""
        return self.before_ms + self.backward_ms + self.after_ms

    def scaled(self, factor: float) -> Compute:
        """The same on a rank that takes `factor` times as long."""
        return Compute(
            before_ms=self.before_ms * factor,
            backward_ms=self.backward_ms * factor,
            after_ms=self.after_ms * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """One bucket: when its last gradient is ready in an undisturbed backward, and its all-reduce alone."""

    num_bytes: int
    ready_ms: float
    comm_ms: float


@dataclass(frozen=True, kw_only=True)
class StepBucket:
    """One bucket of a simulated step, ms since the backward began, as drawn by the report's timeline."""

    num_bytes: int
    ready_ms: float
    launch_ms: float
    start_ms: float
    done_ms: float


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A simulated step, ms. `compute_end_ms` and `comm_end_ms` count from the start of the backward."""

    step_ms: float
    exposed_comm_ms: float
    """Step minus the same step without communication; includes compute slowed beside communication."""
    comm_ms: float
    """All-reduces alone, back to back."""
    compute_end_ms: float
    comm_end_ms: float
    buckets: tuple[StepBucket, ...]


def make_work(
    num_bytes: Sequence[int],
    ready_ms: Sequence[float],
    layout: Layout,
    comm_ms: Callable[[float], float],
    *,
    wire_share: float = 1.0,
) -> list[Work]:
    """Make the buckets of `layout`; `comm_ms` maps bytes on the wire to ms.

    `wire_share` is the share of a gradient's bytes that is sent, 0.5 under an fp16 hook on fp32 gradients.
    """
    sizes = [sum(num_bytes[i] for i in bucket) for bucket in layout]
    return [
        Work(
            num_bytes=size,
            ready_ms=max(ready_ms[i] for i in bucket),
            comm_ms=comm_ms(size * wire_share),
        )
        for size, bucket in zip(sizes, layout, strict=True)
    ]


def simulate(
    work: Sequence[Work],
    compute: Compute,
    *,
    slowdown: Slowdown | None = None,
    copy_ms: float = 0.0,
    residual_ms: float = 0.0,
) -> SimulatedStep:
    """Simulate one step.

    Args:
        work: buckets in all-reduce order.
        compute: the step without communication; no bucket may be ready after `compute.backward_ms`.
        slowdown: while both run; undisturbed by default.
        copy_ms: to copy all gradients once, in proportion to their bytes: into a bucket before it is
            launched, as part of the backward, and back when the backward and its all-reduce are over,
            bucket by bucket (DDP without `gradient_as_bucket_view`).
        residual_ms: at the end, whatever the layout; a negative one shortens no more than the waiting.
    """
    slow = slowdown or Slowdown()
    work = _with_copies(work, copy_ms)
    end_ms = compute.backward_ms + copy_ms
    clock = _Clock(end_ms, slow)
    spans = []
    for bucket in work:
        clock.reach(bucket.ready_ms)
        start = clock.now_ms
        clock.communicate(bucket.comm_ms)
        spans.append((start, clock.now_ms))
    comm_end_ms = clock.now_ms if work else 0.0
    clock.reach(end_ms)
    compute_end_ms = clock.moment(end_ms)
    ready = [clock.moment(bucket.ready_ms) for bucket in work]
    buckets, launch = [], 0.0
    for bucket, at, (start, done) in zip(work, ready, spans, strict=True):
        launch = max(launch, at)
        buckets.append(
            StepBucket(
                num_bytes=bucket.num_bytes, ready_ms=at, launch_ms=launch, start_ms=start, done_ms=done
            )
        )
    copied_ms = _copied_back(compute_end_ms, work, [done for _, done in spans], copy_ms)
    backward_ms = max(copied_ms + residual_ms, compute.backward_ms)
    return SimulatedStep(
        step_ms=compute.before_ms + backward_ms + compute.after_ms,
        exposed_comm_ms=max(backward_ms - compute.backward_ms, 0.0),
        comm_ms=sum(bucket.comm_ms for bucket in work),
        compute_end_ms=compute_end_ms,
        comm_end_ms=comm_end_ms,
        buckets=tuple(buckets),
    )


def advance(
    now_ms: float, progress_ms: float, ready_ms: float, comm_ms: float, end_ms: float, slow: Slowdown
) -> tuple[float, float]:
    """Wait until the backward has progressed to `ready_ms`, then all-reduce: time and progress after it.

    `progress_ms` of `end_ms` of undisturbed backward are done at `now_ms`, when the queue is free.
    """
    wait_ms = max(ready_ms - progress_ms, 0.0)
    now_ms += wait_ms
    progress_ms += wait_ms
    until_comm_ms = comm_ms * slow.comm
    until_compute_ms = (end_ms - progress_ms) * slow.compute
    if until_comm_ms <= until_compute_ms:
        return now_ms + until_comm_ms, progress_ms + until_comm_ms / slow.compute
    return now_ms + until_compute_ms + comm_ms - until_compute_ms / slow.comm, end_ms


def _with_copies(work: Sequence[Work], copy_ms: float) -> list[Work]:
    """When bucket k is launched, everything up to it has been copied."""
    if not copy_ms:
        return list(work)
    total, copied, ready_ms, found = sum(bucket.num_bytes for bucket in work), 0, 0.0, []
    for bucket in work:
        copied += bucket.num_bytes
        ready_ms = max(ready_ms, bucket.ready_ms)
        found.append(replace(bucket, ready_ms=ready_ms + copy_ms * copied / total))
    return found


def _copied_back(
    compute_end_ms: float, work: Sequence[Work], done_ms: Sequence[float], copy_ms: float
) -> float:
    """When the last bucket is copied back; each is waited for in turn, the first after the backward."""
    now_ms, total = compute_end_ms, sum(bucket.num_bytes for bucket in work)
    for bucket, done in zip(work, done_ms, strict=True):
        now_ms = max(now_ms, done) + copy_ms * bucket.num_bytes / total
    return now_ms


class _Clock:
    """Wall time against progress of the backward, with the corners kept to draw from."""

    def __init__(self, end_ms: float, slow: Slowdown) -> None:
        self._end_ms = end_ms
        self._slow = slow
        self.now_ms = self._progress_ms = 0.0
        self._times, self._progress = [0.0], [0.0]

    def reach(self, progress_ms: float) -> None:
        """Compute alone until the backward has come this far."""
        wait_ms = max(progress_ms - self._progress_ms, 0.0)
        self._note(self.now_ms + wait_ms, self._progress_ms + wait_ms)

    def communicate(self, comm_ms: float) -> None:
        """One all-reduce, beside compute as long as there is any."""
        left_ms = (self._end_ms - self._progress_ms) * self._slow.compute
        if 0 < left_ms < comm_ms * self._slow.comm:
            comm_ms -= left_ms / self._slow.comm
            self._note(self.now_ms + left_ms, self._end_ms)
        self._note(
            *advance(self.now_ms, self._progress_ms, self._progress_ms, comm_ms, self._end_ms, self._slow)
        )

    def moment(self, progress_ms: float) -> float:
        """When the backward had come this far."""
        after = min(bisect_left(self._progress, progress_ms), len(self._progress) - 1)
        if after == 0 or self._progress[after] <= progress_ms:
            return self._times[after]
        done, left = (
            progress_ms - self._progress[after - 1],
            self._progress[after] - self._progress[after - 1],
        )
        return self._times[after - 1] + (self._times[after] - self._times[after - 1]) * done / left

    def _note(self, now_ms: float, progress_ms: float) -> None:
        self.now_ms, self._progress_ms = now_ms, progress_ms
        self._times.append(now_ms)
        self._progress.append(progress_ms)
