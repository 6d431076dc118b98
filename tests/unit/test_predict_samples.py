"""Predictions against the committed lab runs, each from the calibration at 1 Gbit/s and the default cap."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median

import pytest
from commands import ROOT

from bench import predict as command
from bench.prediction.source import read_source
from bench.records.store import load_run
from bench.scaling.naive import CONSTANT, LONGER, PERFECT
from bench.scaling.networks import network
from bench.scaling.validate import HeldOut, held_out

RUNS = ROOT / "results" / "samples" / "predictions"
CALIBRATED = "1gbit"


@pytest.fixture(scope="module")
def cases() -> Mapping[tuple[str, str, str], HeldOut]:
    found = {}
    for together in sorted(RUNS.iterdir()):
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


def test_no_case_is_off_by_more_than_eight_percent(cases: Mapping[tuple[str, str, str], HeldOut]) -> None:
    assert {name: case.error_pct for name, case in cases.items() if abs(case.error_pct) > 8} == {}


def test_half_of_the_cases_are_within_three_percent(cases: Mapping[tuple[str, str, str], HeldOut]) -> None:
    assert median(abs(case.error_pct) for case in cases.values()) <= 3


def test_the_readme_has_the_errors_as_they_are(cases: Mapping[tuple[str, str, str], HeldOut]) -> None:
    assert len(cases) == 67

    def said(errors: Sequence[float], digits: int) -> str:
        sizes = [abs(error) for error in errors]
        return f"{median(sizes):.{digits}f} / {max(sizes):.{digits}f}%"

    found = list(cases.values())
    expected = [
        f"all {len(found)} cases",
        said([case.error_pct for case in found], 1),
        *(said([case.naive_error_pct(rule) for case in found], 0) for rule in (LONGER, CONSTANT, PERFECT)),
    ]
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("| all "))
    assert [cell.strip() for cell in row.strip("|").split("|")] == expected


def test_every_rule_of_thumb_errs_more(cases: Mapping[tuple[str, str, str], HeldOut]) -> None:
    found = list(cases.values())
    ours = median(abs(case.error_pct) for case in found)
    for rule in found[0].naive_ms:
        assert median(abs(case.naive_error_pct(rule)) for case in found) > 3 * ours, rule


def test_the_case_that_the_residual_was_fitted_to_is_never_held_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RUNS / "resnet18-2hosts" / CALIBRATED
    fitted = read_source(folder).fitted
    assert fitted is not None
    assert fitted.startswith("ddp-n2-capdefault-")
    assert command.main([str(folder), "--validate"]) == 0
    said = capsys.readouterr().out
    assert f" {fitted} " not in said
    assert " ddp-n2-cap100-" in said


def test_the_runs_are_of_one_machine() -> None:
    environments = [json.loads(path.read_text())["environment"] for path in RUNS.glob("*/*/manifest.json")]
    assert len({(e["cpu_model"], e["num_cores"]) for e in environments}) == 1


def test_a_run_of_the_calibrated_case_alone_adds_none_and_is_refused_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    together = RUNS / "resnet34-2hosts-slow"
    alone = [str(together / CALIBRATED), "--validate"]
    assert command.main(alone) == 2
    assert "no measured DDP case besides the one fitted to" in capsys.readouterr().err
    assert command.main([*alone, str(together / CALIBRATED), str(together / "200mbit")]) == 0
    assert "on 6 held-out cases" in capsys.readouterr().out
