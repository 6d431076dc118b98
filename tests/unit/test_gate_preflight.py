"""A mistake in what a gate was asked for is found before anything is started, and JUnit tells of it."""

import ast
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest
from commands import ROOT
from gate_runs import write_run
from made_project import NET, RUN, commit, start_instead

from ddp_bench.bench.common.errors import ExitCode, NothingToCompareError, UsageError
from ddp_bench.bench.common.turns import VARIABLES_ENV
from ddp_bench.bench.gate import preflight, sides
from ddp_bench.bench.gate.checkouts import Checkout
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.machine import host
from ddp_bench.bench.run.main import parse_settings


@pytest.fixture
def starts(monkeypatch):
    """The starts of runs; none is made."""
    found = []
    monkeypatch.setattr(Checkout, "start", lambda *arguments: found.append(arguments))
    return found


def refused(capsys, *arguments):
    assert main(arguments) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


RUNS = ("--", "--modes", "ddp", "--gpus", "2")


@pytest.mark.parametrize("option", ["--junit", "--html"])
def test_a_file_that_cannot_be_written_is_found_first(option, tmp_path, starts, capsys):
    gone = tmp_path / "nowhere" / "x.xml"
    assert f"{option} {gone} cannot be written: No such file" in refused(
        capsys, "--interleave", ".", option, str(gone), *RUNS
    )
    assert f"{option} {tmp_path} cannot be written: Is a directory" in refused(
        capsys, "--interleave", ".", option, str(tmp_path), *RUNS
    )
    first, second = (str(write_run(tmp_path / name)) for name in "ab")
    assert "cannot be written" in refused(capsys, first, second, option, str(gone))
    assert starts == []


def test_a_full_disk_is_found_first(tmp_path, starts, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "MIN_FREE_MIB", 10**12)
    said = refused(capsys, "--interleave", ".", "--out", str(tmp_path / "out"), *RUNS)
    assert "MiB are free there, a gate needs" in said
    assert starts == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*RUNS, "--rounds", "3"), "--rounds 3: a gate needs at least 5"),
        (("--launches", "2", *RUNS), "--launches 2 cannot decide"),
    ],
)
def test_what_cannot_decide_is_refused_and_junit_says_why(arguments, said, tmp_path, starts, capsys):
    junit = tmp_path / "gate.xml"
    assert said in refused(capsys, "--interleave", ".", "--junit", str(junit), *arguments)
    assert starts == []
    suite = ET.fromstring(junit.read_text())
    assert (suite.get("errors"), suite.get("skipped")) == ("1", "0")
    assert said in suite.find("testcase/error").get("message")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--env", "ATEN_CPU_CAPABILITY"), "--env 'ATEN_CPU_CAPABILITY' is not NAME=VALUE"),
        (
            ("--env", "OMP_NUM_THREADS=2"),
            "OMP_NUM_THREADS: each rank on CPU cores has one core",
        ),
        (("--baseline-env", "PYTHONPATH=x"), "PYTHONPATH: the gate sets it"),
        (("--baseline-env", "RANK=1"), "RANK: runs set it for each rank"),
    ],
)
def test_a_variable_that_would_change_nothing_is_refused(given, said, starts, capsys):
    assert said in refused(capsys, "--interleave", ".", *given, *RUNS, "--device", "cpu")
    assert starts == []


FAILS = "raise SystemExit(4)"


def test_each_side_has_its_own_variables(monkeypatch):
    started = start_instead(monkeypatch, baseline=FAILS, candidate=FAILS)
    how = ("--env", "ATEN_CPU_CAPABILITY=default", "--env", "A=", "--baseline-env", "B=1=2")
    assert main(["--interleave", ".", *how, *RUNS]) == ExitCode.NOT_MEASURED
    names = {VARIABLES_ENV: "B ATEN_CPU_CAPABILITY A"}
    own = {name: variables for name, (_, variables) in started.items()}
    assert own["baseline"] == {"B": "1=2", **names}
    assert own["candidate"] == {"ATEN_CPU_CAPABILITY": "default", "A": "", **names}
    for name, value in own["candidate"].items():
        monkeypatch.setenv(name, value)
    recorded = host.select_environment()
    assert (recorded["ATEN_CPU_CAPABILITY"], recorded["A"]) == ("default", ""), "so that folders tell it"


def test_an_interpreter_without_our_packages_is_named(tmp_path, starts, capsys):
    made = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    python = str(made / "bin" / "python")
    said = refused(capsys, "--interleave", ".", "--python", python, *RUNS)
    assert f"--python {python} has no torch, torchvision, numpy" in said
    assert "install ddp-bench for it" in said
    for place, why in (
        (tmp_path / "gone", ": no such file"),
        (made, f" is a folder; did you mean {python}?"),
        (made / "pyvenv.cfg", " cannot be started"),
    ):
        said = refused(capsys, "--interleave", ".", "--python", str(place), *RUNS)
        assert f"--python {place}{why}" in said
    assert starts == []


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository whose second commit adds the workload."""
    place = tmp_path / "project"
    commit(place, {"README": "nothing yet"})
    commit(place, {"lm2.py": NET.format(products=1)})
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    return place


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("more", "code"), [((), ExitCode.UNDECIDED), (("--allow-new",), ExitCode.OK)])
def test_the_commit_that_adds_the_workload_has_nothing_to_compare(more, code, tmp_path, starts, capsys):
    junit = tmp_path / "gate.xml"
    how = ("--interleave", "HEAD~1", "--markdown", "--junit", str(junit), *more)
    assert main([*how, "--", "--workload", "lm2:make", *RUN]) == code
    told = capsys.readouterr()
    assert told.out.startswith("## bench.gate: nothing to compare\n\nthe baseline HEAD"), "of a job"
    assert "nothing to compare: the baseline HEAD~1 has no lm2.py" in told.err
    assert told.err.count("\n") == 1
    assert starts == []
    assert ET.fromstring(junit.read_text()).find("testcase/skipped") is not None


SAYS = "import os,sys; print('bench.run: error: lm2 has no other', file=sys.stderr); sys.exit(2)"
PLANS = 'print(\'{"cases": ["c"], "versions": {}, "startup_s": 1, "rounds_s": 5}\')'


@pytest.mark.parametrize(("candidate", "kind"), [(PLANS, NothingToCompareError), (SAYS, UsageError)])
def test_a_baseline_without_the_option_has_nothing_to_compare_where_the_candidate_can_plan(
    candidate, kind, tmp_path, monkeypatch
):
    """Where the candidate refuses it too, the mistake is in the command."""
    started = start_instead(monkeypatch, baseline=SAYS, candidate=candidate)
    both = [Checkout(name, tmp_path, sys.executable) for name in ("baseline", "candidate")]
    with pytest.raises(UsageError, match="lm2 has no other") as raised:
        sides.check_sides(both, ["--gpus", "2"])
    assert type(raised.value) is kind
    planned = ["--gpus", "2", "--dry-run", "--json"]
    assert [words for words, _ in started.values()] == [planned] * 2, "nothing is measured"


@pytest.mark.parametrize(
    ("given", "rounds"), [([], 20), (["--rounds", "5"], 5), (["--preset", "quick"], None)]
)
def test_a_gate_takes_its_own_preset_unless_another_is_named(given, rounds):
    assert parse_settings(sides.add_preset(given)).rounds == rounds


def test_another_interpreter_is_asked_for_every_package_that_a_run_may_import():
    """Oracle: the imports of the sources."""
    files = [
        file for room in ("bench", "models", "report", "ddp_bench") for file in (ROOT / room).rglob("*.py")
    ]
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    with_matplotlib = {"PIL", "cycler"}
    others = found - {*sys.stdlib_module_names, *with_matplotlib, "bench", "models", "report", "ddp_bench"}
    assert "psutil" in others
    assert others <= {*preflight.REQUIRED_PACKAGES}
