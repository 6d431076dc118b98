"""The section of predictions: what it draws, beside which measured points, and what it refuses."""

import json
from dataclasses import replace

import pytest
from commands import ROOT
from report_runs import dashed, drawn

from ddp_bench.bench.predict.calibration import Identity
from ddp_bench.bench.predict.held_out import HeldOut
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.predict.prediction import Losses, Prediction
from ddp_bench.bench.predict.scaling_limit import Line
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats import Interval
from ddp_bench.report import main as command
from ddp_bench.report.predicted import predicted

pytestmark = pytest.mark.usefixtures("few_resamples")

SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"
RUN = load_run(SAMPLE)


REASON = "not predicted: the interval would be \N{PLUS-MINUS SIGN}132%"
NOTHING = dict.fromkeys(("step_ms", "images_per_s", "efficiency", "exposed_comm_ms", "lost"))


def wide(value):
    return Interval(value, 0.9 * value, 1.2 * value)


WAITING = Losses(bandwidth_ms=2.0, latency_ms=0.0, handling_ms=0.0, rank_spread_ms=1.0, sharing_ms=0.0)


def at(num_devices, efficiency, *, asked=True):
    return Prediction(
        num_devices=num_devices, asked=asked, step_ms=wide(200 / efficiency), num_buckets=3, lost=WAITING,
        network="ib-100g", bucket_cap_mb="default", scaling="weak", batch_size=16, comm_hook="none",
        accumulate=1, unit="images",
        images_per_s=wide(80 * num_devices * efficiency), efficiency=wide(efficiency),
        exposed_comm_ms=wide(10.0),
    )  # fmt: skip


def made(**more):
    line = Line(
        broken_at=32, verdict="On ib-100g scaling breaks at 32.",
        predictions=(at(1, 1.0, asked=False), at(32, 0.75, asked=False), at(64, 0.7)),
    )  # fmt: skip
    case = RUN.cases[(RUN.cases["mode"] == "ddp") & (RUN.cases["status"] == "ok")].iloc[0]
    cpu = RUN.manifest.environment
    identity = Identity(
        arch="resnet18", image_size=64, batch_per_device=16, precision="fp32", device_type="cpu",
        device_name=case["device_name"], torch="2.15.0", link="1gbit",
        host=f"{cpu.cpu_model} x {cpu.num_cores}, 0 GPUs",
    )  # fmt: skip
    outlook = Predictions(
        identity=identity, fitted=None, rule="the rule", notes=("Network: x; assumed: y.",), lines=(line,),
        validation=tuple(
            HeldOut(f"case-{error}", 2, "25", 100.0, wide(100.0 + error)) for error in (-1.0, 2.0, 6.0)
        ),
    )  # fmt: skip
    return replace(outlook, **more)


def line(figure, label):
    """Places and values of a line whose name begins so."""
    ((_, lines),) = drawn(figure)
    found = next((marks for name, marks in lines.items() if name.startswith(label)), [])
    return [(mark.x, pytest.approx(mark.y)) for mark in found]


def test_throughput_and_efficiency_with_measured_points_area_ideal_and_break():
    throughput, efficiency = predicted(RUN, made(), key="k").figures
    assert line(efficiency, "ib-100g") == [(1, 100.0), (32, 75.0), (64, 70.0)]
    assert line(efficiency, "breaks") == [(32, 75.0)]
    assert line(throughput, "ideal")[-1] == (64, 80 * 64)
    ddp = RUN.cases[(RUN.cases["bucket_cap_mb"] == "default") & (RUN.cases["mode"] == "ddp")]
    case = ddp[ddp["num_devices"] == 2].iloc[0]
    assert line(throughput, "measured") == [(2, case["images_per_s"])]
    assert dashed("Predicted on 64 CPU cores: ib-100g 70 (63--84)%") in efficiency.alt
    assert "On ib-100g scaling breaks at 32." in efficiency.alt
    assert "Scaling breaks on ib-100g at 32 CPU cores." in throughput.alt
    for figure in (throughput, efficiency):
        assert "fill-opacity" in figure.svg()


def test_a_line_that_does_not_break_has_no_cross():
    whole = replace(made().lines[0], broken_at=None)
    throughput, efficiency = predicted(RUN, made(lines=(whole,)), key="k").figures
    assert line(efficiency, "breaks") == []
    assert "Scaling breaks on ib-100g nowhere." in throughput.caption


def test_only_what_was_asked_is_tabled_and_errors_have_their_median_and_worst():
    predictions, errors = predicted(RUN, made(), key="k").tables
    assert [row[:3] for row in predictions.rows] == [("ib-100g", "default", "64")]
    assert [row[-1] for row in errors.rows] == ["-1.0%", "+2.0%", "+6.0%"]
    assert errors.below == ("Median error 2.0%, worst 6.0%, without signs.",)


def test_errors_over_several_links_say_which():
    cases = tuple(
        HeldOut("case", 2, "25", 100.0, Interval(101.0, 90.0, 110.0), network=link)
        for link in ("1gbit", "4gbit")
    )
    errors = predicted(RUN, made(validation=cases), key="k").tables[-1]
    assert errors.columns[0].name == "Link"
    assert [row[0] for row in errors.rows] == ["1gbit", "4gbit"]
    assert all(len(row) == len(errors.columns) for row in errors.rows)


def test_assumptions_stand_below_the_predictions_and_the_error_is_said_once():
    """The document says whether its error was measured; the page has no word of its own on that."""
    shown = predicted(RUN, made(validation=None), key="k")
    assert shown.tables[0].below == ("Network: x; assumed: y.",)
    assert len(shown.tables) == 1
    assert not any("was not measured" in note for note in shown.notes)


def test_errors_without_predictions_keep_their_notes():
    shown = predicted(RUN, made(lines=()), key="k")
    assert "Network: x; assumed: y." in shown.notes
    assert not shown.figures
    assert [table.title for table in shown.tables] == ["Error of the predictions"]


def test_predictions_from_another_machine_are_drawn_without_measured_points_and_say_so():
    other = replace(made().identity, torch="1.0")
    shown = predicted(RUN, made(identity=other), key="k")
    assert line(shown.figures[0], "measured") == []
    assert "The calibration is not of this run: torch '1.0' is not '2.15.0'." in shown.notes


def test_the_document_survives_its_file_and_is_drawn_on_the_page(tmp_path):
    path, page = tmp_path / "p.json", tmp_path / "r.html"
    path.write_text(made().to_json())
    assert Predictions.from_json(path.read_text()) == made()
    assert command.main([str(SAMPLE), "--predictions", str(path), "--out", str(page)]) == 0
    html = page.read_text()
    assert "On hardware you do not have" in html
    assert 'id="run1-predicted-1-efficiency"' in html


def _without_reason():
    line = json.loads(made().to_json())["lines"][0]
    line["predictions"][0] |= NOTHING
    return line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no predictions"),
        (json.dumps({**json.loads(made().to_json()), "schema_version": 9}), "schema 9"),
        (made().to_json().replace('"rank_spread_ms": 1.0', '"rank_spread_ms": "x"'), "holds no predictions"),
        (
            json.dumps({**json.loads(made().to_json()), "lines": [_without_reason()]}),
            "neither figures nor a reason",
        ),
        (made().to_json().replace('"broken_at": 32', '"broken_at": 33'), "breaks where it has no prediction"),
        (made().to_json().replace('"measured_ms": 100.0', '"measured_ms": 0'), "measured_ms"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, message, capsys):
    path = tmp_path / "p.json"
    path.write_text(text)
    out = str(tmp_path / "r.html")
    assert command.main([str(SAMPLE), "--predictions", str(path), "--out", out]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_predictions_belong_to_one_run(capsys):
    assert command.main([str(SAMPLE), str(SAMPLE), "--predictions", "p.json", "--out", "r.html"]) == 2
    assert "with one run" in capsys.readouterr().err


def test_a_refused_prediction_is_a_reason_in_the_table_and_nothing_in_the_figures():
    first = made().lines[0]
    refused = replace(first.predictions[-1], reason=f"{REASON}; calibrate longer", **NOTHING)
    lines = (replace(first, predictions=(*first.predictions[:-1], refused)),)
    shown = predicted(RUN, made(lines=lines), key="k")
    table = shown.tables[0]
    assert table.rows == (("ib-100g", "default", "64", "not predicted", "", "", "", ""),)
    assert table.below[0] == f"ib-100g, bucket cap default, 64 devices: {REASON}; calibrate longer."
    for figure in shown.figures:
        assert [x for x, _ in line(figure, "ib-100g")] == [1, 32]
        assert "Predicted on 32 CPU cores" in figure.caption


def test_a_break_that_is_not_known_is_not_said_to_be_nowhere():
    first = made().lines[0]
    refused = replace(first.predictions[-1], reason=REASON, **NOTHING)
    unknown = replace(first, predictions=(*first.predictions[:-1], refused), broken_at=None)
    throughput = predicted(RUN, made(lines=(unknown,)), key="k").figures[0]
    assert "Scaling breaks on ib-100g at a count that is not known." in throughput.caption


def test_a_line_of_nothing_but_refused_predictions_has_no_figure():
    first = made().lines[0]
    refused = replace(first.predictions[-1], reason=REASON, **NOTHING)
    lines = (replace(first, predictions=(refused,), broken_at=None),)
    shown = predicted(RUN, made(lines=lines), key="k")
    assert not shown.figures
    assert shown.tables[0].rows[0][3] == "not predicted"
