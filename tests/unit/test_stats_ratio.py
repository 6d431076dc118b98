"""The ratio of two independent samples' medians."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from ddp_bench.bench import stats
from ddp_bench.bench.stats import paired_ratio, ratio_of_medians

SHAPES = ("normal", "heavy", "bimodal", "signed")


def sample(rng: np.random.Generator, shape: str, size: int) -> np.ndarray:
    if shape == "normal":
        return 100 + 3 * rng.normal(size=size)
    if shape == "heavy":
        return 100 + 2 * rng.standard_t(3, size=size)
    if shape == "bimodal":
        return 100 + 0.5 * rng.normal(size=size) + 5 * (rng.random(size) < 0.25)
    return 10 + 6 * rng.normal(size=size)


@pytest.mark.parametrize("num_rounds", [3, 5, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_intervals_contain_the_truth(num_rounds: int, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 300)
    rng = np.random.default_rng(num_rounds)
    trials, hits = 200, 0
    for _ in range(trials):
        above, below = 1.1 * sample(rng, shape, num_rounds), sample(rng, shape, num_rounds)
        interval = ratio_of_medians(list(above), list(below))
        hits += interval.low <= 1.1 <= interval.high
    assert scipy_stats.binomtest(hits, trials, 0.95, alternative="less").pvalue > 0.01


def test_on_many_rounds_it_is_the_normal_theory_of_two_medians() -> None:
    rng = np.random.default_rng(4)
    interval = ratio_of_medians(list(rng.normal(50, 2, 400)), list(rng.normal(50, 3, 300)))
    error = math.sqrt(math.pi / 2) * math.hypot(2 / math.sqrt(400), 3 / math.sqrt(300)) / 50
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.3)


def test_few_rounds_are_wide_not_wrong() -> None:
    rng = np.random.default_rng(5)

    def width(size: int) -> float:
        interval = ratio_of_medians(list(rng.normal(100, 2, size)), list(rng.normal(100, 2, size)))
        return interval.high - interval.low

    assert np.median([width(3) for _ in range(20)]) > 3 * np.median([width(30) for _ in range(20)])


def test_it_agrees_with_the_sign_of_the_difference_where_values_may_be_negative() -> None:
    rng = np.random.default_rng(6)
    for shift in np.linspace(-20, 20, 21):
        below, above = [-0.5, *rng.normal(10, 3, 11)], list(rng.normal(10 + shift, 3, 12))
        interval = ratio_of_medians(above, below)
        if math.isfinite(interval.high):
            assert interval.low <= interval.estimate <= interval.high
        if interval.excludes(1.0):
            assert (interval.estimate > 1) == (np.median(above) > np.median(below))


def test_a_denominator_around_zero_still_bounds_a_clear_rise_from_below() -> None:
    around_zero = [-0.4, 0.3, -0.2, 0.5, 0.1, -0.1]
    risen = ratio_of_medians([50.0, 51, 49, 50.5, 49.5, 50.2], around_zero)
    assert risen.low > 1
    assert risen.high == math.inf
    unknown = ratio_of_medians(around_zero, around_zero)
    assert (unknown.low, unknown.high) == (-math.inf, math.inf)
    negative = ratio_of_medians([50.0, 51, 49], [-5.0, -4, -6])
    assert negative.estimate == math.inf
    assert negative.low > 1


def test_rates_cannot_become_negative() -> None:
    interval = ratio_of_medians([1.0, 100.0, 30.0], [2.0, 50.0, 9.0], confidence=0.999)
    assert 0 < interval.low < interval.estimate < interval.high


def test_one_value_gives_no_interval_and_none_gives_nothing() -> None:
    one = ratio_of_medians([3.0], [2.0])
    assert one.estimate == 1.5
    assert math.isnan(one.low)
    assert math.isnan(ratio_of_medians([], [1.0]).estimate)


def test_values_without_spread_give_the_ratio_itself() -> None:
    same = ratio_of_medians([3.0] * 3, [2.0] * 4)
    assert (same.low, same.estimate, same.high) == pytest.approx((1.5, 1.5, 1.5))


def test_pairing_beats_it_under_drift() -> None:
    rng = np.random.default_rng(2)
    drift = np.linspace(1.0, 1.1, 20)
    a = {i: float(d * (1 + 0.005 * rng.normal())) for i, d in enumerate(drift)}
    b = {i: float(d * (1 + 0.005 * rng.normal())) for i, d in enumerate(drift)}
    paired, unpaired = paired_ratio(a, b), ratio_of_medians(list(a.values()), list(b.values()))
    assert unpaired.high - unpaired.low > 2 * (paired.high - paired.low)


def variance_of_median(values: list[float]) -> float:
    """The bootstrap's, for few rounds: Hesterberg (2015), section 3.4.1."""
    found = scipy_stats.bootstrap(
        (values,), np.median, n_resamples=stats.RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    )
    return float(found.standard_error) ** 2 * len(values) / (len(values) - 1)


def students_t(variances: tuple[float, float], sizes: tuple[int, int], confidence: float) -> float:
    """At the degrees of freedom of Welch (1947)."""
    freedom = sum(variances) ** 2 / sum(v**2 / (n - 1) for v, n in zip(variances, sizes, strict=True))
    return float(scipy_stats.t.ppf((1 + confidence) / 2, freedom))


ABOVE = [10.0, 11.5, 9.2, 10.8, 12.1, 9.9]
BELOW = [5.0, 5.6, 4.7, 5.3]


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_positive_values_have_welchs_interval_of_the_logarithms_medians(confidence: float) -> None:
    variances = variance_of_median(list(np.log(ABOVE))), variance_of_median(list(np.log(BELOW)))
    half = students_t(variances, (6, 4), confidence) * math.sqrt(sum(variances))
    found = ratio_of_medians(ABOVE, BELOW, confidence=confidence)
    ratio = float(np.median(ABOVE) / np.median(BELOW))
    assert found.estimate == pytest.approx(ratio)
    assert (found.low, found.high) == pytest.approx((ratio * math.exp(-half), ratio * math.exp(half)))


@pytest.mark.parametrize("above", [[-1.0, *ABOVE], [-value for value in ABOVE]])
@pytest.mark.parametrize("below", [[0.0, *BELOW, 5.1], [-0.1, *BELOW, 5.1, 5.2]])
def test_fiellers_ends_are_t_standard_errors_from_zero(above: list[float], below: list[float]) -> None:
    """Fieller (1954): at both ends the numerator less r times the denominator is t standard errors from 0."""
    found = ratio_of_medians(above, below)
    top, bottom = float(np.median(above)), float(np.median(below))
    of_above, of_below = variance_of_median(above), variance_of_median(below)
    scaled = of_above, (top / bottom) ** 2 * of_below
    t = students_t(scaled, (len(above), len(below)), 0.95)
    assert found.low < found.estimate == pytest.approx(top / bottom)
    assert found.estimate < found.high < math.inf
    for end in (found.low, found.high):
        error = math.sqrt(of_above + end**2 * of_below)
        assert abs(top - end * bottom) == pytest.approx(t * error)


def test_an_open_interval_begins_where_fieller_has_its_one_end() -> None:
    above, below = [50.0, 51, 49, 50.5, 49.5, 50.2], [-0.4, 0.3, -0.2, 0.5, 0.1, -0.1, 0.2]
    found = ratio_of_medians(above, below)
    top, bottom = float(np.median(above)), float(np.median(below))
    of_above, of_below = variance_of_median(above), variance_of_median(below)
    t = students_t((of_above, (top / bottom) ** 2 * of_below), (6, 7), 0.95)
    assert found.estimate == pytest.approx(top / bottom)
    assert top - found.low * bottom == pytest.approx(t * math.sqrt(of_above + found.low**2 * of_below))
    assert found.high == math.inf


def test_one_round_of_either_side_leaves_the_ratio_without_an_interval() -> None:
    for above, below in (([3.0], [2.0, 2.0]), ([3.0, 3.0], [2.0])):
        found = ratio_of_medians(above, below)
        assert found.estimate == 1.5
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    for above, below in (([], [1.0, 2.0]), ([1.0, 2.0], [])):
        assert math.isnan(ratio_of_medians(above, below).estimate)


def test_nothing_over_nothing_is_unknown_and_something_over_nothing_infinite() -> None:
    assert math.isnan(ratio_of_medians([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]).estimate)
    assert math.isnan(ratio_of_medians([-1.0, -1.0, -2.0], [0.0, 0.0, -1.0]).estimate)
    assert ratio_of_medians([1.0, 1.0, 1.0], [0.0, 0.0, -1.0]).estimate == math.inf


def test_ratios_beyond_every_float_have_bounds_all_the_same() -> None:
    found = ratio_of_medians([1e-300, 1.0, 1e300], [1e-300, 1.0, 1e300])
    assert 0 <= found.low < 1 < found.high
