"""Intervals of medians, pairs and ratios: closed forms, and as often right as they say."""

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
from scipy import stats as scipy_stats

from ddp_bench.bench.stats.fit import estimate_difference
from ddp_bench.bench.stats.interval import (
    Estimate,
    Interval,
    average_launches,
    compute_median_interval,
    compute_median_intervals,
    compute_median_ratio,
)


def test_no_value_and_one_value_have_no_interval():
    assert math.isnan(compute_median_interval([]).estimate)
    assert math.isnan(compute_median_interval([1.0, math.nan, 2.0]).estimate), (
        "a missing round makes all unknown"
    )
    one = compute_median_interval([3.0])
    assert one.estimate == 3.0
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert not one.is_clear_of(1.0)


def test_only_common_rounds_are_paired():
    assert compute_median_ratio({1: 2.0, 2: 9.0}, {1: 1.0, 3: 5.0}).estimate == 2.0


def test_rounds_too_few_for_the_confidence_have_no_interval():
    """Oracle: the range of n values encloses the median with 1 - 2 / 2^n."""
    for size, confidence in ((5, 0.95), (6, 0.97), (7, 0.99)):
        known = 1 - 2 / 2**size >= confidence
        assert (
            math.isnan(compute_median_interval([*map(float, range(size))], confidence=confidence).low)
            != known
        )
    assert not math.isnan(compute_median_interval([*map(float, range(6))]).low)


def test_an_interval_excludes_what_lies_outside_and_half_of_it_is_a_share_of_the_estimate():
    assert Interval(4.0, 3.0, 7.0).half_width == 0.5
    assert math.isnan(Interval(0.0, -1.0, 1.0).half_width)
    found = Interval(2.0, 1.0, 3.0)
    assert found.is_clear_of(0.9)
    assert found.is_clear_of(3.1)
    assert not any(found.is_clear_of(value) for value in (1.0, 2.0, 3.0))


@pytest.mark.parametrize("num_rounds", [1, 2, 5, 6, 30])
def test_columns_have_the_intervals_that_they_have_alone(num_rounds):
    rng = np.random.default_rng(num_rounds)
    samples = rng.lognormal(0, 1, (num_rounds, 4)) * [1.0, 1e-9, 1e200, 1.0]
    samples[:, 1] -= np.median(samples[:, 1])
    samples[0, 3] = np.nan
    together = compute_median_intervals(samples, confidence=0.99)
    alone = [compute_median_interval(column, confidence=0.99) for column in samples.T]
    assert repr(together) == repr(alone)
    assert [math.isnan(found.low) for found in together] == [num_rounds < 8] * 3 + [True]


def test_the_difference_of_two_estimates_is_welchs():
    """Oracle: scipy's test of two samples of unequal variances."""
    rng = np.random.default_rng(3)
    above, below = rng.normal(5, 1, 12), rng.normal(3, 4, 7)
    one, other = (Estimate(float(np.mean(x)), float(scipy_stats.sem(x)), len(x) - 1) for x in (above, below))
    wanted = scipy_stats.ttest_ind(above, below, equal_var=False).confidence_interval(0.98)
    found = one.subtract(other).compute_interval(0.98)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))


def test_pairs_have_students_interval_where_none_stands_out():
    values = 0.3 + 0.01 * np.resize([1.0, -1.0, 0.5, -0.5, 0.2], 40)
    wanted = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = estimate_difference(values).compute_interval()
    assert found.estimate == pytest.approx(values.mean(), rel=1e-3)
    assert found.high - found.low == pytest.approx(wanted.high - wanted.low, rel=0.2)
    wild = values.copy()
    wild[7] += 3
    assert estimate_difference(wild).value == pytest.approx(values.mean(), abs=0.01), (
        "and the others outvote one"
    )


@pytest.fixture(scope="module")
def launches():
    """Of 300 trials by eight launches: how far each lies from the others, and what its ten rounds tell."""
    rng = np.random.default_rng(8)
    apart, rounds = rng.normal(size=(300, 8)), 0.02 * rng.normal(size=(300, 8, 10))
    return apart, [[estimate_difference(one) for one in trial] for trial in rounds], rounds


@pytest.mark.parametrize("part", [0.1, 0.5, 2.0])
def test_launches_tell_what_another_launch_adds(launches, part):
    """Launches lie apart by `part` times what rounds do; one sample of them has Student's t."""
    apart, each, rounds = launches
    moved = 0.02 * part * apart
    each = [
        [replace(one, value=one.value + by) for one, by in zip(*trial, strict=True)]
        for trial in zip(each, moved, strict=True)
    ]
    again = estimate_difference(rounds[0, 0] + moved[0, 0])
    assert astuple(again) == pytest.approx(astuple(each[0][0])), "a launch that lies apart is moved, no more"
    for num_launches in (2, 3, 4, 8):
        found = [average_launches(one[:num_launches]).compute_interval() for one in each]
        held = sum(not one.is_clear_of(0.0) for one in found)
        assert scipy_stats.binomtest(held, len(each), 0.94, alternative="less").pvalue > 0.01, num_launches


def test_one_launch_is_known_by_its_rounds():
    one = estimate_difference([0.1, 0.12, 0.09, 0.11, 0.1, 0.08])
    assert average_launches([one]) == one


@pytest.mark.parametrize("num_rounds", [6, 7, 10, 15, 30, 100])
def test_it_lies_within_scipys_exact_interval_and_is_that_where_one_exists(num_rounds):
    values = np.random.default_rng(num_rounds).lognormal(size=num_rounds)
    exact = scipy_stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    ours = compute_median_interval(list(values))
    assert exact.low <= ours.low < ours.high <= exact.high
    place = int(np.searchsorted(np.sort(values), exact.low)) + 1
    attained = 1 - 2 * float(scipy_stats.binom.cdf(place - 1, num_rounds, 0.5))
    same = compute_median_interval(list(values), confidence=attained)
    assert (same.low, same.high) == pytest.approx(
        (np.sort(values)[place - 1], np.sort(values)[-place]), rel=1e-9
    )
