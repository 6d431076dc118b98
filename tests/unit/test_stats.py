import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from ddp_bench.bench.stats import Interval, median_interval, median_intervals, paired_ratio


def test_no_value_and_one_value_have_no_interval():
    assert math.isnan(median_interval([]).estimate)
    one = median_interval([3.0])
    assert one.estimate == 3.0
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert not one.excludes(1.0)


@pytest.mark.parametrize("num_rounds", [3, 5, 10, 30])
@pytest.mark.parametrize("shape", ["normal", "heavy", "bimodal"])
def test_intervals_contain_the_truth(num_rounds, shape):
    rng = np.random.default_rng(num_rounds)

    def sample(size):
        if shape == "normal":
            return 100 + rng.normal(size=size)
        if shape == "heavy":
            return 100 + rng.standard_t(3, size=size)
        return 100 + 0.3 * rng.normal(size=size) + 3 * (rng.random(size) < 0.25)

    truth = float(np.median(sample(1_000_000)))
    trials = 400
    hits = 0
    for _ in range(trials):
        interval = median_interval(list(sample(num_rounds)))
        hits += interval.low <= truth <= interval.high
    assert scipy_stats.binomtest(hits, trials, 0.94, alternative="less").pvalue > 0.01


def test_agrees_with_the_normal_theory_of_the_median_on_many_rounds():
    values = np.random.default_rng(0).normal(50, 2, size=400)
    interval = median_interval(list(values))
    standard_error = math.sqrt(math.pi / 2) * 2 / math.sqrt(400)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * standard_error, rel=0.3)


def test_rates_stay_positive_with_two_wild_rounds():
    interval = median_interval([1.0, 100.0])
    assert 0 < interval.low < interval.estimate < interval.high


def test_estimates_lie_in_their_intervals():
    rng = np.random.default_rng(5)
    for size in range(2, 12):
        for offset in (0.0, 10.0):
            interval = median_interval(list(offset + rng.normal(size=size)))
            assert interval.low <= interval.estimate <= interval.high


def test_pairing_cancels_drift():
    rng = np.random.default_rng(2)
    drift = np.linspace(1.0, 2.0, 20)
    a = {i: float(1.1 * d * (1 + 0.001 * rng.normal())) for i, d in enumerate(drift)}
    b = {i: float(d * (1 + 0.001 * rng.normal())) for i, d in enumerate(drift)}
    paired = paired_ratio(a, b)
    assert paired.low < 1.1 < paired.high
    assert paired.high - paired.low < 0.005
    unpaired = median_interval(list(a.values()))
    assert unpaired.half_width > 20 * paired.half_width


def test_only_common_rounds_are_paired():
    assert paired_ratio({1: 2.0, 2: 9.0}, {1: 1.0, 3: 5.0}).estimate == 2.0


def test_more_confidence_is_wider():
    values = [1.0, 1.1, 0.9, 1.05, 1.2, 0.95]
    narrow, wide = median_interval(values), median_interval(values, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize("values", [[2.0, 8.0], [0.5, 0.6]])
def test_two_rates_have_students_interval_of_their_logarithms(values):
    exact = scipy_stats.ttest_1samp(np.log(values), 0.0).confidence_interval(0.95)
    ours = median_interval(values)
    assert (ours.low, ours.high) == pytest.approx((math.exp(exact.low), math.exp(exact.high)))


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("values", [[4.0, 5, 7], [4.0, 5, 7, 9], [90.0, 100, 101, 102, 130]])
def test_few_rounds_widen_their_range_as_students_t_grows(values, confidence):
    """Of what their range covers (1 - 2 / 2^n) to what is wanted, on a log scale about its middle."""
    size = len(values)
    covered = 1 - 2 * 0.5**size
    ours = median_interval(values, confidence=confidence)
    if covered >= confidence:
        assert values[0] <= ours.low <= ours.high <= values[-1]
        return
    student = scipy_stats.t(size - 1)
    widening = student.ppf((1 + confidence) / 2) / student.ppf((1 + covered) / 2)
    middle, half = math.log(values[0] * values[-1]) / 2, math.log(values[-1] / values[0]) / 2
    expected = math.exp(middle - widening * half), math.exp(middle + widening * half)
    assert (ours.low, ours.high) == pytest.approx(expected)
    shifted = median_interval([value - values[0] for value in values], confidence=confidence)
    width = (values[-1] - values[0]) * widening
    assert shifted.high - shifted.low == pytest.approx(width)
    assert shifted.high + shifted.low == pytest.approx(values[-1] - values[0])


def test_rates_of_any_size_have_a_finite_interval():
    found = median_interval([1e-150, 1.0, 1e150])
    assert 0 < found.low < 1e-100
    assert 1e100 < found.high < math.inf


def test_half_a_width_is_a_share_of_the_estimate():
    assert Interval(4.0, 3.0, 7.0).half_width == 0.5
    assert math.isnan(Interval(0.0, -1.0, 1.0).half_width)


def test_an_interval_excludes_what_lies_outside_and_not_its_own_ends():
    found = Interval(2.0, 1.0, 3.0)
    assert found.excludes(0.9)
    assert found.excludes(3.1)
    assert not any(found.excludes(value) for value in (1.0, 2.0, 3.0))


def test_a_missing_round_makes_the_whole_unknown():
    assert math.isnan(median_interval([1.0, math.nan, 2.0]).estimate)


@pytest.mark.parametrize("num_rounds", [1, 2, 5, 6, 30])
def test_columns_have_the_intervals_that_they_have_alone(num_rounds):
    rng = np.random.default_rng(num_rounds)
    samples = rng.lognormal(0, 1, (num_rounds, 4)) * [1.0, 1e-9, 1e200, 1.0]
    samples[:, 1] -= np.median(samples[:, 1])
    samples[0, 3] = np.nan
    together = median_intervals(samples, confidence=0.99)
    alone = [median_interval(column, confidence=0.99) for column in samples.T]
    assert repr(together) == repr(alone)
    assert [math.isnan(found.low) for found in together] == [num_rounds == 1] * 3 + [True]
