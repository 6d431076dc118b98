"""The committed choices of `bench.tune` against sweeps of the same settings, and what is told of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

from ddp_bench.bench.results.aggregate import images_per_s_by_round
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats import Interval, paired_ratio

pytestmark = pytest.mark.campaign

SETTINGS = ROOT / "results" / "samples" / "tune"
CAPS = ("default", "0.5", "1", "5", "10", "25", "100")
WITHIN = 0.99
GAIN = 1.05


@dataclass(frozen=True)
class Judged:
    """One setting: what `tune` answered, and by round the throughput of every cap in its sweep."""

    told: Mapping[str, Any]
    rates: Mapping[str, ByRound]

    @property
    def choice(self) -> str:
        return str(self.told["chosen"]["bucket_cap_mb"])

    @property
    def best(self) -> str:
        """Of the caps alone: the choice is no candidate for what it is held against."""
        return max(CAPS, key=lambda cap: self.over_default(cap).estimate)

    @property
    def of_the_best(self) -> Interval:
        return paired_ratio(self.rates[self.choice], self.rates[self.best])

    def over_default(self, cap: str) -> Interval:
        return paired_ratio(self.rates[cap], self.rates["default"])


def judged(folder: Path) -> Judged:
    run = load_run(folder / "sweep")
    rows = [row for row in run.cases.to_dict("records") if row["mode"] == "ddp" and row["status"] == "ok"]
    rates = images_per_s_by_round(run.blocks, {str(r["case_id"]): int(r["global_batch"]) for r in rows})
    told = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
    return Judged(told, {str(row["bucket_cap_mb"]): rates[str(row["case_id"])] for row in rows})


@pytest.fixture(scope="module")
def settings() -> dict[str, Judged]:
    return {folder.name: judged(folder) for folder in sorted(SETTINGS.iterdir())}


def test_nine_of_ten_choices_are_within_one_percent_of_the_best_cap(settings: dict[str, Judged]) -> None:
    assert len(settings) == 16
    assert sum(s.of_the_best.estimate >= WITHIN for s in settings.values()) >= 0.9 * len(settings)


def test_three_settings_gain_five_percent_over_the_default(settings: dict[str, Judged]) -> None:
    assert sum(s.over_default(s.choice).low >= GAIN for s in settings.values()) >= 3


def test_where_any_cap_gains_five_percent_the_choice_does(settings: dict[str, Judged]) -> None:
    for name, setting in settings.items():
        if setting.over_default(setting.best).estimate >= GAIN:
            assert setting.over_default(setting.choice).estimate >= GAIN, name


def test_it_says_so_where_nothing_is_gained(settings: dict[str, Judged]) -> None:
    kept = [s for s in settings.values() if s.choice == "default"]
    assert kept
    for setting in kept:
        assert "change nothing" in setting.told["answer"]


def test_what_it_gains_in_the_sweep_is_what_it_told(settings: dict[str, Judged]) -> None:
    outside = set()
    for name, setting in settings.items():
        said = Interval(**setting.told["chosen"]["throughput_over_default"])
        found = setting.over_default(setting.choice)
        assert max(said.low, found.low) <= min(said.high, found.high), f"{name}: the intervals do not meet"
        if not said.low <= found.estimate <= said.high:
            outside.add(name)
    assert outside == {"resnet50-2hosts-2gbit"}, "which the documentation names"


def test_no_tuning_took_three_minutes(settings: dict[str, Judged]) -> None:
    assert max(s.told["seconds"] for s in settings.values()) < 180


DOCUMENTED = {
    "resnet18-2hosts-200mbit": ("default", "1", 0.997),
    "resnet18-2hosts-1gbit": ("0.3", "1", 0.992),
    "resnet18-2hosts-2gbit": ("6", "1", 0.992),
    "resnet18-2hosts-4gbit": ("20", "10", 0.997),
    "resnet34-2hosts-200mbit": ("default", "1", 0.998),
    "resnet34-2hosts-1gbit": ("1", "1", 1),
    "resnet34-2hosts-2gbit": ("default", "25", 0.992),
    "resnet34-2hosts-4gbit": ("default", "default", 1),
    "resnet50-2hosts-1gbit": ("default", "0.5", 0.994),
    "resnet50-2hosts-2gbit": ("10", "1", 1.003),
    "resnet50-2hosts-4gbit": ("default", "default", 1),
    "resnet18-3hosts-1gbit": ("1", "0.5", 0.996),
    "resnet18-3hosts-2gbit": ("2", "10", 0.995),
    "resnet18-3hosts-4gbit": ("40", "10", 0.985),
    "resnet34-3hosts-1gbit": ("1", "1", 1),
    "resnet34-3hosts-2gbit": ("default", "10", 0.998),
}
"""The choice, the best cap of the sweep, and the one's throughput over the other's."""


def test_choices_and_ratios_are_those_that_the_documentation_tells(settings: dict[str, Judged]) -> None:
    found = {
        name: (setting.choice, setting.best, round(setting.of_the_best.estimate, 3))
        for name, setting in settings.items()
    }
    assert found == DOCUMENTED
