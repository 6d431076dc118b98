"""The event simulation and pipelines' bubbles against closed forms worked out by hand.

And what follows from it: where scaling breaks and what breaks it, and the step that no layout can beat.
"""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from fuzzing import bounded
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_scaling_predict import SMALL
from torch import nn
from torch.nn import functional
from torchvision.models import resnet18

from ddp_bench.bench.predict import prediction
from ddp_bench.bench.predict.allreduce import measured_curve
from ddp_bench.bench.predict.bound import bound, bound_ms
from ddp_bench.bench.predict.calibration import AllReduceTimes, Parameter
from ddp_bench.bench.predict.networks import network
from ddp_bench.bench.predict.scaling_limit import LEAST_EFFICIENCY, predicted_line
from ddp_bench.bench.predict.scenario import Scenario
from ddp_bench.bench.predict.timeline import Compute, Slowdown, Work, bubble_share, make_work, simulate
from ddp_bench.bench.worker.stages import balanced, layer_costs_ms
from ddp_bench.models.resnet import resnet20, resnet_layers

COMPUTE = Compute(before_ms=50.0, backward_ms=100.0, after_ms=10.0)


def work(*buckets):
    return [Work(num_bytes=4, ready_ms=ready, comm_ms=comm) for ready, comm in buckets]


def attributes(step, name):
    """Of the step, or of each bucket."""
    return [getattr(b, name) for b in step.buckets] if name in OF_BUCKETS else getattr(step, name)


OF_BUCKETS = ("ready_ms", "launch_ms", "start_ms", "done_ms")
BY_HAND = {
    "no overlap: compute plus communication": (
        ((100, 30),), {"slowdown": (3, 3)}, {"step_ms": 190, "exposed_comm_ms": 30, "comm_ms": 30},
    ),
    "infinite bandwidth: compute": (
        ((10, 0), (100, 0)), {}, {"step_ms": COMPUTE.total_ms, "exposed_comm_ms": 0},
    ),
    "only the last is exposed where the others fit inside": (
        ((20, 30), (60, 30), (100, 7)), {},
        {"exposed_comm_ms": 7, "start_ms": [20, 60, 100], "comm_end_ms": 107},
    ),
    "all-reduces queue in order": (
        ((10, 50), (20, 5), (100, 1)), {},
        {"launch_ms": [10, 20, 100], "start_ms": [10, 60, 100], "done_ms": [60, 65, 101]},
    ),
    "a bucket waits for those before it": (
        ((80, 5), (10, 5)), {}, {"ready_ms": [80, 10], "launch_ms": [80, 80], "start_ms": [80, 85]},
    ),
    "one that was ready before is not waited for": (
        ((20, 40), (30, 5)), {}, {"ready_ms": [20, 30], "start_ms": [20, 60], "done_ms": [60, 65]},
    ),
    # From 40 ms on both run: compute at 1/2, communication at 1/3. 20 ms of all-reduce take 60 ms, in which
    # 30 ms of compute are done: 70 at wall time 100. The other 30 ms run alone until 130, then 10 ms: 140.
    "mutual slow-down": (
        ((40, 20), (100, 10)), {"slowdown": (2, 3)},
        {"done_ms": [100, 140], "compute_end_ms": 130, "comm_end_ms": 140, "exposed_comm_ms": 40},
    ),
    # At 90 ms 10 ms of compute are left: 20 ms at half speed, in which 20/4 = 5 ms of 12 are sent.
    "communication speeds up once compute is over": (
        ((90, 12),), {"slowdown": (2, 4)}, {"compute_end_ms": 110, "comm_end_ms": 117},
    ),
    # Bucket 1 is ready at progress 60, 20 past the start of an all-reduce that halves compute: 40 + 40.
    "moments inside a slowed stretch": (
        ((40, 50), (60, 1)), {"slowdown": (2, 1)}, {"ready_ms": [40, 80], "start_ms": [40, 90]},
    ),
    # Two equal buckets, 2 ms to copy each: ready 2 and 4 ms later; the first is back before the second.
    "copies in are part of the backward, the last is copied back alone": (
        ((50, 1), (100, 5)), {"copy_ms": 4}, {"ready_ms": [52, 104], "exposed_comm_ms": 4 + 5 + 2},
    ),
    "one bucket is copied with nothing to hide it": (
        ((100, 30),), {"copy_ms": 10}, {"exposed_comm_ms": 10 + 30 + 10},
    ),
    "without buckets": (
        (), {"copy_ms": 0},
        {"step_ms": 160, "exposed_comm_ms": 0, "comm_ms": 0, "comm_end_ms": 0, "compute_end_ms": 100},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_step_by_hand(name):
    buckets, given, expected = BY_HAND[name]
    compute, comm = given.get("slowdown", (1, 1))
    step = simulate(
        work(*buckets),
        COMPUTE,
        slowdown=Slowdown(compute=compute, comm=comm),
        copy_ms=given.get("copy_ms", 0),
    )
    assert {of: attributes(step, of) for of in expected} == {
        of: pytest.approx(v) for of, v in expected.items()
    }


def test_copies_back_wait_for_the_backward_and_run_on_after_the_last_all_reduce():
    """The large bucket is done at 61; the end of the backward, 110, is followed by 9 ms for it, then 1."""
    large = Work(num_bytes=9, ready_ms=50.0, comm_ms=2.0)
    small = Work(num_bytes=1, ready_ms=100.0, comm_ms=0.5)
    step = simulate([large, small], COMPUTE, copy_ms=10.0)
    assert step.comm_end_ms == pytest.approx(110.5)
    assert step.exposed_comm_ms == pytest.approx(10.0 + 10.0)


@pytest.mark.parametrize(("residual_ms", "exposed_ms"), [(3.0, 33.0), (-3.0, 27.0), (-50.0, 0.0)])
def test_a_residual_is_added_whole_but_shortens_no_compute(residual_ms, exposed_ms):
    step = simulate(work((100.0, 30.0)), COMPUTE, residual_ms=residual_ms)
    assert step.exposed_comm_ms == pytest.approx(exposed_ms)
    assert step.step_ms == pytest.approx(COMPUTE.total_ms + exposed_ms)


def test_work_is_a_layouts_bytes_its_last_gradient_and_the_time_of_what_is_sent():
    found = make_work(
        [100, 200, 400], [5.0, 3.0, 9.0], ((0, 1), (2,)), lambda sent: sent / 10, wire_share=0.5
    )
    assert [(w.num_bytes, w.ready_ms, w.comm_ms) for w in found] == [(300, 5.0, 15.0), (400, 9.0, 20.0)]
    assert [w.comm_ms for w in make_work([100], [5.0], ((0,),), lambda sent: sent / 10)] == [10.0]


def test_a_rank_that_takes_longer_takes_longer_everywhere():
    slow = COMPUTE.scaled(1.5)
    assert (slow.before_ms, slow.backward_ms, slow.after_ms) == (75.0, 150.0, 15.0)
    assert slow.total_ms == 240.0


@pytest.mark.parametrize(
    ("comm_ms", "ends"),
    [
        (10.0, (60.0, 75.0)),  # 30 ms beside compute, of which 15 are done
        (20.0, (90.0, 90.0)),  # exactly as long as what is left of compute
        (35.0, (105.0, 90.0)),  # 20 of them beside compute, then 15 alone
    ],
)
def test_one_step_of_the_event_simulation_by_hand(comm_ms, ends):
    """Of 60 ms 30 are done when the bucket is ready. Compute at 1/2, all-reduce at 1/3."""
    compute = Compute(before_ms=0.0, backward_ms=60.0, after_ms=0.0)
    step = simulate(work((30.0, comm_ms)), compute, slowdown=Slowdown(compute=2.0, comm=3.0))
    assert (step.comm_end_ms, step.compute_end_ms) == pytest.approx(ends)
    assert step.buckets[0].start_ms == 30.0


BUCKETS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 200)), min_size=1, max_size=12)
SLOWDOWNS = st.builds(lambda a, b: Slowdown(compute=a, comm=b), st.floats(1, 4), st.floats(1, 4))


@given(BUCKETS, SLOWDOWNS)
def test_bounds_of_any_step(buckets, slow):
    step = simulate(work(*buckets), COMPUTE, slowdown=slow)
    communication = sum(comm for _, comm in buckets)
    overlapped = min(communication * slow.comm, COMPUTE.backward_ms * slow.compute)
    assert step.exposed_comm_ms >= 0
    assert step.step_ms >= COMPUTE.total_ms - 1e-9
    assert step.step_ms >= COMPUTE.before_ms + max(r for r, _ in buckets) + buckets[-1][1] + 10 - 1e-6
    assert step.step_ms >= COMPUTE.before_ms + buckets[0][0] + communication + 10 - 1e-6
    # Never worse than all compute and all communication one after the other, what overlaps twice over.
    assert step.step_ms <= COMPUTE.total_ms + communication + overlapped + 1e-6
    undisturbed = simulate(work(*buckets), COMPUTE)
    assert undisturbed.step_ms <= COMPUTE.total_ms + communication + 1e-6, "overlap alone never costs"


@given(BUCKETS, SLOWDOWNS, st.floats(1, 10))
def test_more_bandwidth_is_never_slower(buckets, slow, factor):
    faster = [(ready, comm / factor) for ready, comm in buckets]
    slower_ms = simulate(work(*buckets), COMPUTE, slowdown=slow).step_ms
    assert simulate(work(*faster), COMPUTE, slowdown=slow).step_ms <= slower_ms + 1e-6


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


ONE_BUCKET = replace(
    SMALL,
    identity=replace(SMALL.identity, batch_per_device=10),
    slowest_spread=(),
    parameters=(Parameter(name="p", num_bytes=2**20, ready_ms=60.0),),
    forward_ms=(30.0,),
    backward_ms=(60.0,),
    optimizer_ms=(10.0,),
    allreduce=(AllReduceTimes(num_ranks=2, backend="nccl", points=((4096, (1e-3,)), (2**21, (2e-3,)))),),
)


def broken(calibration, name, most=64, **more):
    joined = None if name is None else network(name)
    asked = Scenario(num_devices=most, network=joined, **more)
    return predicted_line(calibration, asked, [most])


def test_the_break_is_the_first_count_below_and_no_other():
    """One MiB over 1 Gbit/s after the backward: about 8.7 ms x 2 (n - 1) / n, and 0.2 ms per doubling."""
    calibration = replace(ONE_BUCKET, parameters=(Parameter(name="p", num_bytes=3 * 2**19, ready_ms=60.0),))
    found = broken(calibration, "link:1gbit")
    first = found.broken_at
    scenarios = {n: Scenario(num_devices=n, network=network("link:1gbit")) for n in range(1, first + 1)}
    efficiency = {n: prediction.predict(calibration, s).efficiency.estimate for n, s in scenarios.items()}
    assert first > 4
    assert efficiency[first] < LEAST_EFFICIENCY <= min(efficiency[n] for n in range(1, first))
    assert f"what breaks it: {prediction.BANDWIDTH}, " in found.verdict


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({}, "link:100mbit", prediction.BANDWIDTH),
        ({"copy_ms": (40.0,)}, None, prediction.HANDLING),
        ({"residual_ms": (40.0,)}, None, prediction.HANDLING),
        ({"slowest_spread": (1.6,)}, None, prediction.RANK_SPREAD),
        ({"single_step_ms": (50.0,)}, None, prediction.BESIDE_OTHERS),
        ({"parameters": (Parameter(name="p", num_bytes=4, ready_ms=60.0),)}, "slow hops", prediction.LATENCY),
    ],
)
def test_each_cause_is_told_from_the_others(change, name, expected):
    calibration = replace(ONE_BUCKET, **change)
    slow = structs.replace(network("ib-100g"), name="slow hops", hop_ms=10.0)
    joined = slow if name == "slow hops" else None if name is None else network(name)
    found = predicted_line(calibration, Scenario(num_devices=64, network=joined), [64])
    assert f"what breaks it: {expected}, " in found.verdict
    assert f"breaks at {found.broken_at} GPUs, efficiency" in found.verdict


def test_what_is_lost_adds_up_to_the_step():
    calibration = replace(
        ONE_BUCKET, single_step_ms=(90.0,), slowest_spread=(1.1,), copy_ms=(0.5,), residual_ms=(3.0,)
    )
    p = prediction.predict(calibration, Scenario(num_devices=8, network=network("link:1gbit")))
    parts = p.lost
    names = ("bandwidth", "latency", "handling", "rank_spread", "sharing")
    assert sum(getattr(parts, f"{name}_ms") for name in names) == pytest.approx(p.step_ms.estimate - 90.0)
    assert sum(share for _, share in parts.shares_pct()) == pytest.approx(100)


def test_scaling_that_holds_is_said_to_hold():
    found = broken(ONE_BUCKET, None, most=4096)
    assert found.broken_at is None
    assert "stays at 80% or above up to 4096 GPUs" in found.verdict


def test_strong_scaling_breaks_at_a_count_that_divides_the_batch():
    found = broken(ONE_BUCKET, "link:100mbit", most=6, scaling="strong", batch_per_device=6)
    assert found.broken_at in {2, 3, 6}


def test_a_filled_curve_holds_powers_of_two_what_was_asked_and_the_break():
    asked = Scenario(num_devices=12, network=network("link:350mbit"))
    found = predicted_line(ONE_BUCKET, asked, [6, 12], fill=True)
    assert found.broken_at is not None
    counts = [p.num_devices for p in found.predictions]
    assert counts == sorted({1, 2, 4, 8, 6, 12, found.broken_at})
    assert [p.num_devices for p in found.predictions if p.asked] == [6, 12]


PARAMETERS = st.lists(
    st.tuples(st.sampled_from([512, 4096, 2**18, 2**20, 2**22]), st.floats(0, 10)), min_size=1, max_size=9
)


def model(parameters, points, **more):
    curve = tuple((size, (ms,)) for size, ms in points.items())
    return replace(
        ONE_BUCKET,
        parameters=tuple(Parameter(name="p", num_bytes=size, ready_ms=ready) for size, ready in parameters),
        forward_ms=(5.0,),
        backward_ms=(10.0,),
        optimizer_ms=(1.0,),
        allreduce=(AllReduceTimes(num_ranks=2, backend="gloo", points=curve),),
        **more,
    )


def every_layout(count):
    found = []
    for cuts in itertools.product((0, 1), repeat=count - 1):
        ends = [*(i + 1 for i, cut in enumerate(cuts) if cut), count]
        found.append(tuple(tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)))
    return found


@bounded(600)
@given(
    PARAMETERS, st.floats(0.001, 2), st.floats(1e-8, 5e-6), st.floats(1, 4), st.floats(1, 4),
    st.sampled_from([0.0, 0.3, 4.0]),
)  # fmt: skip
def test_no_layout_of_any_model_beats_the_bound(parameters, latency, rate, compute, comm, copy):
    points = {size: latency + size * rate for size in (512, 2**16, 2**22)}
    c = model(parameters, points, compute_slowdown=(compute,), comm_slowdown=(comm,), copy_ms=(copy,))
    sizes, ready = zip(*parameters, strict=True)
    curve = measured_curve(c.allreduce[0].points)
    steps = [
        simulate(
            make_work(sizes, ready, layout, curve), c.compute(), slowdown=c.slowdown(), copy_ms=copy
        ).step_ms
        for layout in every_layout(len(sizes))
    ]
    assert bound_ms(c) <= min(steps) + 1e-9


def test_the_bound_exposes_the_last_gradient():
    found = model([(4, 5.0), (4, 10.0)], {4: 2.0, 8: 2.5})
    assert bound_ms(found) == pytest.approx(5 + 10 + 2 + 1)


def test_without_communication_the_default_is_at_the_bound():
    free = model([(2**20, 5.0), (2**22, 10.0)], {4096: 1e-9, 2**25: 1e-9})
    assert bound(free) == (
        "Bound: by simulation no bucket layout has a step below 16 ms; that of DDP's default is 0% above it."
    )


def test_the_slowest_rank_and_what_is_missing_to_the_simulation_count():
    assert bound_ms(replace(SMALL, residual_ms=(7.0,))) == pytest.approx(bound_ms(SMALL) + 7)
    assert bound_ms(replace(SMALL, slowest_spread=(1.1,))) > bound_ms(SMALL)
