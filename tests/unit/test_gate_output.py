"""What a gate prints: conditions before numbers, the verdict last, nothing that breaks out of its cell."""

import json
import math
import re
from dataclasses import replace

import pytest
from gate_runs import STEADY, failed, made_run, plan, write_run
from msgspec import structs

from ddp_bench.bench.gate import output as gate_output
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.main import main
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


def test_a_regression_is_said_with_units_interval_and_worst_first(base, slow, capsys):
    assert main([base, slow]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.match(r" (regressed|unchanged)", line)]
    assert [row.split()[0] for row in rows] == sorted(row.split()[0] for row in rows)
    first = " ".join(rows[0].split())
    # 25 ms of exposed communication became 56.25 ms, of a step of 125 ms.
    assert first.startswith("regressed ddp-n2-capdefault")
    assert "exposed communication 25.04 ms 56.30 ms +25.0% of the step [" in first
    assert "± 5%" in first
    assert any("(CPU stand-in)" in row for row in rows)
    assert any("512 MiB" in row and "no interval" in row for row in rows)
    assert "one CPU core standing in for a GPU" in lines[-2]
    assert lines[-1].startswith("regression: ddp-n2-")
    assert "4 regressed" in lines[-1]


def test_a_pass_says_so_and_quiet_says_nothing(base, tmp_path, capsys):
    other = str(write_run(tmp_path / "other", peak_mem_mib=512.0))
    assert main([base, other]) == 0
    assert re.search(r"^pass: .*unchanged", capsys.readouterr().out.splitlines()[-1])
    assert main([base, other, "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""


def test_what_differs_comes_before_any_number(base, tmp_path, capsys):
    other = str(
        write_run(
            tmp_path / "other",
            planned=plan(arch="resnet34"),
            versions={"torch": "2.16.0", "python": "3.12.1"},
        )
    )
    assert main([base, other]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Not interleaved: a change may be the machine's."
    assert lines[1] == "differs: arch: resnet18 -> resnet34"
    assert lines[2] == "differs: torch: 2.15.0 -> 2.16.0"
    assert lines[-1].startswith("not comparable: the runs differ in arch, torch; --ratios-only")
    assert main([base, other, "--ratios-only"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "differs: arch: resnet18 -> resnet34"
    assert "images/s" not in "".join(lines)
    assert lines[-1].startswith("pass: ")


def test_undecided_says_what_to_run(tmp_path, capsys):
    wild = {
        key: [ms * f for ms, f in zip(s, (1, 1.3, 0.8, 1.1, 0.9, 1.2), strict=True)]
        for key, s in STEADY.items()
    }
    runs = [str(write_run(tmp_path / name, wild)) for name in ("a", "b")]
    assert main([*runs, "--threshold", "1%"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "4 inconclusive" in last, "images/s of three cases, exposed communication; the ratios are steady"
    assert "more --rounds" in last
    single = made_run({("single", 1): wild["single", 1]})
    undecided = compare(single, single, thresholds=FIVE)
    assert undecided.exit_code == 3
    assert re.search(
        r"^undecided: .*nothing could be decided; .*--rounds \d+", gate_output.verdict(undecided)
    )


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


def test_markdown_is_a_table_and_foreign_text_stays_text(base, slow, capsys):
    assert main([base, slow, "--markdown"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("### bench.gate: regression")
    table = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in table} == {9}
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
