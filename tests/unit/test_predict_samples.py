"""Predictions against the committed lab runs, each from a calibration at 1 Gbit/s and the default cap."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median

import pytest
from commands import ROOT

from bench import predict as command
from bench.errors import USAGE_EXIT_CODE
from bench.prediction.source import read_source
from bench.records.store import load_run
from bench.scaling.naive import CONSTANT, LONGER, PERFECT
from bench.scaling.networks import network
from bench.scaling.validate import HeldOut, held_out

RUNS = ROOT / "results" / "samples" / "predictions"

OUTSIDE = {
    *(("resnet18-2hosts-4gbit", cap) for cap in ("default", "10", "25")),
    *(("resnet18-3hosts-1gbit", cap) for cap in ("default", "1", "2", "25")),
    *(("resnet18-3hosts-4gbit", cap) for cap in ("default", "0.5", "1", "5", "10", "25", "100")),
}
"""The cases that miss the aim of 8%, as the README says."""

OUTSIDE_AT_ITS_PACE = {("resnet18-3hosts-1gbit", "1")}
"""Those that miss it although compute is taken as fast as it was then."""


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


def paced(cases: Mapping[tuple[str, str], HeldOut]) -> dict[tuple[str, str], float]:
    return {name: c.paced_error_pct for name, c in cases.items() if c.paced_error_pct is not None}


def test_no_case_but_the_known_ones_is_off_by_more_than_eight_percent(
    cases: Mapping[tuple[str, str], HeldOut],
) -> None:
    assert {name for name, case in cases.items() if abs(case.error_pct) > 8} == OUTSIDE


@pytest.mark.xfail(strict=True, reason="the aim is missed: the median is 3.5% (README)")
def test_half_of_the_cases_are_within_three_percent(cases: Mapping[tuple[str, str], HeldOut]) -> None:
    assert median(abs(case.error_pct) for case in cases.values()) <= 3


def test_at_the_pace_of_the_machine_no_case_but_the_known_is_off_by_more_than_eight_percent(
    cases: Mapping[tuple[str, str], HeldOut],
) -> None:
    assert {name for name, error in paced(cases).items() if abs(error) > 8} == OUTSIDE_AT_ITS_PACE


def test_at_the_pace_of_the_machine_half_of_the_cases_are_within_three_percent(
    cases: Mapping[tuple[str, str], HeldOut],
) -> None:
    assert median(map(abs, paced(cases).values())) <= 3


def test_the_readme_has_the_errors_as_they_are(cases: Mapping[tuple[str, str], HeldOut]) -> None:
    assert len(cases) == 67

    def said(errors: Sequence[float], digits: int) -> str:
        sizes = [abs(error) for error in errors]
        return f"{median(sizes):.{digits}f} / {max(sizes):.{digits}f}%"

    found = list(cases.values())
    expected = [
        f"all {len(found)} cases",
        said([case.error_pct for case in found], 1),
        said(list(paced(cases).values()), 1),
        *(said([case.naive_error_pct(rule) for case in found], 0) for rule in (LONGER, CONSTANT, PERFECT)),
    ]
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("| all "))
    assert [cell.strip() for cell in row.strip("|").split("|")] == expected


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
