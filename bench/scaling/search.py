"""The best bucket layout there is, exactly, and the bound that none can beat. Pure.

A layout cuts the reducer's order into consecutive buckets. After the first k parameters are sent, all that
matters is when the queue is free, how far the backward has come by then, and until when copying the buckets
so far back will keep the end waiting: no later, no less far and no longer is never worse (`timeline.advance`
is monotone), so of all layouts of the first k only the states that no other beats in all three are kept, and
the search over them is exact. Where running both gets more done than one after the other (1/compute + 1/comm
slow-down of at least 1), idling is never better than sending either, so a state also beats every later one
that has lost as much or more compute time; few states are left then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bench.scaling.buckets import Layout, assign_cap
from bench.scaling.timeline import Compute, Slowdown, Step, advance, make_work, simulate

CostMs = Callable[[float], float]
"""Bytes on the wire to ms."""

UNIFORM_CAPS = (
    "default",
    "0",
    *(f"{cap:g}" for cap in (0.5, 1, 2, 4, 5, 8, 10, 16, 25, 32, 50, 64, 100, 200)),
)


@dataclass(frozen=True)
class Found:
    """A layout and its simulated step; `bucket_cap_mb` where a uniform cap gives it."""

    layout: Layout
    step: Step
    bucket_cap_mb: str | None = None


@dataclass(frozen=True)
class _State:
    now_ms: float
    progress_ms: float
    back_ms: float
    """From when on nothing but all copies back is left to do, as far as buckets until here decide it: their
    latest end, less the time in which those before are copied back, or the end of the backward."""
    start: int
    """First parameter of the last bucket."""
    before: _State | None


def best_layout(
    num_bytes: Sequence[int],
    ready_ms: Sequence[float],
    comm_ms: CostMs,
    compute: Compute,
    *,
    slowdown: Slowdown | None = None,
    copy_ms: float = 0.0,
    wire_share: float = 1.0,
    tolerance_ms: float = 0.0,
) -> Found:
    """The contiguous layout with the shortest simulated step.

    Args:
        num_bytes: gradients in reducer order, all of one kind.
        ready_ms: when each is ready in an undisturbed backward.
        comm_ms: all-reduce time of a message.
        compute: the step without communication.
        slowdown: while both run.
        copy_ms: to copy all gradients once, as `timeline.simulate` takes it.
        wire_share: share of a gradient's bytes that is sent.
        tolerance_ms: 0 is exact; above, states as close as this count as one, for models of hundreds of
            parameters, and the result may miss the best by that much per bucket.
    """
    slow = slowdown or Slowdown()
    count = len(num_bytes)
    sent = [0, *accumulate(num_bytes)]
    copied = [copy_ms * so_far / sent[count] for so_far in sent]
    launch = _launch_ms(num_bytes, ready_ms, copy_ms)
    end_ms = compute.backward_ms + copy_ms
    least = _least_comm(num_bytes, comm_ms, wire_share)
    best_known = best_uniform_cap(
        num_bytes, ready_ms, comm_ms, compute, slowdown=slow, copy_ms=copy_ms, wire_share=wire_share
    )
    # All in terms of the moment when nothing but all copies back is left to do.
    limit_ms = (best_known.step.step_ms - compute.before_ms - compute.after_ms - copy_ms) * (1 + 1e-12)
    # By k, progress plus sending that the parameters from k on still need at the least.
    ahead = list(accumulate((launch[k] + least[k] for k in range(count - 1, -1, -1)), max))[::-1]
    ahead.append(0.0)
    fronts: list[list[_State]] = [[_State(0.0, 0.0, 0.0, 0, None)]]
    for k in range(1, count + 1):
        reached = []
        # The last bucket ends no earlier than all can be sent; what precedes it is copied back by then.
        hidden_ms = least[k] - copied[count - 1] if k < count else -math.inf
        for start in range(k):
            cost = comm_ms((sent[k] - sent[start]) * wire_share)
            for state in fronts[start]:
                at = launch[k - 1]
                now, progress = advance(state.now_ms, state.progress_ms, at, cost, end_ms, slow)
                computed = _computed_ms(state, at, now, progress, end_ms, slow)
                back = max(state.back_ms, computed, now - copied[start], now + hidden_ms)
                if max(back, now + ahead[k] - progress - copied[count - 1]) <= limit_ms:
                    reached.append(_State(now, progress, back, start, state))
        fronts.append(_front(reached, tolerance_ms, productive=1 / slow.compute + 1 / slow.comm >= 1))
    if not fronts[count]:  # only with a tolerance, which may drop the way to the known one
        return best_known
    final = min(fronts[count], key=lambda s: s.back_ms)
    layout = _layout(final, count)
    work = make_work(num_bytes, ready_ms, layout, comm_ms, wire_share=wire_share)
    found = Found(layout, simulate(work, compute, slowdown=slow, copy_ms=copy_ms))
    return found if found.step.step_ms < best_known.step.step_ms else best_known


def best_uniform_cap(
    num_bytes: Sequence[int],
    ready_ms: Sequence[float],
    comm_ms: CostMs,
    compute: Compute,
    *,
    slowdown: Slowdown | None = None,
    copy_ms: float = 0.0,
    wire_share: float = 1.0,
    caps: Sequence[str] = UNIFORM_CAPS,
) -> Found:
    """The cap of `caps` with the shortest simulated step; the earlier one where two are equal."""
    tried = []
    for cap in caps:
        layout = assign_cap(num_bytes, cap)
        work = make_work(num_bytes, ready_ms, layout, comm_ms, wire_share=wire_share)
        tried.append(Found(layout, simulate(work, compute, slowdown=slowdown, copy_ms=copy_ms), cap))
    return min(tried, key=lambda found: found.step.step_ms)


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


def _computed_ms(
    before: _State, ready_ms: float, now_ms: float, progress_ms: float, end_ms: float, slow: Slowdown
) -> float:
    """When the backward ends, at the earliest; 0 where it had ended `before`, which knows when."""
    if progress_ms < end_ms:
        return now_ms + end_ms - progress_ms
    if before.progress_ms >= end_ms:
        return 0.0
    at_ms = max(ready_ms, before.progress_ms)
    return before.now_ms + at_ms - before.progress_ms + (end_ms - at_ms) * slow.compute


def _front(states: list[_State], tolerance_ms: float, *, productive: bool) -> list[_State]:
    """The states that no other beats, by time."""
    kept: list[_State] = []

    def merit(state: _State) -> float:
        return state.progress_ms - (state.now_ms if productive else 0.0)

    for state in sorted(states, key=lambda s: (s.now_ms, -s.progress_ms, s.back_ms)):
        beaten = any(
            other.back_ms <= state.back_ms + tolerance_ms
            and (merit(state) <= merit(other) + tolerance_ms or state.progress_ms <= other.progress_ms)
            for other in kept
        )
        if not beaten:
            kept.append(state)
    return kept


def _layout(state: _State, count: int) -> Layout:
    buckets: list[tuple[int, ...]] = []
    end = count
    at: _State | None = state
    while at is not None and at.before is not None:
        buckets.append(tuple(range(at.start, end)))
        end, at = at.start, at.before
    return tuple(reversed(buckets))
