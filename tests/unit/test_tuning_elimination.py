"""Successive elimination: which case is dropped when, and what that is worth."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

import pytest

from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.stats import paired_ratio
from ddp_bench.bench.tune.answer import decide
from ddp_bench.bench.tune.candidates import Candidate
from ddp_bench.bench.tune.elimination import (
    FINAL_SHARE,
    LEAST_ROUNDS,
    Elimination,
    affordable,
    num_kept,
    rounds_of_finalists,
)


def steps(ms: Mapping[str, float], num_rounds: int) -> dict[str, dict[int, float]]:
    """Throughput of steps of one image that take so many ms."""
    return {case: dict.fromkeys(range(1, num_rounds + 1), 1000 / value) for case, value in ms.items()}


OF_FOUR = Elimination("default", ("a", "b", "c", "d"))


def test_the_worst_is_dropped_first_and_the_default_never() -> None:
    found = steps({"default": 200.0, "a": 100.0, "b": 120.0, "c": 110.0, "d": 130.0}, LEAST_ROUNDS)
    assert OF_FOUR.dropped(found, 1.0) == []
    assert OF_FOUR.dropped(found, 0.79) == ["d"]
    assert OF_FOUR.dropped({case: found[case] for case in ("default", "a", "b", "c")}, 0.6) == ["b"]
    assert OF_FOUR.dropped({case: found[case] for case in ("default", "a", "c")}, 0.0) == []


def test_several_are_dropped_at_once_where_rounds_are_long() -> None:
    found = steps({"default": 200.0, "a": 100.0, "b": 120.0, "c": 110.0, "d": 130.0}, LEAST_ROUNDS)
    assert OF_FOUR.dropped(found, FINAL_SHARE) == ["b", "d"]


def test_none_is_dropped_after_few_rounds() -> None:
    assert not OF_FOUR.dropped(steps({"default": 200.0, "a": 100.0, "b": 120.0}, LEAST_ROUNDS - 1), 0.0)


def test_without_rounds_of_the_default_none_is_dropped() -> None:
    assert not OF_FOUR.dropped(steps({"a": 100.0, "b": 120.0}, LEAST_ROUNDS), 0.0)


def test_more_images_per_step_count() -> None:
    elimination = Elimination("default", ("a", "b", "c"))
    found = steps({"default": 100.0, "a": 150.0, "b": 90.0, "c": 80.0}, LEAST_ROUNDS)
    found["a"] = {r: 2 * rate for r, rate in found["a"].items()}
    assert elimination.dropped(found, 0.0) == ["b"]


@pytest.mark.parametrize(
    ("left_share", "expected"), [(1.0, 4), (0.9, 4), (0.75, 3), (FINAL_SHARE, 2), (0.0, 2)]
)
def test_num_kept(left_share: float, expected: int) -> None:
    assert num_kept(4, left_share) == expected


@pytest.mark.parametrize("challengers", [1, 2, 4, 7])
def test_the_rounds_of_the_last_two_are_those_of_the_schedule(challengers: int) -> None:
    """Against the schedule walked in small steps of time, a step of a case costing one each."""
    ticks, rounds = 10_000, 0.0
    for tick in range(ticks):
        rounds += 1 / (1 + num_kept(challengers, 1 - tick / ticks))
    assert rounds_of_finalists(challengers) == pytest.approx(2 * rounds / ticks, rel=1e-3)


def test_elimination_gives_the_best_more_rounds_and_loses_it_no_more_often_than_even_turns() -> None:
    """In the same number of steps; gains of 0 to 5% in noise of 5% per step."""
    truth = {"default": 100.0, "a": 95.0, "b": 97.0, "c": 98.0, "d": 100.0}
    elimination = Elimination("default", tuple(case for case in truth if case != "default"))
    chance, budget, tries = random.Random(1), 150, 200
    eliminating = [_best_after(elimination, truth, budget, chance) for _ in range(tries)]
    even = [_best_after(None, truth, budget, chance) for _ in range(tries)]
    found, found_evenly = (sum(best == "a" for best, _ in every) for every in (eliminating, even))
    assert found > found_evenly - 3 * math.sqrt(tries * 2 * 0.12), "no worse by more than chance allows"
    assert found > 0.75 * tries
    assert mean(n for _, n in eliminating) >= 1.35 * mean(n for _, n in even)


def _best_after(
    elimination: Elimination | None, truth: Mapping[str, float], budget: int, chance: random.Random
) -> tuple[str, int]:
    """The best of an elimination, or of even turns, and its rounds."""
    live, spent, round_index = list(truth), 0, 0
    found: dict[str, dict[int, float]] = {case: {} for case in truth}
    while spent < budget:
        round_index += 1
        for case in live:
            found[case][round_index] = 1000 / (truth[case] * chance.gauss(1, 0.05))
        spent += len(live)
        if elimination is not None:
            out = elimination.dropped({case: found[case] for case in live}, 1 - spent / budget)
            live = [case for case in live if case not in out]
    rest = [case for case in live if case != "default"]
    best = max(rest, key=lambda case: paired_ratio(found[case], found["default"]).estimate)
    return best, len(found[best])


def layouts(*predicted_ms: float) -> list[Candidate]:
    return [
        Candidate(bucket_cap_mb=BucketCaps((float(i),)), kind="uniform" if i else "default", predicted_ms=ms)
        for i, ms in enumerate(predicted_ms)
    ]


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        (130.0, [0, 1, 2, 3]),  # 43 s to prepare; 24 rounds if 0.6 of the time is of three cases, 0.4 of four
        (125.0, [0, 1, 3]),  # the slowest goes: 31 s to prepare, 24 rounds of three cases in 75 s
        (100.0, [0, 3]),
        (1.0, [0, 3]),  # no answer without two
    ],
)
def test_as_many_layouts_as_there_is_time_for(seconds: float, kept: list[int]) -> None:
    """Of 1,000, 1,100, 1,200 and 1,000 ms."""
    found = affordable(layouts(1000, 1100, 1200, 1000), seconds=seconds)
    assert [int(c.bucket_cap_mb.mib[0]) for c in found] == kept


def test_what_was_asked_for_beside_the_layout_is_never_left_out() -> None:
    hook = Candidate(bucket_cap_mb=BucketCaps(), kind="default", comm_hook="fp16", predicted_ms=9000)
    assert affordable([*layouts(1000, 900), hook], seconds=1.0)[-1] is hook


def test_the_winner_of_an_elimination_needs_no_fresh_rounds() -> None:
    """Among five equal ones it finds a winner in at most 5% of tunings: all intervals hold at once."""
    chance, wrong, tries = random.Random(2), 0, 400
    found = [replace(candidate, bound_ms=90.0) for candidate in layouts(*[100.0] * 5)]
    names = {str(i): candidate for i, candidate in enumerate(found)}
    elimination = Elimination("0", tuple(list(names)[1:]))
    for _ in range(tries):
        rates = _eliminated(elimination, list(names), 200, chance)
        measured = {names[case]: by_round for case, by_round in rates.items()}
        wrong += decide(found, measured, dict.fromkeys(measured, 32)).changes
    assert wrong <= 0.05 * tries


def _eliminated(
    elimination: Elimination, live: list[str], budget: int, chance: random.Random
) -> dict[str, dict[int, float]]:
    """Throughput by round of equal cases until the steps are spent."""
    spent, round_index = 0, 0
    found: dict[str, dict[int, float]] = {case: {} for case in live}
    while spent < budget:
        round_index += 1
        common = chance.gauss(1, 0.05)
        for case in live:
            found[case][round_index] = 1000 / (100 * common * chance.gauss(1, 0.05))
        spent += len(live)
        out = elimination.dropped({case: found[case] for case in live}, 1 - spent / budget)
        live = [case for case in live if case not in out]
    return found
