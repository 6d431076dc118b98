"""Intervals hold what they promise on the noise of real machines: simulated rounds, truth known."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats as scipy_stats

from ddp_bench.bench.stats import median_interval, paired_ratio, ratio_of_medians

TRIALS = 2000
TRUTH = 1.1

Times = np.ndarray[tuple[int, int], np.dtype[np.float64]]
Noise = Callable[[np.random.Generator, tuple[int, int]], Times]


def steady(rng, shape):
    return np.exp(0.01 * rng.normal(size=shape))


def bimodal(rng, shape):
    """A quarter of the blocks run on the slower of two clocks."""
    return np.exp(0.005 * rng.normal(size=shape)) * np.where(rng.random(shape) < 0.25, 1.06, 1.0)


def heavy(rng, shape):
    return np.exp(0.01 * rng.standard_t(3, size=shape))


def bursts(rng, shape):
    """Something else runs during a tenth of the blocks."""
    return steady(rng, shape) * (1 + 0.05 * rng.pareto(1.5, size=shape) * (rng.random(shape) < 0.1))


NOISES = {"steady": (steady, steady), "bimodal": (bimodal, bimodal), "heavy": (heavy, heavy)}
NOISES |= {"bursts": (bursts, bursts), "bimodal on one side": (bimodal, steady)}


@functools.cache
def true_ratio(name):
    """The median ratio that the noise itself has, of a million pairs."""
    rng = np.random.default_rng(0)
    slow, fast = NOISES[name]
    return float(np.median(slow(rng, (1, 1_000_000)) / fast(rng, (1, 1_000_000))))


def trials(name, num_rounds, seed=0):
    """Times of both sides under a drift of 10% that meets both, and the true median of their ratio."""
    rng = np.random.default_rng([num_rounds, seed])
    slow, fast = NOISES[name]
    drift = np.linspace(1.0, 1.1, num_rounds)
    shape = TRIALS, num_rounds
    return TRUTH * drift * slow(rng, shape), drift * fast(rng, shape), TRUTH * true_ratio(name)


def by_round(times):
    return dict(enumerate(times.tolist(), start=1))


@pytest.mark.parametrize("num_rounds", [10, *(pytest.param(n, marks=pytest.mark.campaign) for n in (15, 30))])
@pytest.mark.parametrize("name", NOISES)
def test_paired_intervals_contain_the_truth_as_often_as_they_say(name, num_rounds):
    slow, fast, truth = trials(name, num_rounds)
    intervals = [paired_ratio(by_round(a), by_round(b)) for a, b in zip(slow, fast, strict=True)]
    assert 0.93 <= np.mean([i.low <= truth <= i.high for i in intervals]) <= 0.97


@pytest.mark.parametrize("num_rounds", [3, pytest.param(5, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", NOISES)
def test_few_rounds_are_wide_not_wrong(name, num_rounds):
    slow, fast, truth = trials(name, num_rounds)
    intervals = [paired_ratio(by_round(a), by_round(b)) for a, b in zip(slow, fast, strict=True)]
    assert np.mean([i.low <= truth <= i.high for i in intervals]) >= 0.93
    many = [paired_ratio(by_round(a), by_round(b)) for a, b in zip(*trials(name, 30)[:2], strict=True)]
    few_width, many_width = (np.median([i.high - i.low for i in some]) for some in (intervals, many))
    assert few_width > (4 if num_rounds == 3 else 2) * many_width


@pytest.mark.parametrize("confidence", [0.99, 0.998])
@pytest.mark.parametrize("num_rounds", [3, 6, 10, 30])
def test_the_gates_confidence_is_never_less_than_claimed(num_rounds, confidence):
    slow, fast, truth = trials("heavy", num_rounds, seed=1)
    intervals = [
        paired_ratio(by_round(a), by_round(b), confidence=confidence) for a, b in zip(slow, fast, strict=True)
    ]
    hits = sum(i.low <= truth <= i.high for i in intervals)
    assert scipy_stats.binomtest(hits, TRIALS, confidence, alternative="less").pvalue > 0.001
    assert all(np.isfinite([i.low, i.high]).all() for i in intervals)


@pytest.mark.parametrize("num_rounds", [6, 7, 10, 15, 30, 100])
def test_it_lies_within_scipys_exact_interval_and_is_that_where_one_exists(num_rounds):
    values = np.random.default_rng(num_rounds).lognormal(size=num_rounds)
    exact = scipy_stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    ours = median_interval(list(values))
    assert exact.low <= ours.low < ours.high <= exact.high
    place = int(np.searchsorted(np.sort(values), exact.low)) + 1
    attained = 1 - 2 * float(scipy_stats.binom.cdf(place - 1, num_rounds, 0.5))
    same = median_interval(list(values), confidence=attained)
    assert (same.low, same.high) == pytest.approx(
        (np.sort(values)[place - 1], np.sort(values)[-place]), rel=1e-9
    )


def test_two_normal_values_have_students_interval():
    exact = scipy_stats.ttest_1samp([-1.0, 3.0], 0.0).confidence_interval(0.95)
    ours = median_interval([-1.0, 3.0])
    assert (ours.low, ours.high) == pytest.approx((exact.low, exact.high))


@pytest.mark.parametrize("name", ["steady", "heavy", "bimodal"])
def test_interleaving_pays_under_drift(name):
    slow, fast, _ = trials(name, 20)
    gains = []
    for a, b in zip(slow[:100], fast[:100], strict=True):
        paired, unpaired = paired_ratio(by_round(a), by_round(b)), ratio_of_medians(a.tolist(), b.tolist())
        gains.append((unpaired.high - unpaired.low) / (paired.high - paired.low))
    assert np.median(gains) >= 2
