"""Intervals over rounds. Pure: the round is the unit of repetition, see README "How to read"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as scipy_stats

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A median and its bootstrap interval; `low` and `high` are NaN where one round cannot give them."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval over the estimate, a fraction; NaN when unknown."""
        return (self.high - self.low) / (2 * self.estimate) if self.estimate else math.nan

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and lies wholly above or below `value`."""
        return self.low > value or self.high < value


def median_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Median with its percentile-bootstrap interval (scipy), widened for few rounds.

    The percentile bootstrap is too narrow on small samples (three rounds: 74% instead of 95%). Its ends are
    moved out by the narrowness factor of Hesterberg, "What Teachers Should Know About the Bootstrap" (2015),
    section 3.4.1: t(n-1)/z x sqrt(n/(n-1)); on a log scale where every value is positive, so that a rate
    cannot become negative.

    Args:
        values: one figure per round, any unit.
        confidence: coverage of the interval, a fraction.
    """
    sample = np.asarray(values, dtype=float)
    if sample.size == 0:
        return Interval(math.nan, math.nan, math.nan)
    estimate = float(np.median(sample))
    if sample.size == 1:
        return Interval(estimate, math.nan, math.nan)
    found = scipy_stats.bootstrap(
        (sample,),
        np.median,
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    tail = (1 + confidence) / 2
    factor = scipy_stats.t.ppf(tail, sample.size - 1) / scipy_stats.norm.ppf(tail)
    factor *= math.sqrt(sample.size / (sample.size - 1))
    if (sample > 0).all():
        low, high = (estimate * (float(end) / estimate) ** factor for end in found)
    else:
        low, high = (estimate + (float(end) - estimate) * factor for end in found)
    return Interval(estimate, low, high)


def paired_ratio(
    numerator: Mapping[int, float], denominator: Mapping[int, float], *, confidence: float = 0.95
) -> Interval:
    """Median over the common rounds of the ratio formed inside each round, so that drift cancels."""
    rounds = sorted(numerator.keys() & denominator.keys())
    return median_interval([numerator[r] / denominator[r] for r in rounds], confidence=confidence)
