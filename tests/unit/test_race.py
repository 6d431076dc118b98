"""A race: which case is dropped when, what that is worth, and what stands in its place as a preset."""

import random

import pytest
from selection import in_campaign

from ddp_bench.bench.plan.resolve import fill_device_defaults, resolve
from ddp_bench.bench.results.comparisons import FASTER, SLOWER, compare_pairs
from ddp_bench.bench.run.stop_rule import FINAL_SHARE, MIN_RACE_ROUNDS, select_slowest
from ddp_bench.bench.stats.fit import FittedSteps

OF_FOUR = [(case, "default") for case in "abcd"]


def steps(ms, num_rounds=MIN_RACE_ROUNDS):
    """Throughput of steps of one image that take so many ms."""
    return {case: dict.fromkeys(range(1, num_rounds + 1), 1000 / value) for case, value in ms.items()}


SLOW_DEFAULT = steps({"default": 200.0, "a": 100.0, "b": 120.0, "c": 110.0, "d": 130.0})


def test_the_worst_is_dropped_first_and_the_default_never():
    assert not select_slowest(OF_FOUR, SLOW_DEFAULT, 1.0)
    assert select_slowest(OF_FOUR, SLOW_DEFAULT, 0.79) == {"d"}
    left = {case: SLOW_DEFAULT[case] for case in ("default", "a", "b", "c")}
    assert select_slowest(OF_FOUR, left, 0.6) == {"b"}
    assert not select_slowest(OF_FOUR, {case: left[case] for case in ("default", "a", "c")}, 0.0)
    assert select_slowest(OF_FOUR, SLOW_DEFAULT, FINAL_SHARE) == {"b", "d"}, "at once, where rounds are long"


def test_none_is_dropped_after_few_rounds_or_without_the_default():
    assert not select_slowest(
        OF_FOUR, steps({"default": 200.0, "a": 100.0, "b": 120.0}, MIN_RACE_ROUNDS - 1), 0.0
    )
    assert not select_slowest(OF_FOUR, steps({"a": 100.0, "b": 120.0, "c": 130.0}), 0.0)


def test_more_images_per_step_count():
    found = steps({"default": 100.0, "a": 150.0, "b": 90.0, "c": 80.0})
    found["a"] = {r: 2 * rate for r, rate in found["a"].items()}
    assert select_slowest(OF_FOUR[:3], found, 0.0) == {"b"}


def test_cases_race_against_their_own_reference_alone():
    """DDP's default may be slower than DP, and is still what the others are held against."""
    pairs = [("default", "dp"), *OF_FOUR, *((f"{case}8", "default8") for case in "abc")]
    found = SLOW_DEFAULT | steps({"dp": 10.0, "default8": 9.0, "a8": 9.0, "b8": 9.5, "c8": 8.0})
    assert select_slowest(pairs, found, 0.0) == {"b", "d", "b8"}


@pytest.mark.parametrize("tries", [50, *in_campaign(200)])
def test_the_winner_of_a_race_needs_no_fresh_rounds(tries):
    """Among five equal ones the run's comparisons find a difference in few races: they hold at once."""
    chance, wrong = random.Random(2), 0
    for _ in range(tries):
        rates = raced(dict.fromkeys(("default", *"abcd"), 100.0), 200, chance, together=0.05)
        ms = {(case, "timed"): {r: 1000 / rate for r, rate in found.items()} for case, found in rates.items()}
        comparisons = compare_pairs(OF_FOUR, FittedSteps(ms), units=dict.fromkeys(rates, 1), margin=0.01)
        wrong += any(one.answer in (FASTER, SLOWER) for one in comparisons)
    assert wrong <= 0.08 * tries, "5%, and what chance adds in so many tries"


def raced(truth, budget, chance, *, together):
    """Throughput by round until the steps are spent, each step with a noise of 5%."""
    live, spent, round_index = list(truth), 0, 0
    found = {case: {} for case in truth}
    while spent < budget:
        round_index += 1
        common = chance.gauss(1, together)
        for case in live:
            found[case][round_index] = 1000 / (truth[case] * common * chance.gauss(1, 0.05))
        spent += len(live)
        out = select_slowest(OF_FOUR, {case: found[case] for case in live}, 1 - spent / budget)
        live = [case for case in live if case not in out]
    return found


def test_the_preset_races_on_all_devices_at_once_and_is_overridden():
    asked = resolve({"comm_hook": "none,fp16", "margin": "2%"}, preset="tune")
    assert (asked.race, asked.modes, asked.sweep, asked.margin) == (True, ("ddp",), "star", 0.02)
    for given, max_time in ((asked, 130), (resolve({"rounds": "9"}, preset="tune"), None)):
        settings = fill_device_defaults(given, device_type="cpu", num_local_devices=6)
        assert (settings.gpus, settings.max_time) == ((6,), max_time)
