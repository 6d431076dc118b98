"""Time of an all-reduce by message size, on other rank counts, networks and shared cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np
from msgspec import Meta

from ..plan.buckets import compute_ring_factor
from .timeline import Slowdown

THREADS_PER_CORE = 3.0
"""Threads on a core: two of gloo, one to reduce and one to send and receive, and one that computes. Each
has a third while all are busy (sched(7): equal weights)."""

Samples: TypeAlias = tuple[float, ...]
"""One figure per round or repetition; the median is the estimate."""

# More bytes, ms or ranks than these were never measured, and might overflow.
Count: TypeAlias = Annotated[int, Meta(ge=1, le=10**12)]
Ms: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]


@dataclass(frozen=True, kw_only=True)
class AllReduceTimes:
    """All-reduce by itself over `num_ranks` ranks: (message bytes, ms of each repetition)."""

    num_ranks: Count
    backend: str
    points: tuple[tuple[Count, tuple[Ms, ...]], ...]


@dataclass(frozen=True)
class CostCurve:
    """All-reduce time by size: points of (bytes, ms), both rising and above 0; call it with bytes.

    Between points it is a line on log-log axes, below the first it stays (latency), beyond the last it goes
    on with the bandwidth of the last two. The time of 0 bytes, and without points (one rank), is 0.
    """

    points: tuple[tuple[float, float], ...] = ()

    def __call__(self, num_bytes: float) -> float:
        if num_bytes <= 0 or not self.points:
            return 0.0
        sizes, times = zip(*self.points, strict=True)
        beyond = max(num_bytes - sizes[-1], 0.0)
        if beyond:
            (b0, t0), (b1, t1) = ((0.0, 0.0), *self.points)[-2:]
            # Never dearer than the last point's own average, which holds the latency too.
            return float(t1 + beyond * (min((t1 - t0) / (b1 - b0), t1 / b1) or t1 / b1))
        return math.exp(np.interp(math.log(num_bytes), np.log(sizes), np.log(times)))

    def scale(self, factor: float) -> CostCurve:
        return CostCurve(tuple((size, ms * factor) for size, ms in self.points))

    def add_lanes(self, lanes: int) -> CostCurve:
        """Add the same network in parallel: each lane carries its share of the bytes."""
        return CostCurve(tuple((size * lanes, ms) for size, ms in self.points))


class CostBand(NamedTuple):
    """A curve, and those that bound what is known of the network."""

    estimate: CostCurve
    low: CostCurve
    high: CostCurve

    @classmethod
    def from_curve(cls, curve: CostCurve) -> CostBand:
        """Return a curve of which no uncertainty is known."""
        return cls(curve, curve, curve)

    def scale(self, factor: float) -> CostBand:
        return CostBand(*(curve.scale(factor) for curve in self))


def make_curve(points: Iterable[tuple[int, Sequence[float]]]) -> CostCurve:
    """Make a curve of measured (bytes, ms of each repetition): medians, non-decreasing in size.

    A larger message is never faster; where noise says so, neighbours are pooled (isotonic, on logs).
    """
    medians = {float(size): float(median(times)) for size, times in sorted(points) if times}
    if not medians or list(medians.values())[-1] <= 0:
        return CostCurve()
    import scipy  # the names of networks, in a --help, need none of it

    logs = np.log(np.maximum(list(medians.values()), 1e-6))
    rising = np.exp(scipy.optimize.isotonic_regression(logs).x)
    return CostCurve(tuple(zip(medians, rising.tolist(), strict=True)))


def carry_to_ranks(
    curve: CostCurve, *, measured: int, wanted: int, hop_ms: float, steps: Callable[[int], int]
) -> CostCurve:
    """Carry a curve of `measured` ranks over to `wanted`, both at least 2: ring law by size.

    Latency is `hop_ms` for each of the `steps` that so many ranks take.
    """
    ratio = compute_ring_factor(wanted) / compute_ring_factor(measured)
    # The latency within the measured curve, which the ring law must not stretch.
    floor_ms = min(steps(measured) * hop_ms, curve.points[0][1])
    latency_ms = floor_ms * steps(wanted) / steps(measured)
    return CostCurve(tuple((size, (ms - floor_ms) * ratio + latency_ms) for size, ms in curve.points))


def count_ring_steps(num_ranks: int) -> int:
    """Latency steps of a ring."""
    return 2 * (num_ranks - 1)


def count_tree_steps(num_ranks: int) -> int:
    """Latency steps of a double binary tree up and down (NCCL 2.4): 2 log2 n."""
    return 2 * math.ceil(math.log2(num_ranks))


def combine_levels(intra: CostCurve, inter: CostCurve, overlap: float) -> CostCurve:
    """Combine two levels: reduce-scatter inside a node, all-reduce between nodes, all-gather inside.

    The two inside are the two halves of a ring all-reduce, so they cost what `intra` does. `overlap` is the
    share of the shorter level hidden behind the longer one: 0 is one after the other, 1 perfectly pipelined.
    """
    sizes = sorted({size for size, _ in (*intra.points, *inter.points)})
    return CostCurve(tuple((s, intra(s) + inter(s) - overlap * min(intra(s), inter(s))) for s in sizes))


def compute_port_factor(num_nodes: int, *, num_ranks: int, slowed: float) -> float:
    """Factor from an all-reduce over a rank of each node to what the nodes' ports do in one over all ranks.

    A ring of all ranks crosses the ports, with its 2 (n - 1) / n bytes per byte of message. Kernels that take
    `slowed` times as long slow a port too where they forward what came through another. Of two nodes none
    does: NCCL gives their channels the rate within a node (`nNodes <= 2` in `src/graph/tuning.cc`), and ports
    read and write the memory of GPUs by themselves.
    """
    return (
        compute_ring_factor(num_ranks) / compute_ring_factor(num_nodes) * (1.0 if num_nodes == 2 else slowed)
    )


def carry_slowdown(
    slowdown: Slowdown, *, core_share: float, calibrated: CostCurve, asked: CostCurve, num_bytes: float
) -> Slowdown:
    """Carry slow-downs from one network to another, where devices are cores that move the bytes.

    Compute's slow-down less 1 is in proportion to the bytes moved per second, compared at `num_bytes` of all
    gradients. Beside compute an all-reduce has a third of a core; one that needs more (`core_share` by
    itself, 0 where unknown) is slowed as much. docs/accuracy.md has the measurements.
    """
    if not calibrated.points or not asked.points:
        return slowdown
    faster = calibrated(num_bytes) / asked(num_bytes)
    hindered = max(THREADS_PER_CORE * core_share * faster, 1.0) / max(THREADS_PER_CORE * core_share, 1.0)
    return Slowdown(compute=1 + (slowdown.compute - 1) * faster / hindered, comm=slowdown.comm * hindered)
