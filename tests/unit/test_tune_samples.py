"""Races replayed on recorded sweeps: what `bench.tune` would have chosen in its time, and what it says.

A sweep measured every cap in every round; the race sees of a round only the caps that it has not dropped.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import pytest
from accuracy_tables import SINGLE, rounds
from commands import ROOT

from ddp_bench.bench.plan.resolve import PRESETS
from ddp_bench.bench.results.comparisons import FASTER, Comparison, compare_pairs
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.run.stop_rule import select_slowest
from ddp_bench.bench.stats.fit import FittedSteps
from ddp_bench.bench.stats.interval import Interval, compute_median_ratio

pytestmark = pytest.mark.campaign

PAGE = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
SWEPT = ("default", "0.5", "1", "5", "10", "25", "100")
RACED = tuple(str(PRESETS["tune"]["bucket_cap_mb"]).split(","))
SECONDS = 150.0
PREPARING_STEPS = 10
"""Of a case before its first block: construction, proof, warm-up."""
MARGIN = 0.01
STARTS = 6
"""Replays of a sweep, each from another of its rounds on."""


@dataclass(frozen=True)
class Sweep:
    """Of one setting: by round the step of `single`, and of every cap."""

    single_ms: ByRound
    step_ms: Mapping[str, ByRound]

    @property
    def best(self):
        return max(SWEPT, key=lambda cap: self.over(cap, "default").estimate)

    def over(self, cap, other):
        if cap == other:
            return Interval(1.0, 1.0, 1.0)
        # The batch is the same: rates are as steps are, the other way round.
        return compute_median_ratio(
            *({r: 1000 / ms for r, ms in self.step_ms[one].items()} for one in (cap, other))
        )


@dataclass(frozen=True)
class Raced:
    """What a replay answers, against its sweep."""

    sweep: Sweep
    comparisons: tuple[Comparison, ...]

    @property
    def winner(self):
        faster = [c for c in self.comparisons if c.answer == FASTER and not c.within_margin]
        return max(faster, key=lambda c: c.ratio.estimate, default=None)

    @property
    def choice(self):
        return self.winner.case_id if self.winner else "default"

    @property
    def of_the_best(self):
        return self.sweep.over(self.choice, self.sweep.best)


def sweeps():
    """By setting, of the runs in `tune/`."""
    found = {name.split("/")[1]: steps for name, steps in rounds().items() if name.startswith("tune/")}
    return {name: Sweep(steps[SINGLE], steps) for name, steps in sorted(found.items())}


def raced(sweep, start, caps=RACED):
    """Race the caps for as long as a tuning takes, or as the sweep has rounds."""
    steps = {cap: sweep.step_ms[cap] for cap in caps}
    visited = sorted(set.intersection(*map(set, steps.values())) & sweep.single_ms.keys())
    all_steps = (sweep.single_ms, *steps.values())
    left_s = SECONDS - PREPARING_STEPS * sum(median(found.values()) for found in all_steps) / 1000
    spent_s, pairs = 0.0, [(cap, "default") for cap in caps[1:]]
    live = list(caps)
    seen = {cap: {} for cap in caps}
    begin = start * len(visited) // STARTS
    for r in (*visited[begin:], *visited[:begin]):
        if spent_s >= left_s:
            break
        for cap in live:
            seen[cap][r] = steps[cap][r]
        spent_s += (sweep.single_ms[r] + sum(steps[cap][r] for cap in live)) / 1000
        rates = {cap: {n: 1000 / ms for n, ms in seen[cap].items()} for cap in live}
        out = select_slowest(pairs, rates, max(1 - spent_s / left_s, 0.0))
        live = [cap for cap in live if cap not in out]
    comparisons = compare_pairs(
        pairs,
        FittedSteps({(cap, "timed"): found for cap, found in seen.items() if found}),
        units=dict.fromkeys(caps, 1),
        margin=MARGIN,
    )
    return Raced(sweep, tuple(comparisons))


def replayed(caps=RACED):
    return {name: [raced(one, start, caps) for start in range(STARTS)] for name, one in sweeps().items()}


def slower(races):
    """Those whose choice is resolved to be slower than the best cap by more than the margin."""
    return [one for of in races.values() for one in of if one.of_the_best.high < 1 / (1 + MARGIN)]


@pytest.fixture(scope="module")
def races():
    return replayed()


def test_no_choice_is_slower_than_the_best_cap_by_more_than_the_margin(races):
    assert len(races) == 16
    assert slower(races) == []
    ratios = [one.of_the_best.estimate for of in races.values() for one in of]
    assert len(ratios) == 96
    assert min(ratios) >= 0.975
    assert sum(ratio >= 0.99 for ratio in ratios) == 83
    assert sum(of[0].of_the_best.estimate >= 0.99 for of in races.values()) == 12


def as_documented(race):
    """The cell of a setting, from its first replay."""
    best = race.sweep.best
    return race.choice if race.choice == best else f"{race.choice} ({best}: {race.of_the_best.estimate:.3f})"


def test_choices_and_ratios_are_those_that_the_documentation_tells(races):
    table = PAGE.partition("\n## tune\n")[2]
    told = {}
    for name, cells in re.findall(r"^\| (ResNet-\d+, \d hosts)[^|]*\|(.*)\|$", table, re.MULTILINE):
        told[name] = [cell.strip() for cell in cells.split("|")]
    rates = ("200mbit", "1gbit", "2gbit", "4gbit")
    found = {}
    for name, of in races.items():
        model, hosts, link = name.removeprefix("resnet").split("-")
        row = found.setdefault(f"ResNet-{model}, {hosts[0]} hosts", [""] * len(rates))
        row[rates.index(link)] = as_documented(of[0])
    assert told == found
