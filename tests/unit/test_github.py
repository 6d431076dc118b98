"""What commands leave in a job of GitHub Actions: annotations on stderr, tables in the job's summary."""

import json

import pytest
from gate_runs import STEADY, write_run

from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.github import MOST_ANNOTATIONS, Annotation, show

SLOW = {**STEADY, ("ddp", 2): [ms * 1.25 for ms in STEADY["ddp", 2]]}
WIDE = {("single", 1): [ms * (1, 4)[i % 2] for i, ms in enumerate(STEADY["single", 1])]}


@pytest.fixture
def summary(tmp_path, monkeypatch):
    place = tmp_path / "summary.md"
    place.write_text("of an earlier step\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
    return place


def test_a_regression_is_an_error_and_the_table_is_in_the_summary(tmp_path, summary, capsys):
    base, slow = (str(write_run(tmp_path / name, steps)) for name, steps in (("a", STEADY), ("b", SLOW)))
    assert main([base, slow, "--json"]) == ExitCode.FAILED
    told = capsys.readouterr()
    regressed = [c for c in json.loads(told.out)["comparisons"] if c["verdict"] == "regressed"]
    commands = told.err.splitlines()
    assert len(commands) == len(regressed) > 1
    assert all(line.startswith("::error title=bench.gate%3A regressed::ddp-n2-") for line in commands)
    assert any("exposed communication 25.04 ms -> 56.30 ms" in line for line in commands)
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("of an earlier step\n### bench.gate: regression")
    assert text.count("| regressed |") == len(regressed)


def test_a_gate_that_decides_nothing_is_a_warning(tmp_path, summary, capsys):
    base, same = (str(write_run(tmp_path / name, WIDE)) for name in ("a", "b"))
    assert main([base, same]) == ExitCode.NOT_COMPARABLE
    (command,) = capsys.readouterr().err.splitlines()
    assert command.startswith("::warning title=bench.gate::undecided: ")
    assert "### bench.gate: undecided" in summary.read_text(encoding="utf-8")


def test_a_pass_has_a_summary_and_quiet_has_none(tmp_path, summary, capsys):
    base, same = (str(write_run(tmp_path / name, STEADY)) for name in ("a", "b"))
    before = summary.read_text(encoding="utf-8")
    assert main([base, same, "--quiet"]) == ExitCode.OK
    assert summary.read_text(encoding="utf-8") == before
    assert main([base, same]) == ExitCode.OK
    assert "### bench.gate: pass" in summary.read_text(encoding="utf-8")
    assert capsys.readouterr().err == ""


def test_outside_of_actions_nothing_is_added(capsys, tmp_path):
    place = tmp_path / "summary.md"
    show([Annotation("error", "a", "b")], lambda: "text", {"GITHUB_STEP_SUMMARY": str(place)})
    assert not place.exists()
    assert capsys.readouterr().err == ""


def test_no_text_ends_a_command_or_begins_another(capsys):
    nasty = Annotation("error", "a,b:c%\n", "50% slower\n::error::x\r")
    show([nasty] * 20, lambda: "", {"GITHUB_ACTIONS": "true"})
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["::error title=a%2Cb%3Ac%25\\x0a::50%25 slower\\x0a::error::x\\x0d"] * MOST_ANNOTATIONS


def test_a_summary_that_cannot_be_written_is_a_line(capsys, tmp_path):
    environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path)}
    show([], lambda: "text", environment)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no job summary: ")
