"""How often a whole run names a winner that is not there, and how often it misses one that is.

The noise is that of the recorded runs: their rounds, cases centred, labels swapped.
"""

import functools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accuracy_tables import SINGLE, rounds
from commands import ROOT

from ddp_bench.bench.plan.resolve import fill_device_defaults
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.results.comparisons import FASTER, SLOWER, compare_pairs
from ddp_bench.bench.results.journal import Completion, State
from ddp_bench.bench.results.round_times import RoundTimes, group_blocks
from ddp_bench.bench.results.tables import load_blocks
from ddp_bench.bench.run.stop_rule import StopRule, find_converged, is_interim_look
from ddp_bench.bench.stats.fit import FittedSteps

MARGIN = 0.05
MOST_ROUNDS = 80
STRETCH = 8
"""Rounds are taken from a recording so many at once: neighbours stay neighbours."""
RUNS = 2000
POWER_RUNS = 600


@functools.cache
def recordings():
    """Log step times less each case's median, rounds x cases, of every recorded run that is long enough."""
    blocks = load_blocks(ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts" / "blocks.csv", {})
    runs = [
        RoundTimes(group_blocks(blocks)).collect_step_ms("timed"),
        *(rounds()[name] for name in sorted(rounds(), key=Path)),
    ]
    found = []
    for timed in runs:
        cases = sorted(timed, key=lambda case: case if case == SINGLE else f"cap{case}-")
        visited = sorted(set.intersection(*(set(by_round) for by_round in timed.values())))
        if len(visited) >= STRETCH and len(timed) >= 3:
            x = np.log([[timed[case][r] for case in cases] for r in visited])
            found.append(x - np.median(x, axis=0))
    return found


def noise(rng, *, swap_every):
    """Rounds of a recording, its cases' labels swapped every so many rounds: no case differs from another."""
    x = recordings()[rng.integers(len(recordings()))]
    starts = rng.integers(len(x), size=MOST_ROUNDS // STRETCH)
    rows = ((starts[:, None] + np.arange(STRETCH)) % len(x)).ravel()
    swapped = [rng.permutation(x.shape[1]) for _ in range(MOST_ROUNDS // swap_every)]
    return x[rows[:, None], np.repeat(swapped, swap_every, axis=0)]


def run_of(log_ms):
    """Measure rounds as a run does: looks, cases that rest, stop by width, else after the last round.

    What it names, by case, why it stopped, and the number of rounds.
    """
    names = [f"c{i}" for i in range(log_ms.shape[1])]
    pairs = [(name, names[0]) for name in names[1:]]
    step_ms = {(name, "timed"): {} for name in names}
    settings = fill_device_defaults(Settings(margin=MARGIN), device_type="cpu", num_local_devices=2)
    recorder = SimpleNamespace(tables=SimpleNamespace(comparisons=[]), journal=SimpleNamespace(state=State()))
    rule = StopRule(settings, recorder, lambda: 0.0)
    resting = frozenset()
    for r, row in enumerate(log_ms, 1):
        for name, value in zip(names, row, strict=True):
            if name not in resting:
                step_ms[name, "timed"][r] = 100 * math.exp(value)
        if not is_interim_look(r):
            continue
        units = dict.fromkeys(names, 16)
        recorder.tables.comparisons = compare_pairs(pairs, FittedSteps(step_ms), units=units, margin=MARGIN)
        if reason := rule.explain_end(r):
            break
        resting = find_converged(recorder.tables.comparisons, {})
    answers = {one.case_id: one.answer for one in recorder.tables.comparisons}
    return {case: said for case, said in answers.items() if said in (FASTER, SLOWER)}, reason, r


def ends(num_runs, *, swap_every, slower=1.0):
    rng = np.random.default_rng([5, swap_every])
    for _ in range(num_runs):
        log_ms = noise(rng, swap_every=swap_every)
        log_ms[:, 1] += math.log(slower)
        yield run_of(log_ms)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("swap_every", [1, STRETCH])
def test_a_winner_that_is_not_there_is_named_in_six_of_a_hundred_runs_at_most(swap_every):
    found = list(ends(RUNS, swap_every=swap_every))
    wrong = sum(bool(named) for named, *_ in found)
    narrow = sum(reason == Completion.NARROW for _, reason, _ in found)
    num_rounds = np.mean([r for *_, r in found])
    print(f"{wrong} of {RUNS} name a winner; {narrow} stopped by width; {num_rounds:.0f} rounds")
    assert narrow > RUNS / 10, "or the stop rule was hardly tried"
    assert wrong <= 0.06 * RUNS


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("swap_every", [1, STRETCH])
def test_a_slow_down_of_a_tenth_is_named_where_the_run_stopped_by_width(swap_every):
    found = list(ends(POWER_RUNS, swap_every=swap_every, slower=1.1))
    narrow = [named for named, reason, _ in found if reason == Completion.NARROW]
    named = sum(one.get("c1") == SLOWER for one in narrow)
    print(f"{named} of {len(narrow)} runs that stopped by width, of {POWER_RUNS}, name it")
    assert len(narrow) > POWER_RUNS / 10
    assert named >= 0.9 * len(narrow)
    assert not any(one.get("c1") == FASTER for one, *_ in found)
