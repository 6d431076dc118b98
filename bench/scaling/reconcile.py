"""A measured all-reduce curve brought into line with what a case's buckets took. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.scaling.calibration import Samples
from bench.scaling.cost import measured_curve

COMMON_SD = 0.01
"""Of the speed of the whole network between two medians: those of buckets and of one message of all their
bytes differ by 0-2% over shaped links."""

Z95 = 1.96
NUDGE = 1e-4
ITERATIONS = 20

Points = tuple[tuple[int, Samples], ...]


def reconciled(points: Points, sizes: Sequence[float], total_ms: float) -> Points:
    """The curve with its times multiplied, so that messages of `sizes` take `total_ms` together.

    The least change that does it, in logarithms, weighed by how far each point's own repetitions scatter (no
    further than they reach) and by `COMMON_SD` for all together; the rest is the same for all. A size that
    was held up while the curve was taken is put right by that, and does not make the others faster than the
    network was ever seen.

    Args:
        points: (message bytes, ms of each repetition, or the median and its 95% interval).
        sizes: bytes of the messages that were sent back to back.
        total_ms: what they took. Where it or the curve is no time at all, the curve stays as it is.

    Source: least squares under one constraint, x = C w (w' C w)^-1 d, repeated as w changes with x.
    """
    if total_ms <= 0 or measured_curve(points)(max(sizes, default=0)) <= 0:
        return points
    shortest, longest = np.array([_reach(times) for _, times in points]).T
    # A point's interval is that of its median.
    covariance = np.diag(((longest - shortest) / (2 * Z95)) ** 2) + COMMON_SD**2
    moved = np.zeros(len(points))
    for _ in range(ITERATIONS):
        missing = math.log(total_ms / _total(points, moved, sizes))
        weights = _weights(points, moved, sizes)
        together = covariance @ weights
        further = together * (missing + weights @ moved) / (weights @ together) - moved
        moved = moved + further
        if np.abs(further).max() < NUDGE:
            break
    moved = np.clip(moved, shortest, longest)
    moved = moved + math.log(total_ms / _total(points, moved, sizes))
    return _moved(points, moved)


def _reach(times: Samples) -> tuple[float, float]:
    """From the median to the shortest and to the longest repetition, in logarithms."""
    middle = float(np.median(times))
    return (math.log(min(times) / middle), math.log(max(times) / middle)) if min(times) > 0 else (0.0, 0.0)


def _weights(points: Points, moved: NDArray[np.float64], sizes: Sequence[float]) -> NDArray[np.float64]:
    """How much the logarithm of the total follows that of each point."""
    here = math.log(_total(points, moved, sizes))
    nudges = NUDGE * np.eye(len(points))
    return np.array([(math.log(_total(points, moved + nudge, sizes)) - here) / NUDGE for nudge in nudges])


def _total(points: Points, moved: NDArray[np.float64], sizes: Sequence[float]) -> float:
    return sum(map(measured_curve(_moved(points, moved)), sizes))


def _moved(points: Points, moved: NDArray[np.float64]) -> Points:
    factors = np.exp(moved)
    return tuple(
        (size, tuple(ms * float(by) for ms in times))
        for (size, times), by in zip(points, factors, strict=True)
    )
