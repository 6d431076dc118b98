"""Predictions against the committed lab runs, each from the calibration at 1 Gbit/s and the default cap."""

import json
from statistics import median

import pytest
from commands import ROOT

from ddp_bench.bench.predict import main as command
from ddp_bench.bench.predict.from_pass import read_source
from ddp_bench.bench.predict.held_out import held_out
from ddp_bench.bench.predict.networks import network
from ddp_bench.bench.results.store import load_run

pytestmark = pytest.mark.campaign

RUNS = ROOT / "results" / "samples" / "predictions"
OTHER_MACHINE = ROOT / "results" / "samples" / "predictions-epyc"
CALIBRATED = "1gbit"

DOCUMENTED = 1.8, 7.9
"""The median and the largest error, in percent."""


def judged(runs):
    found = {}
    for together in sorted(runs.iterdir()):
        source = read_source(together / CALIBRATED)
        for rate in sorted(together.iterdir()):
            same = rate.name == CALIBRATED
            for case in held_out(
                source.calibration,
                load_run(rate),
                fitted=source.fitted if same else None,
                network=None if same else network(f"link:{rate.name}"),
            ):
                found[together.name, rate.name, case.bucket_cap_mb] = case
    return found


@pytest.fixture(scope="module")
def cases():
    return judged(RUNS)


@pytest.fixture(scope="module")
def elsewhere():
    return judged(OTHER_MACHINE)


def test_no_case_is_off_by_more_than_eight_percent(cases):
    assert {name: case.error_pct for name, case in cases.items() if abs(case.error_pct) > 8} == {}


def test_half_of_the_cases_are_within_three_percent(cases):
    assert median(abs(case.error_pct) for case in cases.values()) <= 3


def test_a_machine_and_a_rate_that_the_simulation_had_never_seen(elsewhere):
    errors = [abs(case.error_pct) for case in elsewhere.values()]
    assert {rate for _, rate, _ in elsewhere} == {"1gbit", "2gbit", "4gbit"}
    assert len(errors) == 20
    assert median(errors) <= 3
    assert max(errors) <= 8
    inside = [
        case.predicted_ms.low <= case.measured_ms <= case.predicted_ms.high for case in elsewhere.values()
    ]
    assert all(inside)
    assert (round(median(errors), 1), round(max(errors), 1)) == (2.4, 5.8), "as documented"


def test_the_errors_are_those_that_the_documentation_tells(cases):
    """Who changes the simulation changes both."""
    assert len(cases) == 67
    sizes = [abs(case.error_pct) for case in cases.values()]
    assert (round(median(sizes), 1), round(max(sizes), 1)) == DOCUMENTED


def test_the_case_that_the_residual_was_fitted_to_is_never_held_out(capsys):
    folder = RUNS / "resnet18-2hosts" / CALIBRATED
    fitted = read_source(folder).fitted
    assert fitted.startswith("ddp-n2-capdefault-")
    assert command.main([str(folder), "--validate"]) == 0
    said = capsys.readouterr().out
    assert f" {fitted} " not in said
    assert " ddp-n2-cap100-" in said


def test_the_runs_are_of_one_machine_and_the_others_of_another():
    def machines(runs):
        environments = [
            json.loads(path.read_text())["environment"] for path in runs.glob("*/*/manifest.json")
        ]
        return {(e["cpu_model"], e["num_cores"]) for e in environments}

    assert len(machines(RUNS)) == len(machines(OTHER_MACHINE)) == 1
    assert machines(RUNS) != machines(OTHER_MACHINE)


def test_a_run_of_the_calibrated_case_alone_adds_none_and_is_refused_by_itself(capsys):
    together = RUNS / "resnet34-2hosts-slow"
    alone = [str(together / CALIBRATED), "--validate"]
    assert command.main(alone) == 2
    assert "no measured DDP case besides the one fitted to" in capsys.readouterr().err
    assert command.main([*alone, str(together / CALIBRATED), str(together / "200mbit")]) == 0
    assert "on 6 held-out cases" in capsys.readouterr().out
