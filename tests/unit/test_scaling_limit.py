"""Where scaling breaks and what breaks it; the step that no layout can beat."""

import itertools
from dataclasses import replace

import pytest
from fuzzing import bounded
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_scaling_predict import SMALL

from ddp_bench.bench.predict.allreduce import measured_curve
from ddp_bench.bench.predict.bound import bound, bound_ms
from ddp_bench.bench.predict.calibration import AllReduceTimes, Calibration, Identity, Parameter
from ddp_bench.bench.predict.networks import network
from ddp_bench.bench.predict.prediction import (
    BANDWIDTH,
    BESIDE_OTHERS,
    HANDLING,
    LATENCY,
    RANK_SPREAD,
    predict,
)
from ddp_bench.bench.predict.scaling_limit import LEAST_EFFICIENCY, predicted_line
from ddp_bench.bench.predict.scenario import Scenario
from ddp_bench.bench.predict.timeline import make_work, simulate

MACHINE = Identity(
    arch="x", image_size=None, batch_per_device=10, precision="fp32", device_type="cuda",
    device_name="GPU", torch="2", host="h",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("few_resamples")

ONE_BUCKET = Calibration(
    identity=MACHINE,
    num_ranks=2,
    num_nodes=1,
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
    assert first is not None
    efficiency = {
        n: predict(calibration, Scenario(num_devices=n, network=network("link:1gbit"))).efficiency.estimate
        for n in range(1, first + 1)
    }
    assert first > 4
    assert efficiency[first] < LEAST_EFFICIENCY <= min(efficiency[n] for n in range(1, first))
    assert f"what breaks it: {BANDWIDTH}, " in found.verdict


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({}, "link:100mbit", BANDWIDTH),
        ({"copy_ms": (40.0,)}, None, HANDLING),
        ({"residual_ms": (40.0,)}, None, HANDLING),
        ({"rank_spread": (1.0,) * 9 + (1.6,)}, None, RANK_SPREAD),
        ({"single_step_ms": (50.0,)}, None, BESIDE_OTHERS),
        ({"parameters": (Parameter(name="p", num_bytes=4, ready_ms=60.0),)}, "slow hops", LATENCY),
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
        ONE_BUCKET, single_step_ms=(90.0,), rank_spread=(0.9, 1.0, 1.2), copy_ms=(0.5,), residual_ms=(3.0,)
    )
    p = predict(calibration, Scenario(num_devices=8, network=network("link:1gbit")))
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
    assert bound(free).sentence == (
        "Bound: by simulation no bucket layout has a step below 16 ms; that of DDP's default is 0% above it."
    )


def test_the_slowest_rank_and_what_is_missing_to_the_simulation_count():
    assert bound_ms(replace(SMALL, residual_ms=(7.0,))) == pytest.approx(bound_ms(SMALL) + 7)
    assert bound_ms(replace(SMALL, rank_spread=(1.1,))) > bound_ms(replace(SMALL, rank_spread=()))
