"""The fit against closed forms, its intervals against Student's t and against simulated noise."""

import math

import numpy as np
import pytest
from scipy import stats
from selection import in_campaign

from ddp_bench.bench.stats import fit as fitting
from ddp_bench.bench.stats.fit import MIN_ROUNDS, fit_two_way

LOG_MS = np.log([100.0, 80.0, 130.0, 55.0])


def table(num_rounds, num_columns=4, *, seed=0, sd=0.05):
    """Step times in ms with noise of rounds and of visits."""
    rng = np.random.default_rng(seed)
    log_ms = np.resize(LOG_MS, num_columns) + sd * rng.standard_normal((num_rounds, num_columns))
    return np.exp(log_ms + 0.03 * rng.standard_normal((num_rounds, 1)))


def difference(first, second):
    return (lambda log_ms: log_ms[0] - log_ms[1]), first, second


@pytest.fixture
def _uncorrelated(monkeypatch):
    """As if rounds were known to be independent."""

    def none(*_, **__):
        return 0.0

    monkeypatch.setattr(fitting, "_estimate_correlation", none)


def test_without_noise_every_column_is_found_exactly():
    rounds = np.linspace(0, 0.4, 12)
    found = fit_two_way(np.exp(LOG_MS + rounds[:, None]))
    assert found.log_ms == pytest.approx(LOG_MS + rounds.mean(), abs=1e-9)
    assert found.round_influence * 12 == pytest.approx(rounds - rounds.mean(), abs=1e-9)


def test_with_a_huge_tuning_it_is_the_two_way_mean(monkeypatch):
    monkeypatch.setattr(fitting, "_TUNING", 1e6)
    step_ms = table(15)
    x = np.log(step_ms)
    found = fit_two_way(step_ms)
    assert found.log_ms - found.log_ms[0] == pytest.approx(x.mean(axis=0) - x[:, 0].mean(), abs=0.004)
    monkeypatch.setattr(fitting, "_start", lambda x, seen: (*_start(x, seen)[:2], np.ones(x.shape[1])))
    found = fit_two_way(step_ms)
    assert found.log_ms == pytest.approx(x.mean(axis=0), abs=1e-8)
    by_hand = (x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + x.mean()) / len(x)
    assert found.case_influence == pytest.approx(by_hand, abs=1e-8)
    assert found.round_influence == pytest.approx((x.mean(axis=1) - x.mean()) / len(x), abs=1e-8)


_start = fitting._start


def intervals(found, functions, *, confidence=0.95):
    return [found.estimate(*one).compute_interval(confidence) for one in functions]


def test_an_outlier_moves_it_less_than_the_noise_does():
    clean = table(20)
    with_outlier = clean.copy()
    with_outlier[7, 2] *= 10
    plain = [np.log(x).mean(axis=0)[2] for x in (clean, with_outlier)]
    robust = [fit_two_way(x).log_ms[2] for x in (clean, with_outlier)]
    assert plain[1] - plain[0] == pytest.approx(math.log(10) / 20)
    assert abs(robust[1] - robust[0]) < 0.03


def test_a_column_that_misses_the_slow_rounds_is_not_called_fast():
    """Two columns of one pace; the second is visited in the fast half only."""
    pace = np.repeat([1.0, 2.0], 10)
    step_ms = np.outer(pace, [100.0, 100.0, 50.0]) * np.exp(
        0.01 * np.random.default_rng(3).standard_normal((20, 3))
    )
    step_ms[10:, 1] = math.nan
    found = fit_two_way(step_ms)
    assert found.log_ms[1] == pytest.approx(found.log_ms[0], abs=0.01)
    assert found.visits.tolist() == [20, 10, 20]


def test_a_column_and_rounds_without_a_visit():
    step_ms = table(12)
    with_gaps = np.insert(step_ms, [3, 7], math.nan, axis=0)
    with_gaps = np.insert(with_gaps, 2, math.nan, axis=1)
    plain, found = fit_two_way(step_ms), fit_two_way(with_gaps)
    assert found.log_ms[[0, 1, 3, 4]] == pytest.approx(plain.log_ms)
    assert math.isnan(found.log_ms[2])
    assert found.visits.tolist() == [12, 12, 0, 12, 12]
    known, unknown = intervals(found, [difference(0, 1), difference(0, 2)])
    assert known.low < known.estimate < known.high
    assert all(map(math.isnan, (unknown.estimate, unknown.low, unknown.high)))


def test_columns_without_a_common_round_compare_with_nothing():
    step_ms = table(20, 5)
    step_ms[:10, 2:] = math.nan
    step_ms[10:, :2] = math.nan
    found = fit_two_way(step_ms)
    assert found.visits.tolist() == [0, 0, 10, 10, 10], "the largest group that rounds connect is fitted"
    assert np.isnan(found.log_ms).tolist() == [True, True, False, False, False]
    assert found.log_ms[2:] == pytest.approx(fit_two_way(step_ms[10:, 2:]).log_ms)


def test_a_full_table_of_three_rounds_is_fitted_however_they_scatter():
    # Most residuals of its median polish are 0: its noise must not be taken for none.
    step_ms = np.array([[1.1059, 7.707, 1.3002], [1.1589, 5.8147, 1.5902], [1.4016, 3.5958, 2.0552]])
    found = fit_two_way(step_ms)
    assert (step_ms.min(axis=0) <= np.exp(found.log_ms)).all()
    assert (np.exp(found.log_ms) <= step_ms.max(axis=0)).all()


def test_below_five_visits_there_is_no_interval():
    step_ms = table(20, 3)
    step_ms[MIN_ROUNDS - 1 :, 1] = math.nan
    few, enough = intervals(fit_two_way(step_ms), [difference(0, 1), difference(0, 2)])
    assert math.isfinite(few.estimate)
    assert math.isnan(few.low)
    assert math.isnan(few.high)
    assert enough.low < enough.high
    step_ms[MIN_ROUNDS - 1, 1] = 80.0
    assert not math.isnan(intervals(fit_two_way(step_ms), [difference(0, 1)])[0].low)


@pytest.mark.usefixtures("_uncorrelated")
@pytest.mark.parametrize("num_rounds", [5, 12, 40])
def test_two_columns_of_independent_rounds_have_the_interval_of_students_paired_t(num_rounds):
    """Where no visit stands out."""
    half = 0.01 * np.resize([1.0, -1.0, 0.5, -0.5, 0.2], num_rounds)
    x = np.column_stack([LOG_MS[0] + half, LOG_MS[1] - half])
    found = intervals(fit_two_way(np.exp(x)), [difference(0, 1)])[0]
    pairs = x[:, 0] - x[:, 1]
    wanted = stats.ttest_1samp(pairs, 0).confidence_interval(0.95)
    assert found.estimate == pytest.approx(pairs.mean(), rel=2e-3)
    assert found.high - found.low == pytest.approx(wanted.high - wanted.low, rel=0.05)


@pytest.mark.usefixtures("_uncorrelated")
@pytest.mark.parametrize("num_rounds", [6, 15])
@pytest.mark.parametrize("confidence", [0.8, 0.99])
def test_one_column_of_independent_rounds_has_students_interval(num_rounds, confidence):
    step_ms = table(num_rounds, 1)
    found = intervals(fit_two_way(step_ms), [(lambda log_ms: log_ms[0], 0)], confidence=confidence)[0]
    wanted = stats.ttest_1samp(np.log(step_ms[:, 0]), 0).confidence_interval(confidence)
    assert math.exp(found.estimate) == pytest.approx(stats.gmean(step_ms[:, 0]), rel=1e-9)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-9)


@pytest.mark.parametrize(("ratio", "n"), [(0.0, 5), (0.4, 8), (0.9, 30)])
def test_the_ar1_factor_is_that_of_the_covariance_matrix(ratio, n):
    covariance = ratio ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    centring = np.eye(n) - 1 / n
    of_mean = covariance.sum() / n**2
    expected = np.trace(centring @ covariance)
    spread = np.trace(centring @ covariance @ centring @ covariance)
    factor, freedom = fitting._compute_ar1_variance(ratio, n)
    assert factor == pytest.approx(of_mean / (expected / (n - 1) / n))
    assert freedom == pytest.approx(expected**2 / spread)
    if ratio == 0:
        assert (factor, freedom) == pytest.approx((1, n - 1))


NUM_COLUMNS = 5
CASES = [difference(i, 0) for i in range(1, NUM_COLUMNS)]


def noise(kind, rng, num_rounds):
    """Log step times: rounds x columns, the cases visited one after another in random order."""
    visits = num_rounds * NUM_COLUMNS
    own = 0.05 * rng.standard_normal((num_rounds, NUM_COLUMNS))
    path = np.zeros(visits)
    if kind == "drift":
        path = np.linspace(-0.1, 0.1, visits)
    elif kind == "levels":
        turns = rng.random(visits) < 1 / (10 * NUM_COLUMNS)
        path = math.log(1.4) * ((np.cumsum(turns) + rng.integers(2)) % 2)
    elif kind == "outliers":
        hit = rng.random(own.shape) < rng.uniform(0.05, 0.10)
        own = own + hit * np.log(rng.uniform(1.5, 4, own.shape))
    order = np.argsort(rng.random((num_rounds, NUM_COLUMNS)), axis=1)
    in_time = np.take_along_axis(path.reshape(num_rounds, NUM_COLUMNS), order, axis=1)
    return in_time + own + 0.02 * rng.standard_normal((num_rounds, 1))


def covered(found, *, together):
    confidence = 1 - 0.05 / len(CASES) if together else 0.95
    return [one.low <= 0 <= one.high for one in intervals(found, CASES, confidence=confidence)]


@pytest.mark.parametrize("runs", [60, *in_campaign(300)])
@pytest.mark.parametrize("num_rounds", [10, *in_campaign(40)])
@pytest.mark.parametrize("kind", ["iid", "drift", "levels", "outliers"])
def test_intervals_hold_as_often_as_they_say(kind, num_rounds, runs):
    """Within three standard errors: 8.4% of 60 runs, 3.8% of 300."""
    error = 3 * math.sqrt(0.95 * 0.05 / runs)
    rng = np.random.default_rng([11, num_rounds])
    pointwise, together = [], []
    for _ in range(runs):
        found = fit_two_way(np.exp(noise(kind, rng, num_rounds)))
        pointwise += covered(found, together=False)
        together.append(all(covered(found, together=True)))
    assert 0.95 - error <= np.mean(pointwise) <= 0.99
    assert 0.95 - error <= np.mean(together) <= min(0.95 + error, 1)


@pytest.mark.parametrize("runs", [60, *in_campaign(400)])
@pytest.mark.parametrize("part", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(("num_launches", "num_groups"), [(2, 2), (3, 3), (4, 4)])
def test_intervals_hold_what_the_launches_of_a_run_have_on_average(num_launches, num_groups, part, runs):
    """Launches shift each group of cases, `part` times as much as its rounds scatter."""
    rng, held = np.random.default_rng([12, num_launches]), []
    of_round = np.repeat(np.arange(num_launches), 15)
    for _ in range(runs):
        shift = 0.01 * part * rng.standard_normal((num_launches, num_groups))
        noise_ = 0.01 * rng.standard_normal((len(of_round), num_groups))
        found = fit_two_way(np.exp(shift[of_round] + noise_ + 0.02 * rng.standard_normal((len(of_round), 1))))
        truth = shift.mean(axis=0)
        for column, one in enumerate(intervals(found, [difference(i, 0) for i in range(1, num_groups)]), 1):
            held.append(not one.is_clear_of(truth[column] - truth[0]))
    assert stats.binomtest(sum(held), len(held), 0.94, alternative="less").pvalue > 0.01


def with_gaps(num_rounds, num_columns, *, share=0.3):
    """Step times of which a share is missing; the first round and the first column connect the others."""
    step_ms = table(num_rounds, num_columns, seed=num_columns)
    missing = np.random.default_rng(5).random(step_ms.shape) < share
    missing[0], missing[:, 0] = False, False
    step_ms[missing] = math.nan
    return step_ms


def least_squares(x, scale):
    """Columns and each round's influence on them by numpy's dense least squares, up to a common level."""
    rounds, columns = np.nonzero(np.isfinite(x))
    size = 1 / scale[columns]
    design = np.zeros((len(rounds), sum(x.shape)))
    design[np.arange(len(rounds)), columns] = size
    design[np.arange(len(rounds)), x.shape[1] + rounds] = size
    wanted = x[rounds, columns] * size
    inverse = np.linalg.pinv(design, rcond=1e-12)
    found = inverse @ wanted
    by_visit = inverse[: x.shape[1]] * (wanted - design @ found)
    influence = np.stack([by_visit[:, rounds == r].sum(axis=1) for r in range(len(x))])
    return found[: x.shape[1]], influence


@pytest.mark.parametrize(
    "shape", [(8, 60), (20, 21), (60, 8)], ids=["more columns", "about as many", "more rounds"]
)
def test_without_a_bound_it_is_weighted_least_squares_also_where_visits_lack(monkeypatch, shape):
    monkeypatch.setattr(fitting, "_TUNING", 1e6)
    scale = np.random.default_rng(2).uniform(0.5, 2, shape[1])
    monkeypatch.setattr(fitting, "_start", lambda x, seen: (*_start(x, seen)[:2], scale))
    step_ms = with_gaps(*shape)
    found = fit_two_way(step_ms)
    columns, influence = least_squares(np.log(step_ms), scale)
    assert found.log_ms - found.log_ms[0] == pytest.approx(columns - columns[0], abs=1e-8)
    between = found.case_influence - found.case_influence[:, :1]
    assert between == pytest.approx(influence - influence[:, :1], abs=1e-8)


@pytest.mark.parametrize("shape", [(30, 200), (12, 14), (12, 13)])
def test_many_columns_are_solved_as_by_the_dense_equations(shape):
    rng = np.random.default_rng(1)
    steep = rng.uniform(1e2, 1e6, shape[1])
    local = np.where(np.isfinite(with_gaps(*shape)), steep, 0.0)
    score = rng.standard_normal(shape)
    dense = np.diag(local.sum(axis=0)) - local.T @ (local / local.sum(axis=1, keepdims=True))
    dense = dense + np.mean(steep) * np.outer(np.ones(shape[1]), local.sum(axis=0) / steep.sum())
    wanted = np.linalg.solve(dense, score.T).T
    assert fitting._solve(local, steep, score) == pytest.approx(wanted, rel=1e-9, abs=1e-9 * wanted.std())


def test_columns_are_connected_through_others():
    step_ms = table(9, 6)
    for first in range(5):  # each shares its last round with the next one's first
        step_ms[[r for r in range(9) if r not in (first, first + 1)], first] = math.nan
    step_ms[:8, 5] = math.nan
    assert fit_two_way(step_ms).visits.tolist() == [2, 2, 2, 2, 2, 0]
