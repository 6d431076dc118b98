"""Bubbles of pipeline schedules against the papers' closed forms, splits against every other split."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchvision.models import resnet18

from ddp_bench.bench.measure.split import balanced, layer_costs_ms
from ddp_bench.bench.predict.timeline import bubble_share
from ddp_bench.models.resnet import resnet20, resnet_layers


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("n", "m"), [(2, 1), (2, 4), (3, 5), (4, 4), (8, 32)])
def test_equal_stages_wait_as_the_gpipe_paper_says(schedule, n, m):
    if schedule == "gpipe" or m >= n:
        assert bubble_share(schedule, [1.0] * n, [2.0] * n, m) == pytest.approx((n - 1) / (m + n - 1))


def test_unequal_stages_wait_for_the_slowest():
    # By hand: F 1, 1 then F 3, 3 ends at 7; backwards of no time. Busy 8 of 2 x 7.
    assert bubble_share("gpipe", [1.0, 3.0], [0.0, 0.0], 2) == pytest.approx(1 - 8 / 14)


def test_partition_keeps_one_stage_busy_at_a_time():
    assert bubble_share("gpipe", [1.0, 5.0, 2.0], [2.0, 9.0, 4.0], 1) == pytest.approx(2 / 3)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_no_other_split_has_a_smaller_slowest_stage(num_parts):
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    found = balanced(costs, num_parts)

    def slowest(cuts):
        ends = (0, *cuts, len(costs))
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    every = [slowest(cuts) for cuts in itertools.combinations(range(1, len(costs)), num_parts - 1)]
    assert sum(found) == len(costs)
    assert min(found) > 0
    assert slowest(tuple(itertools.accumulate(found[:-1]))) == min(every)


def test_more_devices_than_layers_is_refused():
    with pytest.raises(ValueError, match="2 layers do not make 3 stages"):
        balanced([1.0, 1.0], 3)


@pytest.mark.parametrize("make", [resnet20, resnet18])
def test_a_resnets_layers_one_after_another_are_the_resnet(make):
    module = make().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found = nn.Sequential(*resnet_layers(module))(images)
        assert torch.allclose(found, module(images), atol=1e-6)
    held = {id(p) for layer in resnet_layers(module) for p in layer.parameters()}
    assert held == {id(p) for p in module.parameters()}


def test_a_layer_of_ten_times_the_work_costs_most_and_gradients_are_gone():
    layers = [
        nn.Linear(256, 256),
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(30))),
        nn.ReLU(inplace=True),
    ]
    targets = torch.zeros(512, dtype=torch.long)
    costs = layer_costs_ms(
        layers,
        torch.randn(512, 256),
        lambda out: functional.cross_entropy(out, targets),
        within=contextlib.nullcontext(),
    )
    assert costs.index(max(costs)) == 1
    assert all(p.grad is None for layer in layers for p in layer.parameters())
