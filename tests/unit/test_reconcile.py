"""A disturbed all-reduce curve against the buckets' own time; the oracle is scipy's constrained minimum."""

import numpy as np
import pytest
from scipy.optimize import minimize

from ddp_bench.bench.predict.allreduce import measured_curve
from ddp_bench.bench.predict.measured import COMMON_SD, reconciled

Points = tuple[tuple[int, tuple[float, ...]], ...]
KIB, MIB = 2**10, 2**20
LINK_MS_PER_MIB = 41.94
"""Of 200 Mbit/s."""

QUIET = ((4 * KIB, (1.9, 2.0, 2.1)), (64 * KIB, (2.6, 2.7, 2.8)), (MIB, (43.7, 43.8, 45.0)))
HELD_UP = ((4 * KIB, (2.0, 9.0, 16.0)), (64 * KIB, (2.6, 14.0, 30.0)), (MIB, (43.7, 44.0, 45.0)))


def _total(points, sizes):
    return sum(map(measured_curve(points), sizes))


@pytest.mark.parametrize("total_ms", [30.0, 44.0, 60.0, 200.0])
@pytest.mark.parametrize("points", [QUIET, HELD_UP])
def test_the_buckets_take_what_they_took(points, total_ms):
    sizes = [MIB, 32 * KIB]
    assert _total(reconciled(points, sizes, total_ms), sizes) == pytest.approx(total_ms, rel=1e-6)


def test_small_messages_that_were_held_up_do_not_make_the_link_faster():
    found = dict(reconciled(HELD_UP, [MIB, 32 * KIB], 44.5))
    assert np.median(found[MIB]) > LINK_MS_PER_MIB
    assert np.median(found[4 * KIB]) < 6


def test_points_that_all_are_sure_move_together():
    sure = tuple((size, (times[1],)) for size, times in QUIET)
    found = dict(reconciled(sure, [MIB, 32 * KIB], 2 * _total(sure, [MIB, 32 * KIB])))
    assert [found[size][0] / ms for size, (ms,) in sure] == pytest.approx([2, 2, 2])


def test_no_point_moves_on_its_own_beyond_its_repetitions():
    found = dict(reconciled(HELD_UP, [MIB, 32 * KIB], 20.0))
    moved = {size: np.median(found[size]) / times[1] for size, times in HELD_UP}
    common = min(moved[MIB] * 44.0 / 43.7, 1.0)
    assert moved[4 * KIB] >= common * 2.0 / 9.0 * 0.999
    assert moved[64 * KIB] >= common * 2.6 / 14.0 * 0.999


def test_the_change_is_the_least_that_the_scatter_allows():
    points = ((4 * KIB, (1.6, 2.0, 2.5)), (256 * KIB, (9.0, 11.0, 14.0)), (4 * MIB, (170.0, 175.0, 181.0)))
    sizes = [64 * KIB, MIB, 2 * MIB]
    total_ms = 0.97 * _total(points, sizes)
    sds = np.array([np.log(t[2] / t[0]) / (2 * 1.96) for _, t in points])
    inverse = np.linalg.inv(np.diag(sds**2) + COMMON_SD**2)

    def moved(x):
        return tuple((s, (t[1] * np.exp(by),)) for (s, t), by in zip(points, x, strict=True))

    least = minimize(
        lambda x: x @ inverse @ x,
        np.zeros(3),
        constraints={"type": "eq", "fun": lambda x: np.log(_total(moved(x), sizes) / total_ms)},
        options={"ftol": 1e-14},
    )
    found = [
        np.log(times[1] / points[i][1][1]) for i, (_, times) in enumerate(reconciled(points, sizes, total_ms))
    ]
    assert least.success
    assert found == pytest.approx(least.x, abs=2e-4)


@pytest.mark.parametrize(("points", "total_ms"), [((), 3.0), (((4 * KIB, (0.0,)),), 3.0), (QUIET, 0.0)])
def test_what_took_no_time_changes_nothing(points, total_ms):
    assert reconciled(points, [MIB], total_ms) == points
