"""All-reduce curves: networks and shared cores."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scaling_predict import SMALL

from ddp_bench.bench.predict import allreduce
from ddp_bench.bench.predict.networks import NETWORKS, find_network
from ddp_bench.bench.predict.prediction import Scenario, compute_cost_band, simulate_scenario
from ddp_bench.bench.predict.timeline import Slowdown

ALPHA_BETA = allreduce.CostCurve(tuple((float(4096 * 4**i), 0.05 + 4096 * 4**i * 1e-6) for i in range(9)))


def test_between_points_a_curve_is_a_line_on_log_log_axes():
    curve = allreduce.CostCurve(((1e3, 1.0), (1e5, 100.0)))
    assert curve(1e4) == pytest.approx(10.0)
    assert curve(10) == 1.0
    assert curve(2e5) == pytest.approx(100 + 1e5 * 99 / 99e3)
    assert curve(0) == 0
    # Beyond them it keeps latency and bandwidth.
    assert ALPHA_BETA(1) == pytest.approx(0.05 + 4096e-6)
    largest = 4096 * 4**8
    assert ALPHA_BETA(10 * largest) == pytest.approx(0.05 + 10 * largest * 1e-6, rel=1e-6)


def test_noise_is_pooled_until_larger_is_never_faster():
    curve = allreduce.make_curve([(999, (1.0,)), (2000, (3.0, 3.0, 9.0)), (4000, (2.0,)), (8000, (8.0,))])
    times = [ms for _, ms in curve.points]
    assert times == sorted(times)
    assert times[1] == times[2] == pytest.approx(math.sqrt(6))


@given(
    st.dictionaries(st.integers(1, 2**30), st.floats(1e-3, 1e3), min_size=1, max_size=9),
    st.floats(1, 2**32),
    st.floats(1, 8),
)
def test_curves_rise(points, size, factor):
    curve = allreduce.make_curve([(s, (ms,)) for s, ms in points.items()])
    assert 0 < curve(size) <= curve(size * factor) * (1 + 1e-9)


def test_ring_law_for_bandwidth_and_hops_for_latency():
    """alpha-beta of 2 ranks: one message of 2 steps; on 8 ranks 14 steps and 1.75 times the bytes."""
    hop = 0.025
    two = allreduce.CostCurve(tuple((float(s), 2 * hop + s * 1e-6) for s in (4096, 2**20, 2**26)))
    eight = allreduce.carry_to_ranks(two, measured=2, wanted=8, hop_ms=hop, steps=allreduce.count_ring_steps)
    for size in (4096, 2**20, 2**26):
        assert eight(size) == pytest.approx(14 * hop + 1.75 * size * 1e-6)


def test_hierarchy_between_pipelined_and_one_after_the_other():
    inside = allreduce.CostCurve(((1e6, 3.0), (1e8, 300.0)))
    between = allreduce.CostCurve(((1e6, 5.0), (1e8, 500.0)))
    assert allreduce.combine_levels(inside, between, 0.0)(1e7) == pytest.approx(80.0)
    assert allreduce.combine_levels(inside, between, 1.0)(1e7) == pytest.approx(50.0)


def test_two_roce_nodes_lie_between_the_ends_of_two_levels():
    """310 GB/s were measured over 16 H100s on 2 nodes: the hierarchy's band must hold it."""
    inside, between = (
        find_network("nvlink-h100").compute_band(8),
        find_network("ib-400g").compute_band(2, nics=8),
    )
    size = 2**30
    quick = allreduce.combine_levels(inside.estimate, between.estimate, 1.0)(size)
    slow = allreduce.combine_levels(inside.estimate, between.estimate, 0.0)(size)
    measured = allreduce.compute_ring_factor(16) * size / 310e6
    assert quick < measured < slow
    assert find_network("roce-400g").compute_band(16).estimate(size) == pytest.approx(measured, rel=0.02)


def test_over_efa_the_whole_job_is_as_it_was_measured():
    """4 nodes of 8 B200: the same source; what joins a node's GPUs is part of it."""
    asked = Scenario(num_devices=32, network=find_network("efa-b200"), intra=find_network("nvlink-b200"))
    cost = compute_cost_band(asked).estimate
    for mib, busbw in ((1, 5.4), (64, 157.0), (1024, 362.0)):
        assert 62 / 32 * mib * 2**20 / cost(mib * 2**20) / 1e6 == pytest.approx(busbw)


def joined(num_devices, *, gpus_per_node=4):
    intra = find_network("nvlink-a100") if gpus_per_node > 1 else None
    return Scenario(
        num_devices=num_devices,
        gpus_per_node=gpus_per_node,
        intra=intra,
        network=find_network("ib-200g"),
        nics_per_node=1,
    )


def test_a_ring_over_all_ranks_crosses_a_nodes_port_and_compute_slows_that_beyond_two_nodes():
    """By hand: 8 ranks send 2 * 7 / 8 bytes for each through the port, at 23 GB/s; half of it is hidden."""
    size = 256e6
    inside, port_ms = find_network("nvlink-a100").compute_band(4).estimate(size), 1.75 * size / 23e6
    alone, beside = (compute_cost_band(joined(8), slowed).estimate(size) for slowed in (1.0, 15.0))
    assert alone == pytest.approx(port_ms + inside / 2, rel=0.02)
    assert beside == pytest.approx(15 * inside + port_ms / 2, rel=0.02), "ports of two nodes work alone"
    assert compute_cost_band(joined(12), 15.0).estimate(size) == pytest.approx(
        15 * compute_cost_band(joined(12)).estimate(size)
    )
    assert compute_cost_band(joined(2, gpus_per_node=1), 15.0) == compute_cost_band(
        joined(2, gpus_per_node=1)
    )


def test_what_was_measured_across_a_network_is_slowed_as_it_was_there():
    """A slow-down of two hosts' all-reduces is of their network, one of a single device's of its kernels."""
    asked = joined(2, gpus_per_node=1)
    slowed, alone = (replace(SMALL, num_ranks=2, comm_slowdown=(factor,)) for factor in (15.0, 1.0))
    assert simulate_scenario(slowed, asked).step_ms > simulate_scenario(alone, asked).step_ms
    slowed, alone = (replace(c, num_ranks=1) for c in (slowed, alone))
    assert simulate_scenario(slowed, asked).step_ms == simulate_scenario(alone, asked).step_ms


def test_a_link_of_1_gbit_carries_resnet18_as_measured():
    """46.8 MB between two hosts over 1 Gbit/s take 0.39-0.41 s (tc tbf on a veth pair)."""
    assert 390 < find_network("link:1gbit").compute_band(2).estimate(46_758_048) < 410


@pytest.mark.parametrize("name", [*NETWORKS, "link:1gbit"])
def test_every_network_says_what_is_assumed_and_has_rising_cost(name):
    net = find_network(name)
    assert "assumed" in net.source
    for members in (2, 8, 64, 512):
        band = net.compute_band(members)
        for size in (1, 4096, 2**20, 2**31):
            assert 0 < band.low(size) <= band.estimate(size) <= band.high(size)


def test_one_member_sends_nothing():
    assert find_network("ib-400g").compute_band(1) == allreduce.CostBand.from_curve(allreduce.CostCurve())


OWN = allreduce.CostCurve(((1e6, 10.0), (1e8, 1000.0)))
MEASURED = Slowdown(compute=1.25, comm=1.0)
"""Communication slows compute by a quarter."""
BUSY = Slowdown(compute=2.0, comm=1.1)


@pytest.mark.parametrize(
    ("measured", "core_share", "factor", "compute", "comm"),
    [
        (MEASURED, 0.05, 1.0, 1.25, 1.0),  # the calibrated link
        (MEASURED, 0.05, 10.0, 1.025, 1.0),  # a tenth of the rate slows compute a tenth as much
        (MEASURED, 0.05, 0.25, 2.0, 1.0),  # four times the rate
        # Eight times: 0.4 of a core, beside compute a third is left.
        (MEASURED, 0.05, 0.125, 8 / 3, 1.2),
        # What compute loses no longer grows: the bytes move no faster beside it.
        (MEASURED, 0.05, 0.1, 8 / 3, 1.5),
        # What was measured holds on the calibrated link, however busy the core.
        (BUSY, 0.5, 1.0, BUSY.compute, BUSY.comm),
    ],
)
def test_a_core_moves_the_bytes(measured, core_share, factor, compute, comm):
    found = allreduce.carry_slowdown(
        measured, core_share=core_share, calibrated=OWN, asked=OWN.scale(factor), num_bytes=1e8
    )
    assert (found.compute, found.comm) == pytest.approx((compute, comm))


def test_a_gpu_keeps_its_slow_down():
    busy = replace(SMALL, compute_slowdown=(1.5,))
    scenario = Scenario(num_devices=2, network=find_network("link:400gbit"))
    on_gpu = simulate_scenario(busy, scenario).step_ms
    as_core = replace(busy, identity=replace(busy.identity, device_type="cpu"))
    assert simulate_scenario(as_core, scenario).step_ms > on_gpu
