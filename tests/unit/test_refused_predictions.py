"""Predictions that are too wide to be shown: a reason in place of every figure, wherever they stand."""

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from test_scaling_predict import SMALL

from ddp_bench.bench.predict import main as command
from ddp_bench.bench.predict.calibration import save_calibration
from ddp_bench.bench.predict.held_out import HeldOut, error_sizes, model_error_pct
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.predict.prediction import MOST_HALF_WIDTH, is_exposed_refused, predict, refusal, width_of
from ddp_bench.bench.predict.scaling_limit import predicted_line
from ddp_bench.bench.predict.scenario import Scenario
from ddp_bench.bench.stats import Interval

pytestmark = pytest.mark.usefixtures("few_resamples")

TOO_WIDE = Interval(0.69, 0.02, 14.27)
"""As a user was shown it: 69% [2%, 1427%]."""


def noisy(spread, *, seed=1):
    """A calibration whose ranks, and backward passes, differ by that much on a log scale."""
    rng = np.random.default_rng(seed)
    return replace(
        SMALL,
        backward_ms=tuple(np.exp(rng.normal(4.4, spread, 6))),
        rank_spread=tuple(np.exp(rng.normal(0, spread, 12))),
    )


LARGE_ONLY = replace(SMALL, rank_spread=(1.0,) * 11 + (3.0,))
"""Two ranks seldom wait; how long many would is known from a single step."""


@pytest.fixture
def folder(tmp_path):
    save_calibration(tmp_path, LARGE_ONLY)
    return tmp_path


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (Interval(100.0, 50.0, 150.0), False),
        (Interval(100.0, 49.0, 150.0), True),
        (Interval(52.0, 1.2, 1140.0), True),
        (TOO_WIDE, True),
        (Interval(100.0, 0.0, np.inf), True),
        (Interval(0.0, 0.0, 0.0), False),
        (Interval(0.0, 0.0, 1.0), True),
    ],
)
def test_a_half_width_above_half_the_value_is_refused(figure, *, expected):
    assert (width_of(figure) > MOST_HALF_WIDTH) == expected
    assert (width_of(Interval(1.0, 0.9, 1.1), figure) > MOST_HALF_WIDTH) == expected


def test_little_exposed_communication_is_shown_though_its_share_is_wide():
    step = Interval(100.0, 98.0, 102.0)
    assert not is_exposed_refused(Interval(0.3, 0.0, 2.0), step)
    assert is_exposed_refused(Interval(20.0, 1.0, 60.0), step)


def test_the_reason_has_the_width_and_what_would_help():
    width = width_of(Interval(100.0, 10.0, 274.0))
    said = refusal(width)
    assert said == (
        "not predicted: the interval would be ±132%; calibrate longer with bench.run --calibrate, "
        "7.0 times the --max-time or --rounds"
    )
    assert "quieter machine" in refusal(9.0)
    assert "off by up to 80% on held-out cases" in refusal(0.9, error_pct=80.0)
    assert "unbounded" in refusal(float("inf"))


def test_a_noisy_calibration_is_named_with_what_is_extrapolated():
    p = predict(noisy(1.0), Scenario(num_devices=64))
    assert re.search(r"±\d+%; \d+ ms of \d+ ms are extrapolated rank spread of a noisy calib", p.reason)
    steady = predict(SMALL, Scenario(num_devices=64))
    assert (steady.reason, steady.caution) == ("", "")


def test_what_is_extrapolated_is_the_wait_beyond_that_of_the_calibrated_ranks():
    """Oracle: more ranks wait longer by that; the calibrated number by nothing."""
    calibration = replace(SMALL, rank_spread=(0.9, *(1.0,) * 20, 1.1, 1.2))
    two, many = (predict(calibration, Scenario(num_devices=n)) for n in (2, 64))
    assert two.extrapolated_ms == 0
    assert many.extrapolated_ms > 0
    assert many.extrapolated_ms == pytest.approx(many.wait_ms - two.wait_ms)


def test_some_refused_leave_the_others_and_no_figure_anywhere(folder, capsys):
    table, document = folder / "p.csv", folder / "p.json"
    given = [str(folder), "--gpus", "1,64", "--csv", str(table), "--out", str(document)]
    assert predict(LARGE_ONLY, Scenario(num_devices=64)).reason, "or nothing is tested here"
    assert command.main([*given, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    one, many = (p for p in whole["lines"][0]["predictions"] if p["asked"])
    assert one["reason"] == ""
    assert one["step_ms"]["estimate"] > 0
    assert many["reason"].startswith("not predicted: the interval would be ±")
    assert {many[name] for name in ("step_ms", "images_per_s", "efficiency", "exposed_comm_ms")} == {None}
    assert many["lost"] is many["timeline"] is many["extrapolated_ms"] is None
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[1]["reason"] == many["reason"]
    assert {rows[1][name] for name in ("step_ms_p50", "step_ms_low", "images_per_s", "efficiency")} == {""}
    found = Predictions.from_json(document.read_text())
    assert [p.step_ms is None for p in found.lines[0].predictions if p.asked] == [False, True]
    assert command.main(given) == 0
    said = capsys.readouterr().out
    assert "not predicted: the interval would be ±" in " ".join(said.split())
    for p in found.lines[0].predictions:
        assert (p.step_ms is None) == bool(p.reason)


def test_where_scaling_breaks_is_not_said_of_a_refused_prediction():
    found = predicted_line(LARGE_ONLY, Scenario(num_devices=64), [64])
    assert found.predictions[0].reason
    assert found.broken_at is None
    assert "where scaling breaks is not known; at " in found.verdict
    assert "efficiency" not in found.verdict


def test_nothing_to_show_is_one_line_and_status_2(folder, capsys):
    out = folder / "p.json"
    assert command.main([str(folder), "--gpus", "64,128", "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "not predicted: the interval would be ±" in said.err
    assert not out.exists()


def test_superlinear_values_that_were_measured_stay():
    """One device alone was slower than a rank of two: an efficiency above 1, and nothing clipped."""
    fast = replace(SMALL, single_step_ms=(200.0, 201.0, 199.0))
    p = predict(fast, Scenario(num_devices=2))
    assert p.reason == ""
    assert p.efficiency.estimate > 1
    assert p.efficiency.high > p.efficiency.estimate


def test_what_is_extrapolated_of_a_shown_step_is_a_caution(tmp_path, capsys):
    rng = np.random.default_rng(3)
    save_calibration(tmp_path, replace(SMALL, rank_spread=tuple(np.exp(rng.normal(0, 0.3, 300)))))
    assert command.main([str(tmp_path), "--gpus", "2,64"]) == 0
    cautions = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Caution: ")]
    (line,) = cautions
    found = re.fullmatch(
        r"Caution: on 64 devices (\d+) ms of (\d+) ms are extrapolated rank spread; "
        r"2 ranks were calibrated\.",
        line,
    )
    assert int(found[1]) > int(found[2]) / 5


def test_held_out_cases_that_are_not_predicted_have_no_error():
    known = HeldOut("a", 2, "25", 100.0, Interval(110.0, 100.0, 120.0))
    refused = HeldOut("b", 2, "25", 100.0, None, reason="not predicted")
    assert refused.error_pct is None
    assert error_sizes([known, refused]) == [pytest.approx(10.0)]
    assert model_error_pct([refused]) is None
