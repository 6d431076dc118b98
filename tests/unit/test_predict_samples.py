"""Predictions against the committed lab runs, which nothing but their own calibration was fitted to."""

from __future__ import annotations

import json
from statistics import median

import pytest
from commands import ROOT

from bench.prediction.source import read_source
from bench.records.store import load_run
from bench.scaling.networks import network
from bench.scaling.validate import HeldOut, held_out

RUNS = ROOT / "results" / "samples" / "predict-resnet18-2hosts"


@pytest.fixture(scope="module")
def cases() -> list[HeldOut]:
    calibration = read_source(RUNS / "calibrated-1gbit").calibration
    found = []
    for rate in ("200mbit", "1gbit", "4gbit"):
        other = None if rate == calibration.identity.link else network(f"link:{rate}")
        found += held_out(calibration, load_run(RUNS / rate), fitted=None, network=other)
    return found


def test_no_case_is_off_by_more_than_eight_percent(cases: list[HeldOut]) -> None:
    assert len(cases) == 18
    assert max(abs(case.error_pct) for case in cases) <= 8


def test_every_rule_of_thumb_errs_more(cases: list[HeldOut]) -> None:
    ours = median(abs(case.error_pct) for case in cases)
    for rule in cases[0].naive_ms:
        assert median(abs(case.naive_error_pct(rule)) for case in cases) > 3 * ours, rule


def test_the_runs_are_of_one_machine() -> None:
    environments = [json.loads(path.read_text())["environment"] for path in RUNS.glob("*/manifest.json")]
    assert len({(e["cpu_model"], e["num_cores"]) for e in environments}) == 1
