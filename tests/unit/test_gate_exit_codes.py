"""Exit code 1 means a regression and nothing else: CI reads it as one, whatever went wrong in the gate."""

import subprocess
import sys

import pytest
from gate_runs import STEADY, slowed, write_run

from ddp_bench.bench.common.errors import ExitCode
from ddp_bench.bench.gate import sides
from ddp_bench.bench.gate.main import main

IN_TURNS = ("--launches", "1", "--", "--modes", "ddp", "--gpus", "1", "--rounds", "5")

STAGES = {
    "command.read_policy": "apart",
    "command.read_run": "apart",
    "command.compare": "apart",
    "compare.find_run_differences": "apart",
    "compare.compare_metric": "apart",
    "command.write_junit": "apart",
    "page.make_page": "apart",
    "command.write_output": "apart",
    "command.show_on_github": "apart",
    "command.terminal.print_page": "apart",
    "command.measure_launches": "in turns",
    "sides.parse_settings": "in turns",
    "sides.check_out_both": "in turns",
    "sides.check_sides": "in turns",
    "interleave.measure_in_turns": "in turns",
}
"""What the gate calls, one after the other, and of which kind of gate."""


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs of equal steps, which no gate changes."""
    folder = tmp_path_factory.mktemp("runs")
    return [str(write_run(folder / name)) for name in "ab"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "error", [RuntimeError("x"), KeyError("x"), MemoryError(), AssertionError()], ids=repr
)
def test_an_exception_at_any_stage_is_no_regression(stage, error, two_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sides, "check_sides", lambda *_: sides.GatePlan((), {}, 1.0))
    monkeypatch.setattr(f"ddp_bench.bench.gate.{stage}", raises(error))
    files = ("--html", str(tmp_path / "p.html"), "--junit", str(tmp_path / "j.xml"))
    # One error passes through a worktree too, which takes seven processes of git.
    in_turns = ("--interleave", "HEAD" if isinstance(error, RuntimeError) else ".", *IN_TURNS)
    compared = two_runs if STAGES[stage] == "apart" else in_turns
    assert main([*files, *compared]) == ExitCode.BUG == 70
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "a bug of ddp-bench" in said.splitlines()[-1]


def test_a_regression_ends_with_1(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", slowed(1.5, steps=STEADY))
    assert main([str(first), str(second), "--quiet"]) == ExitCode.FAILED == 1


WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from ddp_bench.bench.gate.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("package", ["msgspec", "pandas", "scipy", "rich"])
def test_a_missing_package_is_one_line_and_no_regression(package, two_runs):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *two_runs], capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"has no {package}" in done.stderr
