"""What computes and communicates when: one simulated DDP step, and the schedules of a pipeline.

In a DDP step gradients become ready, buckets fill, all-reduces queue, both sides slow down. Compute and
communication advance at rates that are constant between events: compute at 1/`slowdown.compute` while an
all-reduce is in flight, an all-reduce at 1/`slowdown.comm` while the backward runs, else at 1. DDP launches
bucket k once it and every bucket before it are ready; all-reduces run one after the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..buckets import Layout, bucket_bytes


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
    """One bucket of a simulated step, ms since the backward began."""

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
    return [
        Work(num_bytes=size, ready_ms=max(ready_ms[i] for i in bucket), comm_ms=comm_ms(size * wire_share))
        for size, bucket in zip(bucket_bytes(num_bytes, layout), layout, strict=True)
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
    total_bytes = sum(bucket.num_bytes for bucket in work)
    work = _with_copies(work, copy_ms, total_bytes)
    end_ms = compute.backward_ms + copy_ms
    clock = _Clock(end_ms, slowdown or Slowdown())
    spans = []
    for bucket in work:
        clock.reach(bucket.ready_ms)
        start = clock.now_ms
        clock.communicate(bucket.comm_ms)
        spans.append((start, clock.now_ms))
    comm_end_ms = clock.now_ms if work else 0.0
    clock.reach(end_ms)
    compute_end_ms = clock.moment(end_ms)
    buckets: list[StepBucket] = []
    launch_ms, copied_ms = 0.0, compute_end_ms
    for bucket, (start, done) in zip(work, spans, strict=True):
        ready_ms = clock.moment(bucket.ready_ms)
        launch_ms = max(launch_ms, ready_ms)
        # Each is waited for and copied back in turn, the first after the backward.
        copied_ms = max(copied_ms, done) + copy_ms * bucket.num_bytes / total_bytes
        buckets.append(
            StepBucket(
                num_bytes=bucket.num_bytes,
                ready_ms=ready_ms,
                launch_ms=launch_ms,
                start_ms=start,
                done_ms=done,
            )
        )
    backward_ms = max(copied_ms + residual_ms, compute.backward_ms)
    return SimulatedStep(
        step_ms=compute.before_ms + backward_ms + compute.after_ms,
        exposed_comm_ms=max(backward_ms - compute.backward_ms, 0.0),
        comm_ms=sum(bucket.comm_ms for bucket in work),
        compute_end_ms=compute_end_ms,
        comm_end_ms=comm_end_ms,
        buckets=tuple(buckets),
    )


def _with_copies(work: Sequence[Work], copy_ms: float, total_bytes: int) -> list[Work]:
    """When bucket k is launched, everything up to it has been copied."""
    if not copy_ms:
        return list(work)
    copied, ready_ms, found = 0, 0.0, []
    for bucket in work:
        copied += bucket.num_bytes
        ready_ms = max(ready_ms, bucket.ready_ms)
        found.append(replace(bucket, ready_ms=ready_ms + copy_ms * copied / total_bytes))
    return found


class _Clock:
    """Wall time against progress of the backward, with the corners kept to look times up."""

    def __init__(self, end_ms: float, slow: Slowdown) -> None:
        self._end_ms = end_ms
        self._slow = slow
        self._times, self._progress = [0.0], [0.0]

    @property
    def now_ms(self) -> float:
        return self._times[-1]

    def reach(self, progress_ms: float) -> None:
        """Compute alone until the backward has come this far."""
        wait_ms = max(progress_ms - self._progress[-1], 0.0)
        self._note(self.now_ms + wait_ms, self._progress[-1] + wait_ms)

    def communicate(self, comm_ms: float) -> None:
        """One all-reduce, beside compute as long as there is any."""
        beside_ms = comm_ms * self._slow.comm
        left_ms = (self._end_ms - self._progress[-1]) * self._slow.compute
        if beside_ms <= left_ms:
            self._note(self.now_ms + beside_ms, self._progress[-1] + beside_ms / self._slow.compute)
            return
        if left_ms > 0:
            self._note(self.now_ms + left_ms, self._end_ms)
            comm_ms -= left_ms / self._slow.comm
        self._note(self.now_ms + comm_ms, self._end_ms)

    def moment(self, progress_ms: float) -> float:
        """When the backward had come this far."""
        after = min(bisect_left(self._progress, progress_ms), len(self._progress) - 1)
        if after == 0 or self._progress[after] <= progress_ms:
            return self._times[after]
        (t0, t1), (p0, p1) = self._times[after - 1 : after + 1], self._progress[after - 1 : after + 1]
        return t0 + (t1 - t0) * (progress_ms - p0) / (p1 - p0)

    def _note(self, now_ms: float, progress_ms: float) -> None:
        self._times.append(now_ms)
        self._progress.append(progress_ms)


Operation = tuple[str, int]
"""Of a pipeline's stage: `F` or `B`, and the micro-batch."""


def operations(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> list[Operation]:
    """What a stage does, in its order: under GPipe all forwards first, under 1F1B as few as it can.

    Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream" (1F1B).
    """
    m = num_micro_batches
    ahead = m if schedule == "gpipe" else min(m, num_stages - stage)
    forwards, backwards = [("F", i) for i in range(m)], [("B", i) for i in range(m)]
    found = forwards[:ahead]
    for i in range(m - ahead):
        found += [backwards[i], forwards[ahead + i]]
    return found + backwards[m - ahead :]


def bubble_share(
    schedule: str, forward_ms: Sequence[float], backward_ms: Sequence[float], num_micro_batches: int
) -> float:
    """Share of the stages' time in which they wait for each other, a fraction; communication takes none.

    `schedule` is `gpipe` or `1f1b`; forwards and backwards are those of one micro-batch, by stage. Equal
    stages give (n - 1) / (m + n - 1), as in the GPipe paper, section 2.3.
    """
    n = len(forward_ms)
    left = [operations(schedule, stage, n, num_micro_batches) for stage in range(n)]
    free_at = [0.0] * n
    done: dict[tuple[str, int, int], float] = {}

    def start(operation: Operation, stage: int) -> float | None:
        """When what an operation needs of its neighbour is there; None while that is not known."""
        kind, micro_batch = operation
        before = stage - 1 if kind == "F" else stage + 1
        return done.get((kind, before, micro_batch)) if 0 <= before < n else 0.0

    while any(left):
        for stage in range(n):
            while left[stage] and (at := start(left[stage][0], stage)) is not None:
                kind, micro_batch = left[stage].pop(0)
                takes_ms = (forward_ms if kind == "F" else backward_ms)[stage]
                free_at[stage] = max(free_at[stage], at) + takes_ms
                done[kind, stage, micro_batch] = free_at[stage]
    busy_ms = num_micro_batches * (sum(forward_ms) + sum(backward_ms))
    return 1 - busy_ms / (n * max(free_at))
