"""Ratio and difference of two independent samples' medians."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from ddp_bench.bench import stats
from ddp_bench.bench.stats import difference_of_medians, paired_ratio, ratio_of_medians

SHAPES = ("normal", "heavy", "bimodal")


def sample(rng, shape, size):
    if shape == "normal":
        return 100 + 3 * rng.normal(size=size)
    if shape == "heavy":
        return 100 * np.exp(0.02 * rng.standard_t(3, size=size))
    return 100 + 0.5 * rng.normal(size=size) + 5 * (rng.random(size) < 0.25)


@pytest.mark.parametrize("num_rounds", [3, 5, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_intervals_contain_the_truth(num_rounds, shape, monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 300)
    rng = np.random.default_rng(num_rounds)
    trials, hits = 200, 0
    for _ in range(trials):
        above, below = 1.1 * sample(rng, shape, num_rounds), sample(rng, shape, num_rounds)
        interval = ratio_of_medians(list(above), list(below))
        hits += interval.low <= 1.1 <= interval.high
    assert scipy_stats.binomtest(hits, trials, 0.95, alternative="less").pvalue > 0.01


def test_on_many_rounds_it_is_the_normal_theory_of_two_medians():
    rng = np.random.default_rng(4)
    interval = ratio_of_medians(list(rng.normal(50, 2, 400)), list(rng.normal(50, 3, 300)))
    error = math.sqrt(math.pi / 2) * math.hypot(2 / math.sqrt(400), 3 / math.sqrt(300)) / 50
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.3)


def test_few_rounds_are_wide_not_wrong():
    rng = np.random.default_rng(5)

    def width(size):
        interval = ratio_of_medians(list(rng.normal(100, 2, size)), list(rng.normal(100, 2, size)))
        return interval.high - interval.low

    assert np.median([width(3) for _ in range(20)]) > 3 * np.median([width(30) for _ in range(20)])


@pytest.mark.parametrize("num_rounds", [3, 5, 20])
def test_differences_contain_the_truth_of_figures_around_zero(num_rounds, monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 300)
    rng = np.random.default_rng(num_rounds)
    trials, hits = 200, 0
    for _ in range(trials):
        first, second = 1 + 6 * rng.normal(size=num_rounds), 6 * rng.normal(size=num_rounds)
        interval = difference_of_medians(first, second)
        assert interval.low <= interval.estimate <= interval.high
        hits += interval.low <= 1 <= interval.high
    assert scipy_stats.binomtest(hits, trials, 0.95, alternative="less").pvalue > 0.01


def test_rates_cannot_become_negative():
    interval = ratio_of_medians([1.0, 100.0, 30.0], [2.0, 50.0, 9.0], confidence=0.999)
    assert 0 < interval.low < interval.estimate < interval.high


def test_one_value_gives_no_interval_and_none_gives_nothing():
    one = ratio_of_medians([3.0], [2.0])
    assert one.estimate == 1.5
    assert math.isnan(one.low)
    assert math.isnan(ratio_of_medians([], [1.0]).estimate)


def test_values_without_spread_give_the_ratio_itself():
    same = ratio_of_medians([3.0] * 3, [2.0] * 4)
    assert (same.low, same.estimate, same.high) == pytest.approx((1.5, 1.5, 1.5))


def test_pairing_beats_it_under_drift():
    rng = np.random.default_rng(2)
    drift = np.linspace(1.0, 1.1, 20)
    a = {i: float(d * (1 + 0.005 * rng.normal())) for i, d in enumerate(drift)}
    b = {i: float(d * (1 + 0.005 * rng.normal())) for i, d in enumerate(drift)}
    paired, unpaired = paired_ratio(a, b), ratio_of_medians(list(a.values()), list(b.values()))
    assert unpaired.high - unpaired.low > 2 * (paired.high - paired.low)


def variance_of_median(values):
    """The bootstrap's, for few rounds: Hesterberg (2015), section 3.4.1."""
    found = scipy_stats.bootstrap(
        (values,), np.median, n_resamples=stats.RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    )
    return float(found.standard_error) ** 2 * len(values) / (len(values) - 1)


def students_t(variances, sizes, confidence):
    """At the degrees of freedom of Welch (1947)."""
    freedom = sum(variances) ** 2 / sum(v**2 / (n - 1) for v, n in zip(variances, sizes, strict=True))
    return float(scipy_stats.t.ppf((1 + confidence) / 2, freedom))


ABOVE = [10.0, 11.5, 9.2, 10.8, 12.1, 9.9]
BELOW = [5.0, 5.6, 4.7, 5.3]


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_positive_values_have_welchs_interval_of_the_logarithms_medians(confidence):
    variances = variance_of_median(list(np.log(ABOVE))), variance_of_median(list(np.log(BELOW)))
    half = students_t(variances, (6, 4), confidence) * math.sqrt(sum(variances))
    found = ratio_of_medians(ABOVE, BELOW, confidence=confidence)
    ratio = float(np.median(ABOVE) / np.median(BELOW))
    assert found.estimate == pytest.approx(ratio)
    assert (found.low, found.high) == pytest.approx((ratio * math.exp(-half), ratio * math.exp(half)))


def test_one_round_of_either_side_leaves_the_ratio_without_an_interval():
    for above, below in (([3.0], [2.0, 2.0]), ([3.0, 3.0], [2.0])):
        found = ratio_of_medians(above, below)
        assert found.estimate == 1.5
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    for above, below in (([], [1.0, 2.0]), ([1.0, 2.0], [])):
        assert math.isnan(ratio_of_medians(above, below).estimate)


def test_ratios_beyond_every_float_have_bounds_all_the_same():
    found = ratio_of_medians([1e-300, 1.0, 1e300], [1e-300, 1.0, 1e300])
    assert 0 <= found.low < 1 < found.high
