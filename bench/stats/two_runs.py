"""Figures of separate runs, which share no rounds, subtracted and divided: see docs/gate.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import scipy

from .interval import ONE_SIGMA, Figures, Interval, median_interval

RESAMPLES = 2000

QUARTERS = 4
"""Parts of a run whose medians tell how it changes by itself; fewer would miss a change there and back."""


def difference_of_medians(
    first: Sequence[float] | Figures, second: Sequence[float] | Figures, *, confidence: float = 0.95
) -> Interval:
    """Median less median of two independent samples, such as the rounds of two runs.

    The interval is t standard errors wide: the errors of both medians are the bootstrap's (scipy), times
    sqrt(n/(n-1)), and t has Welch's degrees of freedom, against the narrowness of the bootstrap on few rounds
    (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 3.4.1).

    Args:
        first: one figure per round, any unit.
        second: likewise, in the same unit, of other rounds.
        confidence: coverage of the interval, a fraction.
    """
    one, other = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if not one.size or not other.size:
        return Interval(math.nan, math.nan, math.nan)
    apart = float(np.median(one)) - float(np.median(other))
    if min(one.size, other.size) < 2:
        return Interval(apart, math.nan, math.nan)
    of_one, of_other = _median_variance(one), _median_variance(other)
    t = _welch_t((of_one, one.size), (of_other, other.size), confidence)
    reach = t * math.sqrt(of_one + of_other)
    return Interval(apart, apart - reach, apart + reach)


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], *, confidence: float = 0.95
) -> Interval:
    """Median over median of two independent samples of positive figures: their difference on a log scale."""
    logs = (np.log(np.asarray(values, dtype=float)) for values in (numerator, denominator))
    found = difference_of_medians(*logs, confidence=confidence)
    if math.isnan(found.estimate):
        return found
    # About the ratio of the medians, from which that of the logarithms differs where their number is even.
    ratio = float(np.median(numerator)) / float(np.median(denominator))
    about = found.exp().scaled(ratio / math.exp(found.estimate))
    return replace(about, estimate=ratio)


def difference_of_estimates(one: Interval, other: Interval, *, confidence: float = 0.95) -> Interval:
    """Subtract two figures of different runs, which share no rounds: errors add as squares.

    Both have intervals of 95%, which are widened as those of a normal distribution to `confidence`.
    """
    apart = one.estimate - other.estimate
    wider = float(scipy.stats.norm.ppf((1 + confidence) / 2) / scipy.stats.norm.ppf((1 + 0.95) / 2))
    down = wider * math.hypot(one.estimate - one.low, other.high - other.estimate)
    up = wider * math.hypot(one.high - one.estimate, other.estimate - other.low)
    return Interval(apart, apart - down, apart + up)


def ratio_of_estimates(
    one: Interval | None, other: Interval | None, *, confidence: float = 0.95
) -> Interval | None:
    """Divide two rates of different runs: their difference on a log scale."""
    if one is None or other is None or min(one.estimate, other.estimate) <= 0:
        return None
    found = difference_of_estimates(one.log(), other.log(), confidence=confidence)
    return replace(found.exp(), estimate=one.estimate / other.estimate)


def common_value(values: Sequence[Interval]) -> float:
    """The value that repeated measurements have in common: the mean of their logarithms, by their precision.

    Each counts by one over its variance, as in a meta-analysis of a fixed effect. Needs known intervals of
    positive values.
    """
    logs = [value.log() for value in values]
    weights = [(one.high - one.low) ** -2 for one in logs]
    return math.exp(sum(w * one.estimate for w, one in zip(weights, logs, strict=True)) / sum(weights))


def difference_of_runs(
    fits: tuple[Interval | None, Interval | None],
    rounds: tuple[Sequence[float], Sequence[float]],
    *,
    confidence: float = 0.95,
) -> tuple[Interval, Interval]:
    """Subtract the same figure of two separate runs: by rounds alone, and with the change of the runs.

    The estimate is the difference of what each run fitted. The interval covers that of the fits and that of
    the medians over rounds: where two ways to sum up a run disagree, neither is evidence of a change.

    Args:
        fits: of both runs with their intervals of 95%.
        rounds: one figure per round of each, in the same unit and the order of the rounds.
        confidence: coverage of the intervals, a fraction.
    """
    one, other = fits
    ways = [difference_of_medians(*rounds, confidence=confidence)]
    if one is not None and other is not None:
        ways.append(difference_of_estimates(one, other, confidence=confidence))
    wider = [with_change_of_runs(way, *rounds, confidence=confidence) for way in ways]
    return _covering(ways), _covering(wider)


def ratio_of_runs(
    fits: tuple[Interval | None, Interval | None],
    rounds: tuple[Sequence[float], Sequence[float]],
    *,
    confidence: float = 0.95,
) -> tuple[Interval, Interval]:
    """Divide the same positive figure of two separate runs, as `difference_of_runs` on a log scale."""
    logs = tuple(np.log(np.asarray(values, dtype=float)) for values in rounds)
    ways = [ratio_of_medians(*rounds, confidence=confidence)]
    fitted = ratio_of_estimates(*fits, confidence=confidence)
    ways += [] if fitted is None else [fitted]
    wider = [with_change_of_runs(way.log(), *logs, confidence=confidence).exp() for way in ways]
    return _covering(ways), replace(_covering(wider), estimate=ways[-1].estimate)


def _covering(ratios: Sequence[Interval]) -> Interval:
    """The last of some intervals, as wide as to cover all that have ends."""
    low = np.fmin.reduce([ratio.low for ratio in ratios])
    return Interval(ratios[-1].estimate, float(low), float(np.fmax.reduce([ratio.high for ratio in ratios])))


def variance_between(groups: Sequence[Sequence[float]]) -> float:
    """Variance between the medians of groups beyond that of the values in them; 0 where there is none.

    The estimate of DerSimonian and Laird, "Meta-analysis in clinical trials" (1986), with equal weights.
    Needs two groups of two values or more.
    """
    each = [median_interval(values, confidence=ONE_SIGMA) for values in groups]
    noise = statistics.fmean(((one.high - one.low) / 2) ** 2 for one in each)
    return max(statistics.variance([one.estimate for one in each]) - noise, 0.0)


def with_change_of_runs(
    difference: Interval,
    first: Sequence[float] | Figures,
    second: Sequence[float] | Figures,
    *,
    confidence: float = 0.95,
) -> Interval:
    """Widen the difference of two runs that did not take turns by how much each run changed within itself.

    A machine whose pace changes during a run is likely to have another between two. So the variance between
    the quarters of each run, beyond that of its rounds, counts once more, as that of where the whole run lay:
    its normal interval is added in quadrature. Runs of fewer than two rounds in every quarter tell nothing of
    that, and widen nothing.

    Args:
        difference: first less second, with the interval that their rounds give.
        first: one figure per round, any unit, in the order of the rounds; logarithms for a ratio.
        second: likewise of the other run.
        confidence: coverage of the interval, a fraction.
    """
    z = float(scipy.stats.norm.ppf((1 + confidence) / 2))
    changed = (_change_within(np.asarray(rounds, dtype=float)) for rounds in (first, second))
    beyond = z * math.sqrt(sum(changed))
    down = math.hypot(difference.estimate - difference.low, beyond)
    up = math.hypot(difference.high - difference.estimate, beyond)
    return Interval(difference.estimate, difference.estimate - down, difference.estimate + up)


def _change_within(rounds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Variance between the quarters of a run beyond that of its rounds; 0 where it has too few."""
    if rounds.size < 2 * QUARTERS:
        return 0.0
    return variance_between([list(quarter) for quarter in np.array_split(rounds, QUARTERS)])


def _median_variance(sample: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    found = scipy.stats.bootstrap(
        (sample,), np.median, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    )
    return float(found.standard_error) ** 2 * sample.size / (sample.size - 1)


def _welch_t(first: tuple[float, int], second: tuple[float, int], confidence: float) -> float:
    """Student's t at Welch's degrees of freedom, from the variance and size of both samples."""
    spread = sum(variance**2 / (size - 1) for variance, size in (first, second))
    freedom = (first[0] + second[0]) ** 2 / spread if spread else math.inf
    return float(scipy.stats.t.ppf((1 + confidence) / 2, freedom))
