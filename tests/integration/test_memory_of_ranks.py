"""Memory of real ranks on CPU cores against closed forms: an MLP whose tensors can be counted by hand."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

LAYER_MIB = 1.0
"""512 x 512 weights in float32."""

PARAMETERS_MIB = 6 * LAYER_MIB

PREPARED = """
import torch
from torch import nn
from torch.nn import functional
from bench.cluster.ranks import Cluster
from bench.measure.clock import make_clock
from bench.case import Case
from bench.run.prepare import LiveCase, prepare
from bench.run.proof import Prover
from bench.resolve import resolve, with_device_defaults
from models.workload import Workload
cluster = Cluster("cpu")
workload = Workload(
    name="mlp",
    module=lambda: nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(512, 512, False), nn.ReLU())]),
    batch=lambda n, g: (torch.randn(n, 512, generator=g), torch.randn(n, 512, generator=g)),
    loss=functional.mse_loss,
)
settings = with_device_defaults(resolve({}), device_type="cpu", num_local_devices=1)
prover = Prover(workload, workload.module(), cluster.place, 0)
def memory(mode, batch, **chosen):
    base = dict(mode=mode, num_devices=2, arch="mlp", image_size=None, batch_per_device=batch, scaling="weak",
                precision="fp32", data="device", device_type="cpu", backend="gloo", bucket_cap_mb="1")
    case = Case.of_stored({**base, **chosen})
    live = LiveCase(0, case, cluster.group(2, "gloo") if mode == "ddp" else None, False)
    made = prepare(live, prover=prover, settings=settings, clock=make_clock(cluster.place.device),
                   least_warmup_s=0.0)
    live.close()
    return [device.peak_mib for device in made.memory]
"""


def found(ranks: Any, *cases: tuple[str, int, dict[str, Any]]) -> list[list[list[float]]]:
    """What each rank tells of each case."""
    script = f"report([memory(m, n, **s) for m, n, s in {cases!r}])\ncluster.close()\n"
    by_rank: list[list[list[float]]] = ranks(PREPARED + script, 2)
    return by_rank


def test_ddp_takes_its_buckets_beside_the_model(ranks: Any) -> None:
    """Parameters, gradients and momentum; in DDP as much again, unless gradients are views of buckets.

    Views still have the gradient that the backward makes before it is copied, a layer's.
    """
    asked = (("single", 8, {}), ("ddp", 8, {}), ("ddp", 8, {"gradient_as_bucket_view": True}))
    for single, ddp, views in found(ranks, *asked):
        assert single == [pytest.approx(3 * PARAMETERS_MIB, rel=0.02)]
        assert ddp == [pytest.approx(4 * PARAMETERS_MIB, rel=0.02)]
        assert views == [pytest.approx(3 * PARAMETERS_MIB + LAYER_MIB, rel=0.02)]


@pytest.mark.skipif(
    "lazy_bucket_allocation" not in signature(DistributedDataParallel).parameters, reason="torch 2.15"
)
def test_lazy_buckets_do_not_stand_beside_the_activations(ranks: Any) -> None:
    """4 MiB of activations a layer outgrow gradients and buckets: the peak is at the backward's start.

    There eager buckets take all of 6 MiB, lazy ones those of the layers that the backward has come to.
    """
    batch = 2048
    eager, lazy = found(ranks, ("ddp", batch, {}), ("ddp", batch, {"lazy_bucket_allocation": True}))[0]
    assert PARAMETERS_MIB - 2 * LAYER_MIB <= eager[0] - lazy[0] <= PARAMETERS_MIB


def test_dp_on_cpu_cores_has_one_process_for_all_and_tells_nothing(ranks: Any) -> None:
    assert found(ranks, ("dp", 8, {}))[0] == [[]]
