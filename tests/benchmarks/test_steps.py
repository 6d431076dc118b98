"""A training step in every mode, through the fixture that users have too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddp_bench.bench.case import Case
from ddp_bench.bench.measure.timed import Trainer
from ddp_bench.bench.modes import Place, build_mode
from ddp_bench.models.data import open_source
from ddp_bench.models.registry import resnet_workload

DEVICE = torch.device("cpu")


@pytest.mark.parametrize(("mode", "num_devices"), [("single", 1), ("dp", 2)])
def test_step(train_step_benchmark: Callable[..., None], mode: str, num_devices: int) -> None:
    torch.set_num_threads(1)
    workload = resnet_workload("resnet20", 32)
    case = Case(
        mode=mode,
        num_devices=num_devices,
        arch="resnet20",
        image_size=32,
        batch_per_device=8,
        scaling="weak",
        precision="fp32",
        data="device",
        device_type="cpu",
    )
    place = Place(rank=0, local_rank=0, device=DEVICE, cores=(0, 1))
    size = 8 * num_devices
    source = open_source(
        workload, data="device", batch_size=size, rank=0, world_size=1, device=DEVICE, seed=0
    )
    trainer = Trainer(case, build_mode(case, workload.module(), place, None), workload, source)
    train_step_benchmark(trainer.step)
    trainer.close()


DDP = """
from ddp_bench.bench.measure.clock import make_clock
from ddp_bench.bench.measure.timed import Trainer, run_block
from ddp_bench.bench.modes import build_mode
from ddp_bench.bench.case import Case
from ddp_bench.models.data import open_source
from ddp_bench.models.registry import resnet_workload
workload = resnet_workload("resnet20", 32)
case = Case(mode="ddp", num_devices=2, arch="resnet20", image_size=32, batch_per_device=8, scaling="weak",
            precision="fp32", data="device", device_type="cpu", backend="gloo")
mode = build_mode(case, workload.module(), cluster.place, cluster.group(2, "gloo"))
source = open_source(workload, data="device", batch_size=8, rank=cluster.rank, world_size=2,
                     device=cluster.place.device, seed=0)
trainer = Trainer(case, mode, workload, source)
clock = make_clock(cluster.place.device)
for _ in range(3):
    trainer.step()
mode.settle()
times = [run_block(trainer.step, 5, clock).block_ms for _ in range(20)]
report(times)
"""


def test_step_ddp(benchmark: Any, ranks: Any) -> None:
    """Start-up of the ranks is in pytest-benchmark's time; the blocks themselves are in extra_info."""
    times_ms = benchmark.pedantic(lambda: ranks(DDP)[0], rounds=1)
    benchmark.extra_info["block_ms"] = times_ms
    benchmark.extra_info["steps_per_block"] = 5
