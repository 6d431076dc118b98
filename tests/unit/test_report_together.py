"""What stands beside a run on its page: other runs, and predictions. Its words are recorded."""

import json
from dataclasses import replace

import pytest
from recorded_pages import REFUSED, SAMPLE, faster, long_run, predictions
from report_runs import case, drawn, run, usual_cases

from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.report.cases import workloads
from ddp_bench.report.drawing import LOOKS, MOST_RUNS
from ddp_bench.report.main import main as report_command
from ddp_bench.report.page import page
from ddp_bench.report.predicted import predicted
from ddp_bench.report.together import MeasuredRun


def series(shown):
    """Names of the runs in the figure of throughput."""
    (figure,) = (one for one in shown.together.figures if one.key == "together-1-throughput")
    return list(drawn(figure)[0][1])


def test_rounds_are_counted_in_the_unit_of_the_rates_beside_them():
    def rounds(**more):
        data = run([row | more for row in usual_cases()])
        (workload,) = workloads(data.cases)
        return {key: dict(found) for key, found in MeasuredRun("one", "run1", data, workload).rounds.items()}

    samples, tokens = rounds(), rounds(unit="tokens", units_per_sample=100)
    assert tokens == {
        case_id: {r: pytest.approx(100 * rate) for r, rate in by_round.items()}
        for case_id, by_round in samples.items()
    }


@pytest.mark.parametrize(
    ("new", "begins"),
    [
        ({"factor": 1.25}, "new is faster than old in 2 of 2 cases: "),
        ({"factor": 0.8}, "new is slower than old in 2 of 2 cases: "),
        ({"factor": 1.0}, "No difference above 5% between new and old in 2 of 2 cases."),
        ({"factor": 1.25, "paces": (0.7, 1.3, 0.8, 1.2)}, "Not told apart are new and old in 2 of 2 cases: "),
    ],
)
def test_the_headline_names_the_faster_run_unless_the_machine_changed_as_much(new, begins):
    together = page([long_run(1.0, "old"), long_run(name="new", **new)]).together
    assert together.warnings == ["Not interleaved: a change may be the machine's."]
    (found,) = together.findings
    assert found.startswith(begins)
    assert "4 GPUs" not in found, "shared devices tell nothing"


def test_a_third_run_that_took_no_turns_is_warned_of():
    both = [long_run(f, n, interleaved_id="abc") for f, n in ((1.0, "old"), (1.1, "new"))]
    assert page(both).together.warnings == []
    assert "Not interleaved" in page([*both, long_run(1.1, "third")]).together.warnings[0]


def repeated(*rates, plan="p", **more):
    """A run for each rate of DDP, whose speed-up is known to 1%."""
    cases = [[case("single", 1, 100.0), case("ddp", 2, rate)] for rate in rates]
    manifests = [{"plan_hash": plan, "run_id": str(i), **more} for i in range(len(rates))]
    return [run(own, told) for own, told in zip(cases, manifests, strict=True)]


def test_repeated_runs_say_how_many_intervals_hold_what_they_have_in_common():
    """The mean of the logarithms is 161.0: of 164, known to 1%, the interval does not hold it."""
    together = page(repeated(160.0, 161.0, 160.0, 160.0, 164.0)).together
    assert together.findings[0].startswith("Repeated runs: 4 of 5 intervals hold the value")
    (row,) = next(one.rows for one in together.tables if one.title == "Repeated runs")
    assert row == ("DDP, 2 GPUs, cap default / single", "1.61", "1.1%", "1%", "4 of 5")


@pytest.mark.parametrize(
    "runs",
    [
        repeated(160.0, 161.0),
        [*repeated(160.0, 161.0), *repeated(160.0, plan="other")],
        repeated(160.0, 161.0, 162.0, plan=None),
        repeated(160.0, 161.0, 162.0, interleaved_id="turns"),
        [run([case("single", 1, 100.0)], {"plan_hash": "p"}) for _ in range(3)],
    ],
    ids=["two", "another plan", "a plan that is not known", "in turns", "no ratio"],
)
def test_other_runs_repeat_nothing(runs):
    assert not [one for one in page(runs).together.findings if "Repeated" in one]


def test_only_what_can_change_a_step_is_listed_as_different_settings_first():
    def told(number, precision, torch, algorithm):
        settings = {"precision": precision, "out": f"{number}", "rounds": 10 * number, "name": f"n{number}"}
        return {
            "created_utc": f"{number}",
            "settings": settings,
            "versions": {"torch": torch, "matplotlib": f"3.{number}", "pandas": f"{number}.0"},
            "environment": {"env": {"BENCH_STARTED_S": f"{number}", "NCCL_ALGO": algorithm}},
            "timing": {"total_s": 10.0 * number},
        }

    one, other = told(1, "fp32", "2.11", "Ring"), told(2, "bf16", "2.15", "Tree")
    shown = page([faster(1.0, "a", **one), faster(1.0, "b", **other)])
    assert shown.differences.rows == (
        ("precision", "fp32", "bf16"),
        ("torch", "2.11", "2.15"),
        ("NCCL_ALGO", "Ring", "Tree"),
    )


def test_runs_of_one_name_are_told_apart():
    first, second = (run(usual_cases(), {"name": "run"}, path=path) for path in ("a/x", "b/y"))
    assert [view.title for view in page([first, second]).runs] == ["run (x)", "run (y)"]
    assert [view.title for view in page([first, first]).runs] == ["run (x), 1", "run (x), 2"]


def test_runs_of_other_work_are_drawn_and_none_is_called_faster():
    half = [row | {"precision": "bf16"} for row in usual_cases()]
    shown = page([run(usual_cases(), {"name": "a"}), run(half, {"name": "b"})]).together
    assert "only ratios compare" in shown.notes[1]
    assert (len(shown.findings), len(shown.figures)) == (0, 3)


def test_a_run_without_a_measurement_leaves_the_others_side_by_side():
    broken = run([case("ddp", 2, status="failed", reason="x")], {"name": "broken"})
    assert series(page([faster(1.0, "a"), broken, faster(1.0, "b")])) == ["a", "b"]
    assert page([faster(1.0, "a"), broken]).together is None
    assert page([faster(1.0, "a")]).together is None


@pytest.mark.campaign
def test_every_run_has_a_look_of_its_own():
    styles = [LOOKS[f"run{i}"] for i in range(1, MOST_RUNS + 1)]
    for part in ("marker", "linestyle"):
        assert len({str(style[part]) for style in styles}) == MOST_RUNS
    many = page([faster(1.0 + i, f"r{i}") for i in range(MOST_RUNS + 2)])
    assert len(series(many)) == MOST_RUNS
    assert "Of 10 runs the first 8 are drawn." in many.together.notes


# Predictions beside the run that was calibrated.

RUN = load_run(SAMPLE)
HELD_OUT = predictions().validation[0]


def section(**more):
    return predicted(RUN, predictions(**more), key="k")


def test_predictions_are_drawn_beside_what_the_same_machine_measured():
    throughput, efficiency = section().figures
    ((_, lines),) = drawn(throughput)
    measured = next(marks for name, marks in lines.items() if name.startswith("measured"))
    assert [mark.x for mark in measured] == [2]
    ((_, lines),) = drawn(efficiency)
    assert [mark.x for mark in lines["ib-100g"]] == [1, 32, 64]
    other = section(identity=replace(predictions().identity, torch="1.0"))
    ((_, lines),) = drawn(other.figures[0])
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
    refused = replace(predictions().predictions[-1], **REFUSED)
    nothing = section(predictions=(refused,))
    assert not nothing.figures
    assert any(REFUSED["reason"] in note for note in nothing.notes)


def test_the_document_survives_its_file_and_is_drawn_on_the_page(tmp_path):
    path, page = tmp_path / "p.json", tmp_path / "r.html"
    path.write_text(predictions().to_json())
    assert Predictions.from_json(path.read_text()) == predictions()
    assert report_command([str(SAMPLE), "--predictions", str(path), "--out", str(page)]) == 0
    assert 'id="run1-predicted-efficiency"' in page.read_text()


WHOLE = json.loads(predictions().to_json())
WITHOUT_REASON = WHOLE["predictions"][0] | {name: None for name in REFUSED if name != "reason"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no predictions"),
        (json.dumps(WHOLE | {"schema_version": 9}), "schema 9"),
        (json.dumps(WHOLE | {"predictions": [WITHOUT_REASON]}), "neither figures nor a reason"),
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
