"""Waiting for the slowest: the expected maximum over n ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

EULER_GAMMA = float(np.euler_gamma)


def expected_max(samples: Sequence[float], num_ranks: int) -> float:
    """Expected largest of `num_ranks` independent draws, given `samples` of one; 1 without samples.

    Up to as many ranks as there are samples it is that of the empirical distribution. Beyond, what lies above
    the upper quartile is taken as exponential (extreme-value theory's Gumbel domain): of n ranks n / 4 are
    there, and the largest of m exponentials of mean b is b (ln m + 0.577) on average.
    """
    values = np.sort(np.asarray(samples, dtype=float))
    if not values.size:
        return 1.0
    within = min(num_ranks, values.size)
    ends = (np.arange(values.size + 1) / values.size) ** within
    expected = float(np.sum(values * np.diff(ends)))
    if num_ranks <= values.size:
        return expected
    quartile = float(np.quantile(values, 0.75))
    excess = values[values > quartile] - quartile
    if not excess.size:
        return expected
    tail = float(excess.mean()) * (math.log(num_ranks * excess.size / values.size) + EULER_GAMMA)
    return max(expected, quartile + tail)
