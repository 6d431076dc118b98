"""Whether figures fall into two groups, as those of a machine that switches between two speeds do. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

SMALLEST_SHARE = 0.2
"""Of the figures; fewer that stand apart are outliers, not a level."""

NULL_SAMPLES = 20_000

MOST_FIGURES = 100
"""More are thinned out evenly: two levels show in fewer, and the null has to be simulated."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The best split of some figures in two; medians of both parts, in their unit."""

    low: float
    high: float
    share_low: float
    """Of the figures, in the lower part."""
    p_value: float
    """How often normal figures split at least as clearly."""


def two_levels(values: Sequence[float]) -> Levels:
    """Split positive figures in two where that explains most of the variance of their logarithms (two-means).

    As many normal figures split at random too, so the share explained is held against 20,000 simulated sets
    of them, the same at every call. Skewed noise splits less clearly on a log scale, heavy tails because each
    part must hold a fifth of the figures. Needs at least five.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    if ordered.size > MOST_FIGURES:
        ordered = ordered[np.linspace(0, ordered.size - 1, MOST_FIGURES).round().astype(int)]
    explained, places = _best_split(np.log(ordered)[None, :])
    null, place = _null(ordered.size), int(places[0])
    as_clear = null.size - int(np.searchsorted(null, explained[0]))
    return Levels(
        low=float(np.median(ordered[:place])),
        high=float(np.median(ordered[place:])),
        share_low=place / ordered.size,
        p_value=(1 + as_clear) / (1 + null.size),
    )


@functools.cache
def _null(size: int) -> Array:
    rows = np.sort(np.random.default_rng(0).normal(size=(NULL_SAMPLES, size)), axis=1)
    return np.sort(_best_split(rows)[0])


def _best_split(rows: Array) -> tuple[Array, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Of sorted rows: the largest share of the variance between two parts, and the size of the first."""
    size = rows.shape[1]
    fewest = math.ceil(SMALLEST_SHARE * size)
    places = np.arange(fewest, size - fewest + 1)
    centred = rows - rows.mean(axis=1, keepdims=True)
    between = np.cumsum(centred, axis=1)[:, places - 1] ** 2 * size / (places * (size - places))
    whole = np.maximum((centred**2).sum(axis=1), np.finfo(float).tiny)
    return between.max(axis=1) / whole, places[between.argmax(axis=1)]
