"""Predictions beside the run that was calibrated. Their words are recorded."""

import json
from dataclasses import replace

import pytest
from recorded_pages import SAMPLE, predictions
from report_runs import drawn

from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.report.main import main as report_command
from ddp_bench.report.predicted import make_prediction_section

RUN = load_run(SAMPLE)
HELD_OUT = predictions().validation[0]


def section(**more):
    return make_prediction_section(RUN, predictions(**more))


def test_predictions_are_drawn_beside_what_the_same_machine_measured():
    lines = drawn(*section().figures)
    measured = next(marks for name, marks in lines.items() if name.startswith("measured"))
    assert [mark.x for mark in measured] == [2]
    assert [mark.x for mark in lines["ib-100g"]] == [1, 32, 64]
    other = section(identity=replace(predictions().identity, torch="1.0"))
    lines = drawn(other.figures[0])
    assert not [name for name in lines if name.startswith("measured")]
    assert "The calibration is not of this run: torch '1.0' is not '2.15.0'." in other.notes


def test_errors_over_several_links_say_which():
    links = ("1gbit", "4gbit")
    cases = tuple(
        replace(HELD_OUT, predicted_ms=Interval(101.0, 90.0, 110.0), network=link) for link in links
    )
    errors = section(validation=cases).tables[-1]
    assert [row[0] for row in errors.rows] == list(links)
    assert all(len(row) == len(errors.columns) for row in errors.rows)


def test_what_is_missing_leaves_the_rest():
    assert len(section(validation=()).tables) == 1
    errors = section(predictions=())
    assert "Network: x; assumed: y." in errors.notes
    assert (len(errors.figures), len(errors.tables)) == (0, 1)


def test_the_document_survives_its_file_and_is_drawn_on_the_page(tmp_path):
    path, page = tmp_path / "p.json", tmp_path / "r.html"
    path.write_text(predictions().to_json())
    assert Predictions.from_json(path.read_text()) == predictions()
    assert report_command([str(SAMPLE), "--predictions", str(path), "--out", str(page)]) == 0
    assert 'id="predicted-efficiency"' in page.read_text()


WHOLE = json.loads(predictions().to_json())
BELOW_0 = WHOLE["predictions"][0] | {"efficiency": {"estimate": 0.5, "low": -0.1, "high": 0.6}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no predictions"),
        (json.dumps(WHOLE | {"schema_version": 9}), "schema 9"),
        (json.dumps(WHOLE | {"predictions": [BELOW_0]}), "an interval of"),
        (json.dumps(WHOLE).replace('"measured_ms": 100.0', '"measured_ms": 0'), "measured_ms"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, message, capsys):
    path = tmp_path / "p.json"
    path.write_text(text)
    assert report_command([str(SAMPLE), "--predictions", str(path), "--out", str(tmp_path / "r.html")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
