"""Where scaling breaks and what breaks it, on calibrations whose answer is known by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_bench.bench.scaling.calibration import AllReduceTimes, Calibration, Identity, Parameter
from ddp_bench.bench.scaling.networks import network
from ddp_bench.bench.scaling.predict import BANDWIDTH, BESIDE_OTHERS, HANDLING, LATENCY, RANK_SPREAD, predict
from ddp_bench.bench.scaling.scaling_limit import LEAST_EFFICIENCY, Curve, curve, sentence
from ddp_bench.bench.scaling.scenario import Scenario

MACHINE = Identity(
    arch="x", image_size=None, batch_per_device=10, precision="fp32", device_type="cuda",
    device_name="GPU", torch="2", host="h",
)  # fmt: skip
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


def broken(calibration: Calibration, name: str | None, most: int = 64, **more: object) -> Curve:
    joined = None if name is None else network(name)
    asked = Scenario(num_devices=most, network=joined, **more)  # type: ignore[arg-type]
    return curve(calibration, [predict(calibration, asked, resamples=2)])


def cause(found: Curve) -> str:
    assert found.broken is not None
    return found.broken.losses.shares_pct()[0][0]


def test_the_break_is_the_first_count_below_and_no_other() -> None:
    """One MiB over 1 Gbit/s after the backward: about 8.7 ms x 2 (n - 1) / n, and 0.2 ms per doubling."""
    calibration = replace(ONE_BUCKET, parameters=(Parameter(name="p", num_bytes=3 * 2**19, ready_ms=60.0),))
    found = broken(calibration, "link:1gbit")
    assert found.broken is not None
    first = found.broken.scenario.num_devices
    efficiency = {
        n: predict(calibration, Scenario(num_devices=n, network=network("link:1gbit"))).efficiency.estimate
        for n in range(1, first + 1)
    }
    assert first > 4
    assert efficiency[first] < LEAST_EFFICIENCY <= min(efficiency[n] for n in range(1, first))
    assert cause(found) == BANDWIDTH


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
def test_each_cause_is_told_from_the_others(change: dict[str, object], name: str, expected: str) -> None:
    calibration = replace(ONE_BUCKET, **change)  # type: ignore[arg-type]
    slow = replace(network("ib-100g"), name="slow hops", hop_ms=10.0)
    joined = slow if name == "slow hops" else None if name is None else network(name)
    asked = predict(calibration, Scenario(num_devices=64, network=joined), resamples=2)
    found = curve(calibration, [asked])
    assert cause(found) == expected
    said = sentence(found, where="it", device="GPU")
    assert f"what breaks it: {expected}, " in said
    assert found.broken is not None
    assert f"breaks at {found.broken.scenario.num_devices} GPUs, efficiency" in said


def test_what_is_lost_adds_up_to_the_step() -> None:
    calibration = replace(
        ONE_BUCKET, single_step_ms=(90.0,), rank_spread=(0.9, 1.0, 1.2), copy_ms=(0.5,), residual_ms=(3.0,)
    )
    p = predict(calibration, Scenario(num_devices=8, network=network("link:1gbit")))
    parts = p.losses
    total = sum(
        (parts.bandwidth_ms, parts.latency_ms, parts.handling_ms, parts.rank_spread_ms, parts.sharing_ms)
    )
    assert total == pytest.approx(p.step_ms.estimate - 90.0)
    assert sum(share for _, share in parts.shares_pct()) == pytest.approx(100)


def test_scaling_that_holds_is_said_to_hold() -> None:
    found = broken(ONE_BUCKET, None, most=4096)
    assert found.broken is None
    assert "stays at 80% or above up to 4096 GPUs" in sentence(found, where="it", device="GPU")


def test_one_device_is_the_device_alone() -> None:
    shared = replace(ONE_BUCKET, single_step_ms=(50.0,))
    assert predict(shared, Scenario(num_devices=1)).efficiency.estimate == pytest.approx(1.0)


def test_strong_scaling_breaks_at_a_count_that_divides_the_batch() -> None:
    found = broken(ONE_BUCKET, "link:100mbit", most=6, scaling="strong", batch_per_device=6)
    assert found.broken is not None
    assert found.broken.scenario.num_devices in {2, 3, 6}


def test_a_filled_curve_holds_powers_of_two_what_was_asked_and_the_break() -> None:
    joined = network("link:350mbit")
    asked = [predict(ONE_BUCKET, Scenario(num_devices=n, network=joined), resamples=2) for n in (6, 12)]
    found = curve(ONE_BUCKET, asked, fill=True)
    assert found.broken is not None
    counts = {p.scenario.num_devices for p in found.predictions}
    assert counts == {1, 2, 4, 8, 6, 12, found.broken.scenario.num_devices}
