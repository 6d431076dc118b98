"""All-reduce curves and networks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.predict.allreduce import (
    CostBand,
    CostCurve,
    at_ranks,
    hierarchical,
    measured_curve,
    ring_factor,
)
from ddp_bench.bench.predict.networks import NETWORKS, network
from ddp_bench.bench.predict.slowest_rank import RankSpread, expected_max

ALPHA_BETA = CostCurve(tuple((float(4096 * 4**i), 0.05 + 4096 * 4**i * 1e-6) for i in range(9)))


def test_between_points_a_curve_is_a_line_on_log_log_axes():
    curve = CostCurve(((1e3, 1.0), (1e5, 100.0)))
    assert curve(1e4) == pytest.approx(10.0)
    assert curve(10) == 1.0
    assert curve(2e5) == pytest.approx(100 + 1e5 * 99 / 99e3)
    assert curve(0) == 0


def test_extrapolation_keeps_latency_and_bandwidth():
    assert ALPHA_BETA(1) == pytest.approx(0.05 + 4096e-6)
    largest = 4096 * 4**8
    assert ALPHA_BETA(10 * largest) == pytest.approx(0.05 + 10 * largest * 1e-6, rel=1e-6)


def test_noise_is_pooled_until_larger_is_never_faster():
    curve = measured_curve([(1000, (1.0,)), (2000, (3.0, 3.0, 9.0)), (4000, (2.0,)), (8000, (8.0,))])
    times = [ms for _, ms in curve.points]
    assert times == sorted(times)
    assert times[1] == times[2] == pytest.approx(math.sqrt(6))


@given(
    st.dictionaries(st.integers(1, 2**30), st.floats(1e-3, 1e3), min_size=1, max_size=9),
    st.floats(1, 2**32),
    st.floats(1, 8),
)
def test_curves_rise(points, size, factor):
    curve = measured_curve([(s, (ms,)) for s, ms in points.items()])
    assert 0 < curve(size) <= curve(size * factor) * (1 + 1e-9)


def test_ring_law_for_bandwidth_and_hops_for_latency():
    """alpha-beta of 2 ranks: one message of 2 steps; on 8 ranks 14 steps and 1.75 times the bytes."""
    hop = 0.025
    two = CostCurve(tuple((float(s), 2 * hop + s * 1e-6) for s in (4096, 2**20, 2**26)))
    eight = at_ranks(two, measured=2, wanted=8, hop_ms=hop)
    for size in (4096, 2**20, 2**26):
        assert eight(size) == pytest.approx(14 * hop + 1.75 * size * 1e-6)
    assert at_ranks(two, measured=2, wanted=1, hop_ms=hop)(2**20) == 0


def test_hierarchy_between_pipelined_and_one_after_the_other():
    inside, between = CostCurve(((1e6, 3.0), (1e8, 300.0))), CostCurve(((1e6, 5.0), (1e8, 500.0)))
    assert hierarchical(inside, between, overlap=0.0)(1e7) == pytest.approx(80.0)
    assert hierarchical(inside, between, overlap=1.0)(1e7) == pytest.approx(50.0)


def test_two_roce_nodes_lie_between_the_ends_of_two_levels():
    """310 GB/s were measured over 16 H100s on 2 nodes: the hierarchy's band must hold it."""
    inside, between = network("nvlink-h100").band(8), network("ib-400g").band(2, nics=8)
    size = 2**30
    quick = hierarchical(inside.estimate, between.estimate, overlap=1.0)(size)
    slow = hierarchical(inside.estimate, between.estimate, overlap=0.0)(size)
    measured = ring_factor(16) * size / 310e6
    assert quick < measured < slow
    assert network("roce-400g").job_band(16, 2).estimate(size) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("kib", "busbw"), [(64, 6.2), (1024, 75.0), (32768, 301.0), (1048576, 466.0)])
def test_h200_preset_gives_back_its_source(kib, busbw):
    assert 1.75 * kib * 1024 / network("nvlink-h200").band(8).estimate(kib * 1024) / 1e6 == pytest.approx(
        busbw
    )


def test_a_link_of_1_gbit_carries_resnet18_as_measured():
    """46.8 MB between two hosts over 1 Gbit/s take 0.39-0.41 s (tc tbf on a veth pair)."""
    assert 390 < network("link:1gbit").band(2).estimate(46_758_048) < 410


def test_ten_gigabit_preset_gives_back_alpha_and_beta():
    curve = network("eth-10g").band(8).estimate
    assert curve(4096) == pytest.approx(0.523, rel=0.02)
    growth = (curve(2**28) - curve(2**26)) / (2**28 - 2**26) * 1e-3
    assert growth / 1.75 == pytest.approx(8.57e-10, rel=0.01)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_preset_has_a_source_and_rising_cost(name):
    net = NETWORKS[name]
    assert net.source
    for members in (2, 8, 64, 512):
        band = net.band(members)
        for size in (1, 4096, 2**20, 2**31):
            assert 0 < band.low(size) <= band.estimate(size) <= band.high(size)
            assert band.at(-1)(size) <= band.at(0.5)(size) <= band.at(1)(size) * (1 + 1e-9)


def test_one_member_sends_nothing():
    assert network("ib-400g").band(1) == CostBand.exact(CostCurve())


@pytest.mark.parametrize("name", ["ib-300g", "", "link:0mbit", "link:fast", "nvlink"])
def test_unknown_network_names_the_known(name):
    with pytest.raises(UsageError, match=r"known: nvlink-h200, .*link:RATE"):
        network(name)


def test_expected_maximum_against_simulation():
    rng = np.random.default_rng(1)
    samples = rng.lognormal(0, 0.1, 4000)
    drawn = rng.choice(samples, (20000, 8)).max(axis=1).mean()
    assert expected_max(samples.tolist(), 8) == pytest.approx(drawn, rel=0.005)
    beyond = rng.exponential(0.1, (2000, 1000)).max(axis=1).mean()
    assert expected_max((rng.exponential(0.1, 400)).tolist(), 1000) == pytest.approx(beyond, rel=0.2)


def test_of_ranks_measured_together_the_slowest_is_the_one_measured():
    """Two share a core and one has its own; a rank that is always slow is no draw of a lottery."""
    found = RankSpread.of({r: {0: [2.0, 2.0], 1: [1.0, 1.0], 2: [2.0, 2.0]} for r in range(5)})
    assert found.factor(1) == 1.0
    assert found.factor(3) == pytest.approx(1.0)
    always = RankSpread.of({r: {0: [1.2], 1: [1.0]} for r in range(5)})
    assert always.factor(2) == pytest.approx(1.2 / 1.1)
    assert expected_max(always.of_ranks, 2) < 1.2 / 1.1


def test_a_round_that_was_held_up_does_not_count_for_more_than_another():
    steps = {r: {0: [1.0, 1.1], 1: [1.1, 1.0]} for r in range(9)} | {9: {0: [1.0, 9.0], 1: [1.0, 1.0]}}
    assert RankSpread.of(steps).factor(2) == pytest.approx(1.1 / 1.05)


def test_the_slowest_of_more_ranks_than_were_measured_grows_as_of_independent_ones():
    """Oracle: the slowest of eight drawn ranks; two were measured together."""
    drawn = np.random.default_rng(3).normal(1.0, 0.05, (4000, 2))
    found = RankSpread.of(
        {r: {0: list(steps[:, 0]), 1: list(steps[:, 1])} for r, steps in enumerate([drawn] * 3)}
    )
    assert found.factor(2) == pytest.approx(drawn.max(axis=1).mean(), rel=0.002)
    assert found.factor(8) == pytest.approx(drawn.reshape(-1, 8).max(axis=1).mean(), rel=0.005)


def test_fewer_ranks_than_were_measured_are_drawn_singly():
    found = RankSpread(of_ranks=(1.0, 1.0, 1.0, 2.0), of_slowest=(2.0,), num_ranks=4)
    assert found.factor(2) == pytest.approx(expected_max(found.of_ranks, 2))
    assert found.factor(4) == 2.0


def test_expected_maximum_of_one_is_the_mean_and_of_none_is_one():
    assert expected_max([1.0, 2.0, 3.0], 1) == pytest.approx(2.0)
    assert expected_max([], 64) == 1.0
