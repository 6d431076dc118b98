"""The event simulation and the split of a model's layers against closed forms worked out by hand."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torchvision.models import resnet18

from ddp_bench.bench.plan.buckets import BucketLayout
from ddp_bench.bench.predict.timeline import Compute, Slowdown, simulate_ms
from ddp_bench.bench.proof.stages import measure_layer_costs_ms, partition_layers
from ddp_bench.models.resnet import ResNet20, list_resnet_layers

COMPUTE = Compute(before_ms=50.0, backward_ms=100.0, after_ms=10.0)


def exposed_ms(buckets, compute=COMPUTE, **more):
    """Of buckets of one gradient each, of equal size: when it is ready, and its all-reduce alone."""
    ready, comm = zip(*buckets, strict=True) if buckets else ((), ())
    layout, costs = BucketLayout((4,) * len(ready), tuple((i,) for i in range(len(ready)))), iter(comm)
    return simulate_ms(ready, layout, lambda _: next(costs), compute, **more) - compute.total_ms


BY_HAND = {
    "no overlap: compute plus communication": (
        ((100, 30),), {"slowdown": (3, 3)}, 30,
    ),
    "infinite bandwidth: compute": (
        ((10, 0), (100, 0)), {}, 0,
    ),
    "only the last is exposed where the others fit inside": (
        ((20, 30), (60, 30), (100, 7)), {}, 7,
    ),
    "all-reduces queue in order": (((10, 80), (20, 15), (100, 1)), {}, 6),
    "a bucket waits for those before it": (((80, 5), (10, 30)), {}, 15),
    # From 40 ms on both run: compute at 1/2, communication at 1/3. 20 ms of all-reduce take 60 ms, in which
    # 30 ms of compute are done: 70 at wall time 100. The other 30 ms run alone until 130, then 10 ms: 140.
    "mutual slow-down": (
        ((40, 20), (100, 10)), {"slowdown": (2, 3)},
        40,
    ),
    # At 90 ms 10 ms of compute are left: 20 ms at half speed, in which 20/4 = 5 ms of 12 are sent.
    "communication speeds up once compute is over": (
        ((90, 12),), {"slowdown": (2, 4)}, 17,
    ),
    # Beside compute for 20 ms, the rest of compute alone; or exactly as long as what is left of it.
    "compute outlasts an all-reduce": (((90, 2),), {"slowdown": (2, 2)}, 2),
    "both end together": (((90, 10),), {"slowdown": (2, 2)}, 10),
    # Two equal buckets, 2 ms to copy each: ready 2 and 4 ms later; the first is back before the second.
    "copies in are part of the backward, the last is copied back alone": (
        ((50, 1), (100, 5)), {"copy_ms": 4}, 4 + 5 + 2,
    ),
    "one bucket is copied with nothing to hide it": (
        ((100, 30),), {"copy_ms": 10}, 10 + 30 + 10,
    ),
    "a residual is added whole": (((100, 30),), {"residual_ms": 3}, 33),
    "a negative one shortens the wait": (((100, 30),), {"residual_ms": -3}, 27),
    "and no compute": (((100, 30),), {"residual_ms": -50}, 0),
    "without buckets": (
        (), {}, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_step_by_hand(name):
    buckets, given, expected = BY_HAND[name]
    compute, comm = given.get("slowdown", (1, 1))
    slowdown = Slowdown(compute=compute, comm=comm)
    found = exposed_ms(buckets, **given | {"slowdown": slowdown})
    assert found == pytest.approx(expected)


def test_copies_back_wait_for_the_backward_and_run_on_after_the_last_all_reduce():
    """The large bucket is done at 61; the end of the backward, 110, is followed by 9 ms for it, then 1."""
    layout = BucketLayout((9, 1), ((0,), (1,)))
    step_ms = simulate_ms([50.0, 100.0], layout, {9: 2.0, 1: 0.5}.get, COMPUTE, copy_ms=10.0)
    assert step_ms == pytest.approx(COMPUTE.total_ms + 10.0 + 10.0)


def test_what_compute_does_not_slow_ends_sooner():
    """Of 12 ms alone 2 are of the GPU, and take 8 beside compute: 18. The last 9 ms are half of it."""
    part = Slowdown(compute=1.0, comm=4.0, beside_ms=lambda _: 18.0)
    assert exposed_ms([(91, 12)], slowdown=part) == pytest.approx(6.0)
    assert exposed_ms([(91, 12)], slowdown=Slowdown(comm=4.0)) == pytest.approx(12 - 9 / 4)


def test_a_bucket_waits_for_the_last_of_them():
    """The first is ready at 5 and takes 30, the second at 90 and takes 40: 30 after the backward."""
    layout = BucketLayout((300, 400), ((0, 1), (2,)))
    step_ms = simulate_ms([5.0, 3.0, 90.0], layout, lambda sent: sent / 10, COMPUTE)
    assert step_ms == pytest.approx(COMPUTE.total_ms + 30.0)


BUCKETS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 200)), min_size=1, max_size=12)
SLOWDOWNS = st.builds(lambda a, b: Slowdown(compute=a, comm=b), st.floats(1, 4), st.floats(1, 4))


@given(BUCKETS, SLOWDOWNS)
def test_bounds_of_any_step(buckets, slow):
    found_ms = exposed_ms(buckets, slowdown=slow)
    communication = sum(comm for _, comm in buckets)
    overlapped = min(communication * slow.comm, COMPUTE.backward_ms * slow.compute)
    end_ms = COMPUTE.backward_ms + found_ms
    assert found_ms >= -1e-9
    assert end_ms >= max(r for r, _ in buckets) + buckets[-1][1] - 1e-6
    assert end_ms >= buckets[0][0] + communication - 1e-6
    # Never worse than all compute and all communication one after the other, what overlaps twice over.
    assert found_ms <= communication + overlapped + 1e-6
    undisturbed_ms = exposed_ms(buckets)
    assert undisturbed_ms <= communication + 1e-6, "overlap alone never costs"


@given(BUCKETS, SLOWDOWNS, st.floats(1, 10))
def test_more_bandwidth_is_never_slower(buckets, slow, factor):
    faster = [(ready, comm / factor) for ready, comm in buckets]
    slower_ms = exposed_ms(buckets, slowdown=slow)
    assert exposed_ms(faster, slowdown=slow) <= slower_ms + 1e-6


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_no_other_split_has_a_smaller_slowest_stage(num_parts):
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    found = partition_layers(costs, num_parts)

    def slowest(cuts):
        ends = (0, *cuts, len(costs))
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    every = [slowest(cuts) for cuts in itertools.combinations(range(1, len(costs)), num_parts - 1)]
    assert sum(found) == len(costs)
    assert min(found) > 0
    assert slowest(tuple(itertools.accumulate(found[:-1]))) == min(every)


@pytest.mark.parametrize("make", [ResNet20, resnet18])
def test_a_resnets_layers_one_after_another_are_the_resnet(make):
    module = make().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found = nn.Sequential(*list_resnet_layers(module))(images)
        assert torch.allclose(found, module(images), atol=1e-6)
    held = {id(p) for layer in list_resnet_layers(module) for p in layer.parameters()}
    assert held == {id(p) for p in module.parameters()}


def test_a_layer_of_ten_times_the_work_costs_most_and_gradients_are_gone():
    layers = [
        nn.Linear(256, 256),
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(30))),
        nn.ReLU(inplace=True),
    ]
    targets = torch.zeros(512, dtype=torch.long)
    costs = measure_layer_costs_ms(
        layers,
        torch.randn(512, 256),
        lambda out: functional.cross_entropy(out, targets),
        within=contextlib.nullcontext(),
    )
    assert costs.index(max(costs)) == 1
    assert all(p.grad is None for layer in layers for p in layer.parameters())
