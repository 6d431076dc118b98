"""Slow-downs and a residual, fitted so that the simulation gives what one case took. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.scaling.timeline import Compute, Slowdown, Work, simulate

MOST = 8.0
"""No slow-down is sought beyond this."""


@dataclass(frozen=True)
class RoundFit:
    """One round of a case: the step with communication, and the compute of a typical rank without."""

    step_ms: float
    compute: Compute


@dataclass(frozen=True)
class Fitted:
    """One figure per round each."""

    compute_slowdown: tuple[float, ...]
    comm_slowdown: tuple[float, ...]
    residual_ms: tuple[float, ...]


def fit(
    rounds: Sequence[RoundFit],
    work: Sequence[Work],
    *,
    end_ms: float,
    beside: Sequence[float],
    slowest: float,
    residual_ms: float | None = None,
) -> Fitted:
    """What one case tells of the slow-downs.

    The compute's is the one under which the simulated backward lasts `beside` times its length. What then
    is missing to the round's step is the residual, or, where that is known, communication slowed.

    Args:
        rounds: the case's rounds, at least one.
        work: its buckets, ready within a backward of `end_ms`.
        end_ms: length of the backward that `work` belongs to.
        beside: measured times to the last gradient beside communication over those without.
        slowest: the slowest rank's own step time over the typical one.
        residual_ms: where it was measured (what DDP on one device takes beyond the plain module).
    """
    ratio = float(median(beside)) if beside else 1.0
    found = [
        _fit(r, _stretched(work, r.compute.backward_ms * slowest / end_ms), slowest, ratio, residual_ms)
        for r in rounds
    ]
    compute, comm, residual = zip(*found, strict=True) if found else ((1.0,), (1.0,), (residual_ms or 0.0,))
    return Fitted(compute, comm, residual)


def _fit(
    measured: RoundFit, work: Sequence[Work], factor: float, ratio: float, residual_ms: float | None
) -> tuple[float, float, float]:
    compute = measured.compute.scaled(factor)
    slow_compute = slow_comm = 1.0
    for _ in range(6 if residual_ms is not None else 1):  # each moves the other a little

        def backward(x: float, comm: float = slow_comm) -> float:
            return simulate(work, compute, slowdown=Slowdown(compute=x, comm=comm)).compute_end_ms

        slow_compute = _rising(backward, compute.backward_ms * ratio)

        def step(x: float, slow: float = slow_compute) -> float:
            return simulate(work, compute, slowdown=Slowdown(compute=slow, comm=x)).step_ms

        if residual_ms is None:
            return slow_compute, 1.0, max(measured.step_ms - step(1.0), 0.0)
        slow_comm = _rising(step, measured.step_ms - residual_ms)
    return slow_compute, slow_comm, residual_ms or 0.0


def _rising(function: Callable[[float], float], wanted: float) -> float:
    """Where a non-decreasing function reaches `wanted`, between 1 and `MOST`."""
    low, high = 1.0, MOST
    if function(low) >= wanted:
        return low
    if function(high) < wanted:
        # The other runs too briefly: from some slow-down on, more of it changes nothing.
        return next((x / 8 for x in range(8, int(8 * MOST)) if function(x / 8) >= function(MOST)), MOST)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return high


def _stretched(work: Sequence[Work], factor: float) -> list[Work]:
    return [replace(bucket, ready_ms=bucket.ready_ms * factor) for bucket in work]
