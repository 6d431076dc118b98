"""Predictions on the page: what is drawn beside what, and which files are refused. Words are recorded."""

import json
from dataclasses import replace

import pytest
from recorded_pages import REFUSED, SAMPLE, predictions
from report_runs import drawn

from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats import Interval
from ddp_bench.report import main as command
from ddp_bench.report.predicted import predicted

pytestmark = pytest.mark.usefixtures("few_resamples")

RUN = load_run(SAMPLE)
LINE = predictions().lines[0]
HELD_OUT = predictions().validation[0]


def section(**more):
    return predicted(RUN, predictions(**more), key="k")


def line(figure, label):
    """Places of a line whose name begins so."""
    ((_, lines),) = drawn(figure)
    return [mark.x for mark in next((marks for name, marks in lines.items() if name.startswith(label)), [])]


def test_a_line_that_does_not_break_has_no_cross_and_one_of_another_machine_no_measured_points():
    throughput, efficiency = section().figures
    assert (line(efficiency, "breaks"), line(throughput, "measured")) == ([32], [2])
    whole = section(lines=(replace(LINE, broken_at=None),)).figures
    assert line(whole[1], "breaks") == []
    other = section(identity=replace(predictions().identity, torch="1.0"))
    assert line(other.figures[0], "measured") == []
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
    assert len(section(validation=None).tables) == 1
    errors = section(lines=())
    assert "Network: x; assumed: y." in errors.notes
    assert (len(errors.figures), len(errors.tables)) == (0, 1)
    refused = replace(LINE, predictions=(replace(LINE.predictions[-1], **REFUSED),), broken_at=None)
    nothing = section(lines=(refused,))
    assert not nothing.figures
    assert nothing.tables[0].rows[0][3] == "not predicted"


def test_the_document_survives_its_file_and_is_drawn_on_the_page(tmp_path):
    path, page = tmp_path / "p.json", tmp_path / "r.html"
    path.write_text(predictions().to_json())
    assert Predictions.from_json(path.read_text()) == predictions()
    assert command.main([str(SAMPLE), "--predictions", str(path), "--out", str(page)]) == 0
    assert 'id="run1-predicted-1-efficiency"' in page.read_text()


WHOLE = json.loads(predictions().to_json())
WITHOUT_REASON = json.loads(json.dumps(WHOLE["lines"][0]))
WITHOUT_REASON["predictions"][0] |= {name: None for name in REFUSED if name != "reason"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no predictions"),
        (json.dumps(WHOLE | {"schema_version": 9}), "schema 9"),
        (json.dumps(WHOLE).replace('"rank_spread_ms": 1.0', '"rank_spread_ms": "x"'), "holds no predictions"),
        (json.dumps(WHOLE | {"lines": [WITHOUT_REASON]}), "neither figures nor a reason"),
        (
            json.dumps(WHOLE).replace('"broken_at": 32', '"broken_at": 33'),
            "breaks where it has no prediction",
        ),
        (json.dumps(WHOLE).replace('"measured_ms": 100.0', '"measured_ms": 0'), "measured_ms"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, message, capsys):
    path = tmp_path / "p.json"
    path.write_text(text)
    assert command.main([str(SAMPLE), "--predictions", str(path), "--out", str(tmp_path / "r.html")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
