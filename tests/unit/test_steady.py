"""The columns of `sustained` blocks: arithmetic by hand, and coverage of the intervals by simulation."""

import math

import numpy as np
import pytest
import scipy

from ddp_bench.bench.estimate import SeriesNoise, fit
from ddp_bench.bench.results.round_times import CaseTimes
from ddp_bench.bench.results.typical import steady


def trained(step_ms, *, steps=10):
    """A case on two ranks whose sustained blocks took so long per step; the second rank is the longer one."""
    times = CaseTimes()
    for number, ms in enumerate(step_ms, 1):
        rows = [
            {
                "phase": "sustained",
                "round": number,
                "rank": rank,
                "num_steps": steps,
                "block_ms": steps * ms * share,
            }
            for rank, share in enumerate((0.5, 1.0))
        ]
        times.add(rows)
    return times


def test_the_last_half_against_the_first_tenth():
    """20 blocks: two at 8 ms, eight at 9 ms, ten at 10 ms, so the last half of the time is 10 ms alone."""
    found = steady(trained([8.0] * 2 + [9.0] * 8 + [10.0] * 10), units=50)
    assert found["steady_images_per_s"].estimate == pytest.approx(5000)
    assert found["steady_change_pct"].estimate == pytest.approx(-20)
    assert found["steady_change_pct"].low == pytest.approx(-20), "ten blocks alike leave no doubt"


def test_faster_is_above_zero():
    found = steady(trained([10.0] * 10 + [8.0] * 13), units=8)
    assert found["steady_change_pct"].estimate == pytest.approx(25)


def test_parts_are_of_the_time_not_of_the_blocks():
    """One block of 100 steps takes half of the time of all: the last half are the ten short ones."""
    times = trained([10.0] * 10)
    times.sustained_ms = {0: 1000.0, **dict.fromkeys(range(1, 11), 100.0)}
    times.step_ms["sustained"] = {0: 20.0, **dict.fromkeys(range(1, 11), 10.0)}
    found = steady(times, units=1)
    assert found["steady_images_per_s"].estimate == pytest.approx(100)
    assert found["steady_change_pct"].estimate == pytest.approx(100)


def test_a_mean_of_logs():
    """Half of the blocks 8 ms, half 12.5 ms: as many steps of both take 10 ms in the geometric mean."""
    found = steady(trained([10.0] * 10 + [8.0, 12.5] * 4), units=1)
    assert found["steady_images_per_s"].estimate == pytest.approx(100)


def test_what_is_not_there_is_missing():
    assert steady(CaseTimes(), units=1) == {}
    assert steady(trained([10.0]), units=1) == {}, "one block has no last half"
    few = steady(trained([10.0] * 8), units=1)
    assert few["steady_images_per_s"].estimate == pytest.approx(100)
    assert all(math.isnan(end) for found in few.values() for end in (found.low, found.high))


def test_noise_of_a_series_is_that_of_a_fit_of_one_column():
    values = np.cumsum(np.random.default_rng(1).normal(size=30)) / 50
    mean = float(values.mean())
    (wanted,) = fit(np.exp(values)[:, None]).intervals([lambda log_ms: float(log_ms[0])])
    found = SeriesNoise.of(values).interval(mean, 30)
    assert (found.low, found.estimate, found.high) == pytest.approx(
        (wanted.low, wanted.estimate, wanted.high), rel=1e-6
    )


def test_the_variance_of_a_mean_is_that_of_the_series_matrix():
    """Var(mean) = sum over i, j of rho^|i - j| / n^2, and of a difference both."""
    values = list(np.random.default_rng(2).normal(size=12))
    noise = SeriesNoise.of(values)

    def of_mean(size):
        return float(scipy.linalg.toeplitz(noise.correlation ** np.arange(size)).sum()) / size**2

    half = noise.interval(3.0, 2, 12).high - 3.0
    t = scipy.stats.t.ppf(0.975, noise.freedom)
    assert half == pytest.approx(t * math.sqrt(noise.variance * (of_mean(2) + of_mean(12))))


def ar1(rng, size, correlation):
    values = rng.normal(size=size)
    for i in range(1, size):
        values[i] = correlation * values[i - 1] + math.sqrt(1 - correlation**2) * values[i]
    return values


def covers(interval, value):
    return interval.low <= value <= interval.high


@pytest.mark.parametrize(
    ("correlation", "least"), [(0.0, 0.95), (0.3, 0.95), (0.5, 0.93), (0.8, 0.80)], ids=str
)
def test_intervals_cover_under_correlated_noise(correlation, least):
    """30 blocks of 1% noise, as --sustain 5m has; after the first tenth 3% slower, in the last half 5%."""
    rng = np.random.default_rng(7)
    level = 10 * np.array([1.0] * 3 + [1.03] * 12 + [1.05] * 15)
    hits = np.zeros(2)
    trials = 300
    for _ in range(trials):
        found = steady(trained(level * np.exp(0.01 * ar1(rng, 30, correlation))), units=1)
        hits += [
            covers(found["steady_images_per_s"], 1000 / 10.5),
            covers(found["steady_change_pct"], 100 * (1 / 1.05 - 1)),
        ]
    assert (hits / trials >= least - 0.03).all(), hits / trials
