"""The best bucket layout there is, exactly, and the bound that none can beat. Pure.

A layout cuts the reducer's order into consecutive buckets. After the first k parameters are sent, all that
matters is when the queue is free and how far the backward has come by then: no later and no less far is
never worse (`timeline.advance` is monotone in both), so of all layouts of the first k only the states that no
other beats in both are kept, and the search over them is exact. Where running both gets more done than one
after the other (1/compute + 1/comm slow-down of at least 1), idling is never better than sending either, so a
state also beats every later one that has lost as much or more compute time; few states are left then.
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
        wire_share: share of a gradient's bytes that is sent.
        tolerance_ms: 0 is exact; above, states as close as this count as one, for models of hundreds of
            parameters, and the result may miss the best by that much per bucket.
    """
    slow = slowdown or Slowdown()
    count = len(num_bytes)
    sent = [0, *accumulate(num_bytes)]
    launch = list(accumulate(ready_ms, max))
    end_ms = compute.backward_ms
    least = _least_comm(num_bytes, comm_ms, wire_share)
    best_known = best_uniform_cap(num_bytes, ready_ms, comm_ms, compute, slowdown=slow, wire_share=wire_share)
    limit_ms = max(best_known.step.compute_end_ms, best_known.step.comm_end_ms) * (1 + 1e-12)
    # By k, progress plus sending that the parameters from k on still need at the least.
    ahead = list(accumulate((launch[k] + least[k] for k in range(count - 1, -1, -1)), max))[::-1]
    ahead.append(0.0)
    fronts: list[list[_State]] = [[_State(0.0, 0.0, 0, None)]]
    for k in range(1, count + 1):
        reached = []
        for start in range(k):
            cost = comm_ms((sent[k] - sent[start]) * wire_share)
            for state in fronts[start]:
                now, progress = advance(state.now_ms, state.progress_ms, launch[k - 1], cost, end_ms, slow)
                if now + max(end_ms - progress, ahead[k] - progress, least[k]) <= limit_ms:
                    reached.append(_State(now, progress, start, state))
        fronts.append(_front(reached, tolerance_ms, productive=1 / slow.compute + 1 / slow.comm >= 1))
    if not fronts[count]:  # only with a tolerance, which may drop the way to the known one
        return best_known
    final = min(fronts[count], key=lambda s: s.now_ms + end_ms - s.progress_ms)
    layout = _layout(final, count)
    work = make_work(num_bytes, ready_ms, layout, comm_ms, wire_share=wire_share)
    found = Found(layout, simulate(work, compute, slowdown=slow))
    return found if found.step.step_ms < best_known.step.step_ms else best_known


def best_uniform_cap(
    num_bytes: Sequence[int],
    ready_ms: Sequence[float],
    comm_ms: CostMs,
    compute: Compute,
    *,
    slowdown: Slowdown | None = None,
    wire_share: float = 1.0,
    caps: Sequence[str] = UNIFORM_CAPS,
) -> Found:
    """The cap of `caps` with the shortest simulated step; the earlier one where two are equal."""
    tried = []
    for cap in caps:
        layout = assign_cap(num_bytes, cap)
        work = make_work(num_bytes, ready_ms, layout, comm_ms, wire_share=wire_share)
        tried.append(Found(layout, simulate(work, compute, slowdown=slowdown), cap))
    return min(tried, key=lambda found: found.step.step_ms)


def lower_bound_ms(
    num_bytes: Sequence[int],
    ready_ms: Sequence[float],
    comm_ms: CostMs,
    compute: Compute,
    *,
    wire_share: float = 1.0,
) -> float:
    """The least step that any layout can reach: compute and communication each at full speed.

    From parameter k on, everything is sent after k is ready, so the backward lasts at least until then plus
    the least time in which the rest can be sent; for the last parameter that is its own all-reduce.
    """
    least = _least_comm(num_bytes, comm_ms, wire_share)
    launch = accumulate(ready_ms, max)
    ends = [ready + least[k] for k, ready in enumerate(launch)]
    return compute.before_ms + max(compute.backward_ms, *ends) + compute.after_ms


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


def _front(states: list[_State], tolerance_ms: float, *, productive: bool) -> list[_State]:
    """The states that no other beats, by time."""
    kept: list[_State] = []
    best = -math.inf
    for state in sorted(states, key=lambda s: (s.now_ms, -s.progress_ms)):
        merit_ms = state.progress_ms - (state.now_ms if productive else 0.0)
        if merit_ms > best + tolerance_ms and (not kept or state.progress_ms > kept[-1].progress_ms):
            kept.append(state)
            best = merit_ms
    return kept


def _layout(state: _State, count: int) -> Layout:
    buckets: list[tuple[int, ...]] = []
    end = count
    at: _State | None = state
    while at is not None and at.before is not None:
        buckets.append(tuple(range(at.start, end)))
        end, at = at.start, at.before
    return tuple(reversed(buckets))
