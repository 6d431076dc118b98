"""Compute and communication on one core: what it costs on another link, against sums done by hand."""

from dataclasses import replace

import pytest
from test_scaling_predict import SMALL

from ddp_bench.bench.predict.allreduce import CostCurve, on_shared_cores
from ddp_bench.bench.predict.networks import network
from ddp_bench.bench.predict.prediction import predict
from ddp_bench.bench.predict.scenario import Scenario
from ddp_bench.bench.predict.timeline import Slowdown

OWN = CostCurve(((1e6, 10.0), (1e8, 1000.0)))
MEASURED = Slowdown(compute=1.25, comm=1.0)
"""Communication slows compute by a quarter."""


@pytest.mark.parametrize(
    ("factor", "compute", "comm", "cost_ms"),
    [
        (1.0, 1.25, 1.0, 1000.0),  # the calibrated link
        (10.0, 1.025, 1.0, 10000.0),  # a tenth of the rate slows compute a tenth as much
        (0.25, 2.0, 1.0, 250.0),  # four times the rate
        (0.125, 8 / 3, 1.2, 125.0),  # eight times: 0.4 of a core, beside compute a third is left
        (0.1, 8 / 3, 1.5, 100.0),  # what compute loses no longer grows: the bytes move no faster beside it
        (0.01, 8 / 3, 3.0, 50.0),  # the core, not the link, is the limit: a twentieth of 1000 ms
    ],
)
def test_a_core_moves_the_bytes(factor, compute, comm, cost_ms):
    slowdown, cost = on_shared_cores(
        MEASURED, core_share=0.05, calibrated=(OWN, 2), asked=(OWN.scaled(factor), 2), num_bytes=1e8
    )
    assert slowdown.compute == pytest.approx(compute)
    assert slowdown.comm == pytest.approx(comm)
    assert cost(1e8) == pytest.approx(cost_ms)


def test_compute_keeps_a_third_of_the_core():
    slowdown, _ = on_shared_cores(
        Slowdown(compute=2.0, comm=1.0),
        core_share=0.05,
        calibrated=(OWN, 2),
        asked=(OWN.scaled(0.25), 2),
        num_bytes=1e8,
    )
    assert slowdown == Slowdown(compute=3.0, comm=pytest.approx(1.2))  # 4/5 of the core wanted, 2/3 given


def test_what_was_measured_holds_on_the_calibrated_link_however_busy_the_core():
    busy = Slowdown(compute=2.0, comm=1.1)
    slowdown, cost = on_shared_cores(busy, core_share=0.5, calibrated=(OWN, 2), asked=(OWN, 2), num_bytes=1e8)
    assert slowdown == busy
    assert cost(1e8) == pytest.approx(1000.0)


def test_the_rate_of_a_rank_counts_not_the_number_of_ranks():
    more_ranks = OWN.scaled(2 * 3 / 4)  # the ring law from 2 to 4 ranks
    slowdown, cost = on_shared_cores(
        MEASURED, core_share=0.05, calibrated=(OWN, 2), asked=(more_ranks, 4), num_bytes=1e8
    )
    assert slowdown.compute == pytest.approx(1.25)
    assert cost(1e8) == pytest.approx(1500.0)


def test_a_gpu_keeps_its_slow_down():
    busy = replace(SMALL, compute_slowdown=(1.5,))
    scenario = Scenario(num_devices=2, network=network("link:400gbit"))
    on_gpu = predict(busy, scenario, resamples=0).step_ms.estimate
    as_core = replace(busy, identity=replace(busy.identity, device_type="cpu"))
    assert predict(as_core, scenario, resamples=0).step_ms.estimate > on_gpu
