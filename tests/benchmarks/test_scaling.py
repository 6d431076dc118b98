"""A simulated step of the largest of the models."""

from __future__ import annotations

from typing import Any

import pytest
from published import from_throughput, gradients_in_backward_order

from ddp_bench.bench.buckets import BucketCaps, assign_cap
from ddp_bench.bench.predict.calibration import Calibration, Identity
from ddp_bench.bench.predict.networks import network
from ddp_bench.bench.predict.scenario import Scenario, cost_band
from ddp_bench.bench.predict.timeline import Compute, Slowdown, make_work, simulate
from ddp_bench.models.registry import resnet_workload

SLOW = Slowdown(compute=1.2, comm=1.3)
COMPUTE = Compute(before_ms=80.0, backward_ms=180.0, after_ms=5.0)


@pytest.fixture(scope="module")
def resnet152() -> Calibration:
    identity = Identity(
        arch="resnet152", image_size=224, batch_per_device=32, precision="fp32", device_type="cuda",
        device_name="V100", torch="", host="",
    )  # fmt: skip
    found = gradients_in_backward_order(resnet_workload("resnet152", 224))
    return from_throughput(identity, found, images_per_s=120.0)


def test_resnet152_on_1024_ranks(benchmark: Any, resnet152: Calibration) -> None:
    scenario = Scenario(
        num_devices=1024, network=network("ib-400g"), intra=network("nvlink-h100"), gpus_per_node=8
    )
    sizes = [p.num_bytes for p in resnet152.parameters]
    ready = [p.ready_ms for p in resnet152.parameters]

    def step() -> float:
        curve = cost_band(resnet152, scenario).estimate
        work = make_work(sizes, ready, assign_cap(sizes, BucketCaps((0.0,))), curve)
        return simulate(work, COMPUTE, slowdown=SLOW).step_ms

    assert benchmark(step) > COMPUTE.total_ms
    assert benchmark.stats.stats.median < 0.020
