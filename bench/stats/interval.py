"""Intervals: of medians over rounds, the unit of repetition, and of what launches and runs have in common.

Those of speed-ups and comparisons, ratios of cases, are of the fit in `fit.py`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import scipy

Figures: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Samples: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float64]]

ONE_SIGMA = 0.6827
"""Share of a normal distribution within one standard deviation: half such an interval is the error."""

SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation from the median."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval; `low` and `high` are NaN where one round cannot give them."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval over the estimate, a fraction; NaN when unknown."""
        return (self.high - self.low) / (2 * self.estimate) if self.estimate else math.nan

    def scale(self, factor: float) -> Interval:
        """Return the interval in another unit, or per something; `factor` is positive."""
        return Interval(self.estimate * factor, self.low * factor, self.high * factor)

    def shift(self, constant: float) -> Interval:
        """Return the interval moved up by a constant."""
        return Interval(self.estimate + constant, self.low + constant, self.high + constant)

    def subtract(self, part: Interval) -> Interval:
        """Return the interval of what is left without a part; it holds whatever the dependence of the two."""
        return Interval(self.estimate - part.estimate, self.low - part.high, self.high - part.low)

    def negate(self) -> Interval:
        """Return the interval of the value with the other sign."""
        return Interval(-self.estimate, -self.high, -self.low)

    def invert(self, factor: float = 1.0) -> Interval:
        """`factor` over the interval, such as a rate from a time; what was low is high."""
        return Interval(factor / self.estimate, factor / self.high, factor / self.low)

    def exponentiate(self) -> Interval:
        """Return the interval of what this one is the logarithm of."""
        # Beyond exp(700) a float overflows; such an interval says nothing anyway.
        return Interval(*(math.exp(min(end, 700.0)) for end in (self.estimate, self.low, self.high)))

    def to_columns(self, name: str) -> dict[str, float]:
        """Return the cells of a table that hold it: `name`, `name_low` and `name_high`."""
        return {name: self.estimate, f"{name}_low": self.low, f"{name}_high": self.high}

    def is_clear_of(self, value: float) -> bool:
        """Tell whether the interval is known and lies wholly above or below `value`."""
        return self.low > value or self.high < value


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error and the degrees of freedom of that; of a rate or a ratio on a log scale.

    The error is NaN where it is not known.
    """

    value: float
    error: float
    freedom: float = math.inf

    def compute_interval(self, confidence: float = 0.95) -> Interval:
        """Return the interval by Student's t."""
        reach = self._compute_reach((1 + confidence) / 2)
        return Interval(self.value, self.value - reach, self.value + reach)

    def compute_quantile_interval(self, below: float, above: float) -> Interval:
        """Return the interval below and above which the value lies with these probabilities (Student's t)."""
        return Interval(
            self.value,
            self.value - self._compute_reach(1 - below),
            self.value + self._compute_reach(1 - above),
        )

    def _compute_reach(self, quantile: float) -> float:
        return float(scipy.special.stdtrit(self.freedom, quantile)) * self.error

    def shift(self, constant: float) -> Estimate:
        """Return the estimate moved up by a constant; of logarithms that of exp(constant) times as much."""
        return replace(self, value=self.value + constant)

    def scale(self, factor: float) -> Estimate:
        """Return the estimate in another unit; `factor` is positive."""
        return replace(self, value=self.value * factor, error=self.error * factor)

    def subtract(self, *others: Estimate) -> Estimate:
        """Less estimates of other data: errors add as squares, with Welch's degrees of freedom."""
        every = (self, *others)
        variance = sum(one.error**2 for one in every)
        spread = sum(one.error**4 / one.freedom for one in every)
        value = self.value - sum(one.value for one in others)
        return Estimate(value, math.sqrt(variance), variance**2 / spread if spread else math.inf)


def compute_median_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Median with a distribution-free interval: two of the ordered values, or points between two of them.

    The k-th smallest and k-th largest of n values enclose the population's median with a chance that the
    binomial distribution tells, whatever the shape of the noise; between two such pairs it is interpolated
    (Hettmansperger and Sheather, "Confidence intervals based on interpolated order statistics", 1986, which
    moves the coverage by tenths of a percent). No resampling: the same rounds always give the same interval.

    Few rounds do not reach the confidence with all of their range (95% needs six): they give no interval.

    Args:
        values: one figure per round, any unit; NaN among them makes the result NaN.
        confidence: coverage of the interval, a fraction.
    """
    sample = np.asarray(values, dtype=float)
    if sample.size == 0:
        return Interval(math.nan, math.nan, math.nan)
    (found,) = compute_median_intervals(sample[:, np.newaxis], confidence=confidence)
    return found


def compute_median_intervals(samples: Samples, *, confidence: float = 0.95) -> list[Interval]:
    """Compute the median interval of every column; a row of `samples` is a round, at least one."""
    ordered = np.sort(samples, axis=0)
    three = np.full((3, ordered.shape[1]), math.nan)
    known = ~np.isnan(ordered[-1])
    # Of figures near the largest float the ends are infinite.
    with np.errstate(all="ignore"):
        three[0] = np.median(ordered, axis=0)
        if len(ordered) > 1:
            three[1:, known] = _compute_ends(ordered[:, known], confidence)
    return [Interval(*column) for column in three.T.tolist()]


def _compute_ends(ordered: Samples, confidence: float) -> tuple[Figures, Figures]:
    size = len(ordered)
    if _compute_coverage(1, size) < confidence:
        unknown = np.full(ordered.shape[1], math.nan)
        return unknown, unknown
    place, weight = _find_order_place(size, confidence)
    outer_low, inner_low = ordered[place - 1 : place + 1]
    inner_high, outer_high = ordered[-place - 1 :][:2]
    return outer_low + weight * (inner_low - outer_low), outer_high + weight * (inner_high - outer_high)


@functools.cache
def _compute_coverage(place: int, size: int) -> float:
    """Chance that the `place`-th smallest and largest of `size` values enclose the median."""
    return 1 - 2 * float(scipy.stats.binom.cdf(place - 1, size, 0.5))


@functools.cache
def _find_order_place(size: int, confidence: float) -> tuple[int, float]:
    """Place of the order statistic whose pair still covers `confidence`, and how far to go to the next."""
    place = max(int(scipy.stats.binom.ppf((1 - confidence) / 2, size, 0.5)), 1)
    covered, next_covered = _compute_coverage(place, size), _compute_coverage(place + 1, size)
    share = (covered - confidence) / (covered - next_covered)
    return place, (size - place) * share / (place + (size - 2 * place) * share)


def compute_median_ratio(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> Interval:
    """Median over the common rounds of the ratio formed inside each round, so that drift cancels.

    The ratios that a run tells of its cases come of one fit instead: `FittedSteps.estimate_ratios`.
    """
    rounds = sorted(numerator.keys() & denominator.keys())
    return compute_median_interval([numerator[r] / denominator[r] for r in rounds])


QUARTERS = 4
"""Parts of a run whose medians tell how it changes by itself; fewer would miss a change there and back."""

MIN_OF_QUARTER = 3
"""Rounds from which the error of their median can be told."""


def average_launches(found: Sequence[Estimate]) -> Estimate:
    """Return the mean of what each launch gave; what launches differ by is in its error, by Student's t.

    Of one launch its own estimate: its rounds cannot tell what another launch would add.
    """
    if len(found) == 1:
        return found[0]
    values = [one.value for one in found]
    return Estimate(
        statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1
    )


def add_between_run_variance(difference: Estimate, *rounds: Sequence[float] | Figures) -> Estimate:
    """Widen the difference of runs that did not take turns by how much each run changed within itself.

    A machine whose pace changes during a run is likely to have another between two. So the variance between
    the quarters of each run, beyond that of its rounds, counts once more, as that of where the whole run lay.
    Runs of fewer than three rounds in every quarter tell nothing of that, and widen nothing. `rounds` has of
    each run one figure per round, in their order and in the unit of the difference.
    """
    changed = [
        Estimate(0.0, math.sqrt(_estimate_change_within(np.asarray(one))), QUARTERS - 1) for one in rounds
    ]
    return difference.subtract(*changed)


def _estimate_change_within(rounds: Figures) -> float:
    """Variance between the quarters of a run beyond that of its rounds; 0 where it has too few.

    The estimate of DerSimonian and Laird, "Meta-analysis in clinical trials" (1986), with equal weights.
    """
    if rounds.size < MIN_OF_QUARTER * QUARTERS:
        return 0.0
    quarters = np.array_split(rounds, QUARTERS)
    each = [compute_median_interval(quarter.tolist(), confidence=ONE_SIGMA) for quarter in quarters]
    noise = statistics.fmean(((one.high - one.low) / 2) ** 2 for one in each)
    return max(statistics.variance([one.estimate for one in each]) - noise, 0.0)


def estimate_common_value(values: Sequence[Interval]) -> float:
    """Estimate the common value of repeated measurements: the mean of their logarithms, by precision.

    Each counts by one over its variance, as in a meta-analysis of a fixed effect. Needs known intervals of
    positive values.
    """
    weights = [math.log(one.high / one.low) ** -2 for one in values]
    logs = [math.log(one.estimate) for one in values]
    return math.exp(sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights))
