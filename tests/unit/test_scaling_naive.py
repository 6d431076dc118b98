"""The rules of thumb beside a prediction, against sums done by hand."""

from __future__ import annotations

import pytest
from test_scaling_predict import SMALL

from bench.scaling.naive import CONSTANT, LONGER, PERFECT, naive_ms
from bench.scaling.networks import network
from bench.scaling.scenario import Scenario
from bench.scaling.validate import HeldOut, beside
from bench.stats import Interval


def test_three_rules_of_thumb() -> None:
    # 40 ms forward, 80 ms backward, 5 ms optimizer; 36 MiB of gradients take 32.3 of the 60.5 ms of 64 MiB.
    found = naive_ms(SMALL, Scenario(num_devices=2), calibrated_ms=150.0)
    assert found == {PERFECT: 125.0, CONSTANT: 150.0, LONGER: 125.0}
    twice = naive_ms(SMALL, Scenario(num_devices=2, accumulate=2), calibrated_ms=150.0)
    assert twice == {PERFECT: 245.0, CONSTANT: 300.0, LONGER: 245.0}


def test_on_a_slow_link_communication_is_the_longer() -> None:
    slow = network("link:1gbit")
    found = naive_ms(SMALL, Scenario(num_devices=2, network=slow), calibrated_ms=150.0)
    wire_ms = 36 * 2**20 * 8 / 1e9 * 1000  # two ranks send every byte once each way
    assert found[LONGER] == pytest.approx(wire_ms, rel=0.1)
    half = naive_ms(SMALL, Scenario(num_devices=2, network=slow, comm_hook="fp16"), calibrated_ms=150.0)
    assert half[LONGER] == pytest.approx(found[LONGER] / 2, rel=0.1)


def test_their_errors_are_a_sentence() -> None:
    cases = [
        HeldOut("a", 2, "1", measured, Interval(100.0, 99.0, 101.0), {"perfect scaling": 50.0})
        for measured in (100.0, 80.0, 200.0)
    ]
    assert beside(cases) == (
        "Rules of thumb on the same cases, median and largest: perfect scaling 50% and 75%."
    )
    assert beside([HeldOut("a", 2, "1", 100.0, Interval(100.0, 99.0, 101.0))]) == ""
