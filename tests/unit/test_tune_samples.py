"""Races replayed on committed sweeps: what `bench.tune` would have chosen in its time, and what it says.

A sweep measured every cap in every round; the race sees of a round only the caps that it has not dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import pytest
from commands import ROOT

from ddp_bench.bench.resolve import PRESETS
from ddp_bench.bench.results.aggregate import images_per_s_by_round
from ddp_bench.bench.results.comparisons import FASTER, Comparison, compared
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.results.typical import Typical
from ddp_bench.bench.run.schedule import dropped
from ddp_bench.bench.stats import Interval, paired_ratio

pytestmark = pytest.mark.campaign

SETTINGS = ROOT / "results" / "samples" / "tune"
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
    """Of one setting: by round the step of `single`, and throughput and step of every cap."""

    single_ms: ByRound
    step_ms: Mapping[str, ByRound]
    rates: Mapping[str, ByRound]

    @property
    def best(self):
        return max(SWEPT, key=lambda cap: self.over(cap, "default").estimate)

    def over(self, cap, other):
        return paired_ratio(self.rates[cap], self.rates[other]) if cap != other else Interval(1.0, 1.0, 1.0)


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


def sweep_in(folder):
    run = load_run(folder / "sweep")
    rows = [row for row in run.cases.to_dict("records") if row["status"] == "ok"]
    steps = run.times.step_ms("timed")
    rates = images_per_s_by_round(run.times, {str(r["case_id"]): int(r["global_batch"]) for r in rows})
    ids = {str(r["bucket_cap_mb"]): str(r["case_id"]) for r in rows if r["mode"] == "ddp"}
    single = next(str(row["case_id"]) for row in rows if row["mode"] == "single")
    return Sweep(
        steps[single], {cap: steps[i] for cap, i in ids.items()}, {cap: rates[i] for cap, i in ids.items()}
    )


def raced(sweep, start):
    """Race the caps of the preset for as long as a tuning takes, or as the sweep has rounds."""
    steps = {cap: sweep.step_ms[cap] for cap in RACED}
    rounds = sorted(set.intersection(*map(set, steps.values())) & sweep.single_ms.keys())
    all_steps = (sweep.single_ms, *steps.values())
    left_s = SECONDS - PREPARING_STEPS * sum(median(found.values()) for found in all_steps) / 1000
    spent_s, pairs = 0.0, [(cap, "default") for cap in RACED[1:]]
    live = list(RACED)
    seen = {cap: {} for cap in RACED}
    begin = start * len(rounds) // STARTS
    for r in (*rounds[begin:], *rounds[:begin]):
        if spent_s >= left_s:
            break
        for cap in live:
            seen[cap][r] = steps[cap][r]
        spent_s += (sweep.single_ms[r] + sum(steps[cap][r] for cap in live)) / 1000
        rates = {cap: {n: 1000 / ms for n, ms in seen[cap].items()} for cap in live}
        out = dropped(pairs, rates, max(1 - spent_s / left_s, 0.0))
        live = [cap for cap in live if cap not in out]
    comparisons = compared(
        pairs,
        Typical({(cap, "timed"): found for cap, found in seen.items() if found}),
        units=dict.fromkeys(RACED, 1),
        num_rounds={cap: len(found) for cap, found in seen.items()},
        margin=MARGIN,
    )
    return Raced(sweep, tuple(comparisons))


@pytest.fixture(scope="module")
def races():
    sweeps = {folder.name: sweep_in(folder) for folder in sorted(SETTINGS.iterdir())}
    return {name: [raced(sweep, start) for start in range(STARTS)] for name, sweep in sweeps.items()}


def test_no_choice_is_slower_than_the_best_cap_by_more_than_the_margin(races):
    assert len(races) == 16
    slower = {n for n, of in races.items() for one in of if one.of_the_best.high < 1 / (1 + MARGIN)}
    assert slower == set()


def test_what_a_race_says_to_gain_is_gained_in_the_sweep(races):
    inside = [
        w.ratio.low <= one.sweep.over(w.case_id, "default").estimate <= w.ratio.high
        for of in races.values()
        for one in of
        if (w := one.winner) is not None
    ]
    assert len(inside) >= 0.4 * len(races) * STARTS
    assert all(inside)


def test_where_any_cap_gains_five_percent_the_choice_does(races):
    for name, of in races.items():
        if of[0].sweep.over(of[0].sweep.best, "default").estimate >= 1.05:
            assert all(one.sweep.over(one.choice, "default").estimate >= 1.04 for one in of), name


DOCUMENTED = {
    "resnet18-2hosts-1gbit": ("1", "1", 1.0),
    "resnet18-2hosts-200mbit": ("default", "1", 0.997),
    "resnet18-2hosts-2gbit": ("5", "1", 0.988),
    "resnet18-2hosts-4gbit": ("1", "10", 0.985),
    "resnet18-3hosts-1gbit": ("1", "0.5", 0.996),
    "resnet18-3hosts-2gbit": ("10", "10", 1.0),
    "resnet18-3hosts-4gbit": ("default", "10", 0.986),
    "resnet34-2hosts-1gbit": ("1", "1", 1.0),
    "resnet34-2hosts-200mbit": ("default", "1", 0.998),
    "resnet34-2hosts-2gbit": ("default", "25", 0.992),
    "resnet34-2hosts-4gbit": ("default", "default", 1.0),
    "resnet34-3hosts-1gbit": ("10", "1", 0.996),
    "resnet34-3hosts-2gbit": ("default", "10", 0.998),
    "resnet50-2hosts-1gbit": ("default", "0.5", 0.994),
    "resnet50-2hosts-2gbit": ("default", "1", 0.976),
    "resnet50-2hosts-4gbit": ("default", "default", 1.0),
}
"""By setting: the choice of the first replay, the best cap of the sweep, and the one's throughput over it."""


def test_choices_and_ratios_are_those_that_the_documentation_tells(races):
    found = {
        name: (of[0].choice, of[0].sweep.best, round(of[0].of_the_best.estimate, 3))
        for name, of in races.items()
    }
    assert found == DOCUMENTED
    every = [one for of in races.values() for one in of]
    assert (sum(one.of_the_best.estimate >= 0.99 for one in every), len(every)) == (83, 96)
