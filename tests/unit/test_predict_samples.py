"""Predictions against the committed lab runs, each from a calibration at 1 Gbit/s and the default cap."""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median

import pytest
from commands import ROOT

from bench import predict as command
from bench.errors import USAGE_EXIT_CODE
from bench.prediction.source import read_source
from bench.records.store import load_run
from bench.scaling.networks import network
from bench.scaling.validate import HeldOut, held_out

RUNS = ROOT / "results" / "samples" / "predictions"

OUTSIDE = {
    ("resnet18-2hosts-4gbit", "2"),
    ("resnet18-2hosts-4gbit", "10"),
    ("resnet18-3hosts-1gbit", "2"),
    ("resnet18-3hosts-1gbit", "5"),
}
"""The cases that miss the aim of 8%, as the README says."""


@pytest.fixture(scope="module")
def cases() -> Mapping[tuple[str, str], HeldOut]:
    found = {}
    for setting in sorted(RUNS.iterdir()):
        calibration = read_source(setting / "calibrated").calibration
        rate = setting.name.split("-")[-1]
        other = None if rate == calibration.identity.link else network(f"link:{rate}")
        for case in held_out(calibration, load_run(setting / "measured"), fitted=None, network=other):
            found[setting.name, case.bucket_cap_mb] = case
    return found


def test_no_case_but_the_known_ones_is_off_by_more_than_eight_percent(
    cases: Mapping[tuple[str, str], HeldOut],
) -> None:
    assert {name for name, case in cases.items() if abs(case.error_pct) > 8} == OUTSIDE


def test_half_of_the_cases_are_within_three_percent(cases: Mapping[tuple[str, str], HeldOut]) -> None:
    assert len(cases) == 56
    assert median(abs(case.error_pct) for case in cases.values()) <= 3


def test_every_rule_of_thumb_errs_more(cases: Mapping[tuple[str, str], HeldOut]) -> None:
    found = list(cases.values())
    ours = median(abs(case.error_pct) for case in found)
    for rule in found[0].naive_ms:
        assert median(abs(case.naive_error_pct(rule)) for case in found) > 3 * ours, rule


def test_the_case_that_the_residual_was_fitted_to_is_never_held_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RUNS / "resnet18-2hosts-1gbit" / "calibrated"
    fitted = read_source(folder).fitted
    assert fitted is not None
    assert fitted.startswith("ddp-n2-capdefault-")
    assert command.main([str(folder), "--validate"]) == USAGE_EXIT_CODE
    assert "no measured DDP case besides the one fitted to" in capsys.readouterr().err


def test_the_runs_are_of_one_machine() -> None:
    environments = [json.loads(path.read_text())["environment"] for path in RUNS.glob("*/*/manifest.json")]
    assert len({(e["cpu_model"], e["num_cores"]) for e in environments}) == 1
