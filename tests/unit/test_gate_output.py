"""What a gate prints and leaves in a job: nothing breaks out of its cell. Whole outputs are recorded."""

import json
import math
from dataclasses import replace

import pytest
from gate_runs import STEADY, failed, made_run, write_run
from made import made_manifest
from msgspec import structs

from ddp_bench.bench.errors import ExitCode, UsageError
from ddp_bench.bench.gate import output
from ddp_bench.bench.gate import output as gate_output
from ddp_bench.bench.gate.code import Code, check_one_code
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.github import MOST_ANNOTATIONS, Annotation, show
from ddp_bench.bench.results.schema import GATED
from ddp_bench.bench.stats import Interval

FIVE = dict.fromkeys(GATED, 0.05)
SLOW = {**STEADY, ("ddp", 2): [ms * 1.25 for ms in STEADY["ddp", 2]]}


@pytest.fixture
def base(tmp_path):
    return str(write_run(tmp_path / "base", peak_mem_mib=512.0))


@pytest.fixture
def slow(tmp_path):
    return str(write_run(tmp_path / "slow", SLOW, peak_mem_mib=512.0))


def test_json_is_everything_and_holds_no_nan(base, slow, capsys):
    assert main([base, slow, "--json"]) == 1

    def refuse(constant):
        raise AssertionError(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (found["verdict"], found["exit_code"], found["cpu_stand_in"]) == ("regression", 1, True)
    memory = [c for c in found["comparisons"] if c["metric"] == "peak_mem_mib"]
    assert {c["verdict"] for c in memory} == {"unchanged"}
    assert memory[0]["ratio"] == {"estimate": 1.0, "low": None, "high": None}
    rate = next(
        c for c in found["comparisons"] if c["metric"] == "images_per_s" and c["verdict"] == "regressed"
    )
    assert rate["ratio"]["estimate"] == pytest.approx(0.8)
    assert rate["ratio"]["low"] < 0.8 < rate["ratio"]["high"] < 1


def test_foreign_text_stays_text():
    made = made_run(STEADY)
    nasty = "a | b\n# c <img src=x> @someone [x](http://y.z) `d` *e* www.evil.com \x1b[31m"
    candidate = failed(made, "ddp-n2")
    candidate = replace(
        candidate, cases=tuple(replace(c, row={**c.row, "reason": nasty}) for c in candidate.cases)
    )
    gate = compare(made, candidate, thresholds=FIVE)
    text = gate_output.markdown(gate)
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {9}
    for breakout in ("<img", "@someone", "](", "http://", "`", "*e*", "www.", "\x1b", "\n# c"):
        assert breakout not in text
    assert "&#60;img src" in text
    assert "\n" not in gate_output.verdict(gate)
    assert "\x1b" not in gate_output.verdict(gate)


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (Interval(0.926, 0.9, 0.95), "0.926x [0.900, 0.950]"),
        (Interval(0.926, 0.5, 1e300), "0.926x [0.500, >99]"),
        (Interval(1.5, math.nan, math.nan), "1.500x"),
    ],
)
def test_a_ratio_is_shown_as_far_as_it_is_known(ratio, shown):
    found = compare(made_run(STEADY), made_run(STEADY), thresholds=FIVE).comparisons[0]
    assert shown in gate_output.cells(structs.replace(found, ratio=ratio))


OWN = {"ddp_bench": {"version": "0.1.0"}, "git": {"commit": "c" * 40, "dirty": False}}


def side(commit, code="x", *, dirty=False, **more):
    workload = {"spec": "net:make", "file": "net.py", "repository": "mynet", "code_sha256": code}
    return {**OWN, "workload": {**workload, "commit": commit * 40, "dirty": dirty}, **more}


BOTH = "both sides import identical code: "
BY = "measured with ddp-bench 0.1.0 (ccccccc)"
MOVED = "workload: mynet aaaaaaa -> bbbbbbb"
ANOTHER_OWN = {"ddp_bench": {"version": "0.2.0"}, "git": {}}


@pytest.mark.parametrize(
    ("ours", "theirs", "interleaved", "lines"),
    [
        ({}, {}, True, []),
        (OWN, OWN, True, []),
        (side("a"), side("b", "y", dirty=True), True, [f"{MOVED} with uncommitted changes", BY]),
        (side("a"), side("b"), True, [MOVED, f"{BOTH}this is an A/A comparison", BY]),
        (
            *(side("a"), side("a", versions={"torch": "2.16"}), True),
            [MOVED.partition(" ->")[0], f"{BOTH}what differs is the environment", BY],
        ),
        (
            *(side("a"), side("b", **ANOTHER_OWN), False),
            [MOVED, "both runs imported identical code of the workload", f"{BY} -> 0.2.0"],
        ),
        ({}, side("b"), False, ["workload: not recorded -> mynet bbbbbbb"]),
        (
            *({"workload": {"file": "net.py"}}, side("b"), False),
            ["workload: net.py in no repository with a commit -> mynet bbbbbbb"],
        ),
    ],
)
def test_the_commits_are_named(ours, theirs, interleaved, lines):
    code = Code(made_manifest(**ours), made_manifest(**theirs), interleaved=interleaved)
    assert code.lines() == lines


def test_code_that_was_edited_between_launches_is_refused():
    check_one_code([made_manifest(**side(commit)) for commit in "ab"])
    check_one_code([made_manifest(**OWN)] * 2)
    with pytest.raises(UsageError, match="was changed while it was measured"):
        check_one_code([made_manifest(**side("a", code)) for code in "xxy"])


def test_programs_are_told_the_commits():
    runs = [made_run(STEADY, **side(commit)) for commit in "ab"]
    gate = compare(runs[0], runs[1], thresholds=dict.fromkeys(GATED, 0.05))
    code = json.loads(output.as_json(gate))["code"]
    assert code["identical"] is True
    assert [code[name]["workload"]["commit"] for name in ("baseline", "candidate")] == ["a" * 40, "b" * 40]
    assert code["baseline"]["ddp_bench"] == {"version": "0.1.0"}


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
