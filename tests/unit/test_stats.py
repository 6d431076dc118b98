"""Intervals of medians, pairs and ratios: closed forms, and as often right as they say."""

import functools
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from selection import in_campaign

from ddp_bench.bench.stats import two_runs
from ddp_bench.bench.stats.interval import Interval, median_interval, median_intervals, median_of_ratios
from ddp_bench.bench.stats.two_runs import difference_of_medians, ratio_of_medians


def test_no_value_and_one_value_have_no_interval():
    assert math.isnan(median_interval([]).estimate)
    assert math.isnan(median_interval([1.0, math.nan, 2.0]).estimate), "a missing round makes all unknown"
    one = median_interval([3.0])
    assert one.estimate == 3.0
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert not one.excludes(1.0)


def sample(rng, shape, size):
    if shape == "normal":
        return 100 + 3 * rng.normal(size=size)
    if shape == "heavy":
        return 100 * np.exp(0.02 * rng.standard_t(3, size=size))
    return 100 + 0.5 * rng.normal(size=size) + 5 * (rng.random(size) < 0.25)


def check_coverage(make, truth, *, trials, least):
    """The intervals that `make` makes hold the truth as often as they say, but for chance."""
    hits = 0
    for _ in range(trials):
        interval = make()
        assert interval.low <= interval.estimate <= interval.high
        hits += interval.low <= truth <= interval.high
    assert scipy_stats.binomtest(hits, trials, least, alternative="less").pvalue > 0.01


@pytest.mark.parametrize("num_rounds", [3, 10, *in_campaign(5, 30)])
@pytest.mark.parametrize("shape", ["normal", "heavy", "bimodal"])
def test_intervals_contain_the_truth(num_rounds, shape):
    rng = np.random.default_rng(num_rounds)
    truth = float(np.median(sample(rng, shape, 1_000_000)))
    intervals = iter(median_intervals(sample(rng, shape, (400, num_rounds)).T))
    check_coverage(lambda: next(intervals), truth, trials=400, least=0.94)


def test_agrees_with_the_normal_theory_of_the_median_on_many_rounds():
    values = np.random.default_rng(0).normal(50, 2, size=400)
    interval = median_interval(list(values))
    standard_error = math.sqrt(math.pi / 2) * 2 / math.sqrt(400)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * standard_error, rel=0.3)


def test_estimates_lie_in_their_intervals():
    rng = np.random.default_rng(5)
    for size in range(2, 12):
        for offset in (0.0, 10.0):
            interval = median_interval(list(offset + rng.normal(size=size)))
            assert interval.low <= interval.estimate <= interval.high


def test_only_common_rounds_are_paired():
    assert median_of_ratios({1: 2.0, 2: 9.0}, {1: 1.0, 3: 5.0}).estimate == 2.0


@pytest.mark.parametrize(
    ("values", "onto", "back"),
    [
        *((rates, np.log, math.exp) for rates in ([2.0, 8.0], [0.5, 0.6], [1.0, 100.0])),
        ([-1.0, 3.0], np.array, float),
    ],
)
def test_two_values_have_students_interval_and_rates_that_of_their_logarithms(values, onto, back):
    exact = scipy_stats.ttest_1samp(onto(values), 0.0).confidence_interval(0.95)
    ours = median_interval(values)
    assert (ours.low, ours.high) == pytest.approx((back(exact.low), back(exact.high)))


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


def test_an_interval_excludes_what_lies_outside_and_half_of_it_is_a_share_of_the_estimate():
    assert Interval(4.0, 3.0, 7.0).half_width == 0.5
    assert math.isnan(Interval(0.0, -1.0, 1.0).half_width)
    found = Interval(2.0, 1.0, 3.0)
    assert found.excludes(0.9)
    assert found.excludes(3.1)
    assert not any(found.excludes(value) for value in (1.0, 2.0, 3.0))


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


@pytest.mark.parametrize("num_rounds", [5, *in_campaign(3, 20)])
@pytest.mark.parametrize("shape", ["normal", "heavy", "bimodal"])
def test_intervals_of_ratios_contain_the_truth(num_rounds, shape, monkeypatch):
    monkeypatch.setattr(two_runs, "RESAMPLES", 300)
    rng = np.random.default_rng(num_rounds)

    def ratio():
        above, below = 1.1 * sample(rng, shape, num_rounds), sample(rng, shape, num_rounds)
        return ratio_of_medians(list(above), list(below))

    check_coverage(ratio, 1.1, trials=200, least=0.95)


def test_on_many_rounds_it_is_the_normal_theory_of_two_medians():
    rng = np.random.default_rng(4)
    interval = ratio_of_medians(list(rng.normal(50, 2, 400)), list(rng.normal(50, 3, 300)))
    error = math.sqrt(math.pi / 2) * math.hypot(2 / math.sqrt(400), 3 / math.sqrt(300)) / 50
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.3)


@pytest.mark.parametrize("num_rounds", [5, *in_campaign(3, 20)])
def test_differences_contain_the_truth_of_figures_around_zero(num_rounds, monkeypatch):
    monkeypatch.setattr(two_runs, "RESAMPLES", 300)
    rng = np.random.default_rng(num_rounds)

    def difference():
        return difference_of_medians(1 + 6 * rng.normal(size=num_rounds), 6 * rng.normal(size=num_rounds))

    check_coverage(difference, 1, trials=200, least=0.95)


def test_values_without_spread_give_the_ratio_itself():
    same = ratio_of_medians([3.0] * 3, [2.0] * 4)
    assert (same.low, same.estimate, same.high) == pytest.approx((1.5, 1.5, 1.5))


def variance_of_median(values):
    """The bootstrap's, for few rounds: Hesterberg (2015), section 3.4.1."""
    found = scipy_stats.bootstrap(
        (values,),
        np.median,
        n_resamples=two_runs.RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
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
    for above, below in (([3.0], [2.0]), ([3.0], [2.0, 2.0]), ([3.0, 3.0], [2.0])):
        found = ratio_of_medians(above, below)
        assert found.estimate == 1.5
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    for above, below in (([], [1.0, 2.0]), ([1.0, 2.0], [])):
        assert math.isnan(ratio_of_medians(above, below).estimate)


def test_ratios_beyond_every_float_have_bounds_all_the_same():
    found = ratio_of_medians([1e-300, 1.0, 1e300], [1e-300, 1.0, 1e300])
    assert 0 <= found.low < 1 < found.high


TRIALS = 2000
TRUTH = 1.1


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


def ratios(slow, fast, **more):
    """Of each trial by itself, as `median_of_ratios` forms them, all at once."""
    return median_intervals((slow / fast).T, **more)


@pytest.mark.parametrize("num_rounds", [10, *in_campaign(15, 30)])
@pytest.mark.parametrize("name", NOISES)
def test_paired_intervals_contain_the_truth_as_often_as_they_say(name, num_rounds):
    slow, fast, truth = trials(name, num_rounds)
    intervals = ratios(slow, fast)
    assert 0.93 <= np.mean([i.low <= truth <= i.high for i in intervals]) <= 0.97


@pytest.mark.parametrize("num_rounds", [3, *in_campaign(5)])
@pytest.mark.parametrize("name", NOISES)
def test_few_rounds_are_wide_not_wrong(name, num_rounds):
    slow, fast, truth = trials(name, num_rounds)
    intervals = ratios(slow, fast)
    assert np.mean([i.low <= truth <= i.high for i in intervals]) >= 0.93
    many = ratios(*trials(name, 30)[:2])
    few_width, many_width = (np.median([i.high - i.low for i in some]) for some in (intervals, many))
    assert few_width > (4 if num_rounds == 3 else 2) * many_width


@pytest.mark.parametrize("confidence", [0.99, 0.998])
@pytest.mark.parametrize("num_rounds", [6, 30, *in_campaign(3, 10)])
def test_the_gates_confidence_is_never_less_than_claimed(num_rounds, confidence):
    slow, fast, truth = trials("heavy", num_rounds, seed=1)
    intervals = ratios(slow, fast, confidence=confidence)
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


@pytest.mark.parametrize("name", ["heavy", *in_campaign("steady", "bimodal")])
def test_interleaving_pays_under_drift(name):
    slow, fast, _ = trials(name, 20)
    gains = []
    for a, b in zip(slow[:100], fast[:100], strict=True):
        paired, unpaired = (
            median_of_ratios(by_round(a), by_round(b)),
            ratio_of_medians(a.tolist(), b.tolist()),
        )
        gains.append((unpaired.high - unpaired.low) / (paired.high - paired.low))
    assert np.median(gains) >= 2
