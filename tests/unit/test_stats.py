import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from bench.stats import median_interval, paired_ratio


def test_no_value_and_one_value_have_no_interval() -> None:
    assert math.isnan(median_interval([]).estimate)
    one = median_interval([3.0])
    assert one.estimate == 3.0
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert not one.excludes(1.0)


@pytest.mark.parametrize("num_rounds", [3, 5, 10, 30])
@pytest.mark.parametrize("shape", ["normal", "heavy", "bimodal"])
def test_intervals_contain_the_truth(num_rounds: int, shape: str) -> None:
    rng = np.random.default_rng(num_rounds)

    def sample(size: int) -> np.ndarray:
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


def test_agrees_with_the_normal_theory_of_the_median_on_many_rounds() -> None:
    values = np.random.default_rng(0).normal(50, 2, size=400)
    interval = median_interval(list(values))
    standard_error = math.sqrt(math.pi / 2) * 2 / math.sqrt(400)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * standard_error, rel=0.3)


def test_rates_stay_positive_with_two_wild_rounds() -> None:
    interval = median_interval([1.0, 100.0])
    assert 0 < interval.low < interval.estimate < interval.high


def test_estimates_lie_in_their_intervals() -> None:
    rng = np.random.default_rng(5)
    for size in range(2, 12):
        for offset in (0.0, 10.0):
            interval = median_interval(list(offset + rng.normal(size=size)))
            assert interval.low <= interval.estimate <= interval.high


def test_pairing_cancels_drift() -> None:
    rng = np.random.default_rng(2)
    drift = np.linspace(1.0, 2.0, 20)
    a = {i: float(1.1 * d * (1 + 0.001 * rng.normal())) for i, d in enumerate(drift)}
    b = {i: float(d * (1 + 0.001 * rng.normal())) for i, d in enumerate(drift)}
    paired = paired_ratio(a, b)
    assert paired.low < 1.1 < paired.high
    assert paired.high - paired.low < 0.005
    unpaired = median_interval(list(a.values()))
    assert unpaired.half_width > 20 * paired.half_width


def test_only_common_rounds_are_paired() -> None:
    assert paired_ratio({1: 2.0, 2: 9.0}, {1: 1.0, 3: 5.0}).estimate == 2.0


def test_more_confidence_is_wider() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 1.2, 0.95]
    narrow, wide = median_interval(values), median_interval(values, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
