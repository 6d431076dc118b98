"""The gate between two sides that are measured in turns."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
from commands import ROOT, SMALL, eventually, finished
from documented import in_page
from made_project import NET, RUN, commit, start_instead

from ddp_bench.bench.common.errors import ExitCode, NotComparableError, UsageError
from ddp_bench.bench.common.process import make_package_command
from ddp_bench.bench.gate.checkouts import Checkout, check_out_both, make_worktree
from ddp_bench.bench.gate.interleave import measure_in_turns
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.plan.resolve import resolve
from ddp_bench.bench.results.store import load_run

SLOW = """
import os, time, torch
LOG = os.environ["FORWARDS"]
class Model(torch.nn.Linear):
    def forward(self, x):
        began = time.monotonic()
        if torch.is_grad_enabled() and x.dtype == torch.float32 and os.path.exists(os.environ["SIDES"]):
            time.sleep(0.005)
            with open(LOG, "a") as log:
                log.write(f"{os.getpid()} {began} {time.monotonic()}\\n")
        return super().forward(x.flatten(1))
def model(): return Model(3 * 8 * 8, 4)
"""
"""Says when it trains; it sleeps, so that two that train at once are seen to.

Before there is a folder of results both sides plan at once, and warm up for it.
"""


@pytest.mark.campaign
def test_two_sides_take_turns(tmp_path, capsys, monkeypatch):
    (tmp_path / "slow_forward.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FORWARDS", str(tmp_path / "forwards"))
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "sides"
    monkeypatch.setenv("SIDES", str(out))
    workload = ["--workload", "slow_forward:model", "--image-size", "8", "--batch-size", "4"]
    run = [*workload, "--device", "cpu", "--modes", "ddp", "--gpus", "1", "--steps", "2", "--rounds", "5"]
    run += ["--passes", "none"]
    gate = ["--interleave", ".", "--launches", "3", "--json", "--out", str(out)]
    code = main([*gate, "--", *run])
    assert json.loads(capsys.readouterr().out)["exit_code"] == code != ExitCode.USAGE
    sides = [load_run(made.parent) for made in sorted(out.glob("launch*/*/manifest.json"))]
    assert len(sides) == 2 * 3
    for side in sides:
        timed = side.blocks[side.blocks["phase"] == "timed"]
        assert set(timed["round"]) == {1, 2, 3, 4, 5}
    assert len({side.manifest.plan_hash for side in sides}) == 1
    lines = [line.split() for line in (tmp_path / "forwards").read_text().splitlines()]
    forwards = sorted((float(began), float(ended), pid) for pid, began, ended in lines)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(forwards)), "two trained at once"
    changes = sum(one[2] != other[2] for one, other in itertools.pairwise(forwards))
    assert changes >= 5 * 2, "each round has a turn of either"


def test_a_side_that_could_not_measure_a_mode_says_why(tmp_path, capsys, monkeypatch):
    """A gate of what one side could not measure is no regression, and no mistake in the command either."""
    reason = "every case of ddp failed: ValueError: late bug (net.py:6, in late)"
    fails = f"import sys; print({'bench.run: error: ' + reason!r}, file=sys.stderr); sys.exit(4)"
    start_instead(monkeypatch, baseline="", candidate=fails)
    code = main(["--interleave", ".", "--quiet", "--out", str(tmp_path / "sides"), "--", "--gpus", "1"])
    assert code == ExitCode.NOT_MEASURED == 4
    assert f"the candidate side ended with status 4: {reason}" in capsys.readouterr().err


TURN = """
import os, socket
turns = socket.socket(socket.AF_UNIX)
turns.connect(os.environ["BENCH_TURNS"])
for asks in (b"?", b".?"):
    turns.sendall(asks)
    turns.recv(1)
"""
"""A run that takes a turn, and leaves no files that anybody can read."""

REFUSES = "import sys; print('run: error: unrecognized arguments: --new', file=sys.stderr); sys.exit(2)"
KILLED = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("earlier", "now", "error", "message"),
    [
        (None, TURN, NotComparableError, "other format: .* No module named bench.run; take a later"),
        (REFUSES, TURN, NotComparableError, "other format: .* unrecognized arguments: --new; take a later"),
        ("", TURN, NotComparableError, "other format: the two sides did not take turns; take a later"),
        (TURN, TURN, NotComparableError, "other format: .*manifest"),
        (REFUSES, REFUSES, UsageError, "^the baseline side ended with status 2: "),
        (KILLED, TURN, UsageError, "^the baseline side ended with status -9: "),
    ],
    ids=["has no run", "refuses", "takes no turns", "cannot be read", "so does the candidate", "killed"],
)
def test_what_tells_another_format(earlier, now, error, message, tmp_path):
    sides = []
    for name, run in (("baseline", earlier), ("candidate", now)):
        (tmp_path / name / "bench").mkdir(parents=True)
        (tmp_path / name / "bench" / "__init__.py").touch()  # before a `bench` that PYTHONPATH leads to
        if run is not None:
            (tmp_path / name / "bench" / "run.py").write_text(run)
        sides.append(Checkout(name, tmp_path / name, sys.executable, has_own_bench=True))
    with pytest.raises(UsageError, match=message) as raised:
        measure_in_turns((sides[0], sides[1]), [], tmp_path / "out")
    assert type(raised.value) is error


def test_an_interpreter_is_named_from_where_the_gate_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = {"env/bin/python": str(tmp_path / "env/bin/python"), "python3": "python3", None: sys.executable}
    for name, found in wanted.items():
        with check_out_both(".", resolve({}), name) as (baseline, candidate):
            assert (baseline.python, candidate.python) == (found, sys.executable)
        assert baseline.folder == candidate.folder == tmp_path, "both are the code as it stands"


def descendants(folder):
    """Command lines of the processes that have inherited this temporary folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == folder:
                found.append(" ".join(process.cmdline()))
    return found


@contextlib.contextmanager
def started(folder, out):
    """A gate with its temporary folders in `folder`, once both of its runs have measured something."""
    gate = ["--interleave", "HEAD", "--out", str(out)]
    run = [*SMALL, "--modes", "ddp", "--gpus", "1", "--passes", "none", "--rounds", "10000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gate", *gate, "--", *run],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": folder},
        stderr=subprocess.PIPE,
        text=True,
    )

    def measures():
        assert process.poll() is None, process.communicate()[1]
        logs = [one.read_text() for one in out.glob("launch1/*/journal.jsonl")]
        return len(logs) == 2 and all('"phase": "timed"' in log for log in logs)

    try:
        eventually(measures, 120)
        assert len(descendants(folder)) >= 5, "the gate, two runs with a rank each"
        assert any("bench.run" in line for line in descendants(folder))
        yield process
    finally:
        if process.poll() is None:  # Ctrl-C ends what it has started, too
            process.send_signal(signal.SIGINT)
            process.communicate()


def left_in(folder):
    """Names in a temporary folder but for torch's cache, which stays."""
    return {p.name for p in Path(folder).iterdir() if not p.name.startswith("torchinductor_")}


def worktrees():
    return subprocess.check_output(["git", "worktree", "list"], cwd=ROOT, text=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its runs end with it on Linux alone")
@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_gate_that_is_ended_leaves_nothing_to_the_next_one(number, tmp_path, monkeypatch):
    """Its runs, its worktree and its temporary folders are gone, of a killed one when the next begins."""
    killed = number == signal.SIGKILL
    with tempfile.TemporaryDirectory() as folder:  # short, for the path of the turns' socket
        with started(folder, tmp_path / "sides") as gate:
            gate.send_signal(number)
            said = gate.communicate(timeout=120)[1]
        assert gate.returncode == (-signal.SIGKILL if killed else ExitCode.INTERRUPTED), said
        eventually(lambda: not descendants(folder), 60 if killed else 0)
        assert bool(left_in(folder)) == (folder in worktrees()) == killed
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with make_worktree(ROOT, "HEAD"):
            assert worktrees().count(folder) == 1
        assert left_in(folder) == set()
        assert folder not in worktrees()
    for side in () if killed else ("baseline", "candidate"):
        timing = json.loads((tmp_path / "sides" / "launch1" / side / "manifest.json").read_text())["timing"]
        assert timing["stopped_because"] == "interrupted", "what was measured is kept"


# Two commits of a project that is not ddp-bench, however its workload is imported.

SETUP = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "mynet"
version = "1"
[tool.setuptools]
packages = ["mynet"]
"""
"""Setuptools makes a finder of it, which maps the package to its folder."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment's interpreter that finds what this one does, and where to install more."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.check_output(ask, text=True).strip())
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (site / "outer-bench.pth").write_text(f"{ROOT}\n")
    return python


def gate(folder, reference, *arguments, python, path):
    """The gate as typed in `folder`: exit code, JSON, stderr."""
    entries = [str(entry) for entry in path] + [os.environ.get("PYTHONPATH", "")]
    how = ("--interleave", reference, "--launches", "1", "--threshold", "20%", "--json")
    command = make_package_command("gate", *how, "--", *arguments, python=str(python))
    done = finished(command, folder, {"PYTHONPATH": os.pathsep.join(filter(None, entries))})
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["PYTHONPATH", "editable"])
def test_however_it_is_imported_the_commits_are_compared(way, tmp_path, environment):
    """A step with twice the work is a regression; a commit that changes another file is none."""
    project, elsewhere = tmp_path / "mynet", tmp_path / "elsewhere"
    elsewhere.mkdir()
    rest = {"pyproject.toml": SETUP, ".gitignore": "build\n*.egg-info\n", "mynet/__init__.py": ""}
    fast = commit(project, {"mynet/net.py": NET.format(products=200), **rest})
    same = commit(project, {"README": "not imported"})
    how = {"python": environment, "path": [project] if way == "PYTHONPATH" else []}
    if way == "editable":
        pytest.importorskip("setuptools")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python"]
        of_it = ["--no-deps", "--no-build-isolation", "--no-index", "--editable", str(project)]
        subprocess.run([*pip, str(environment), "install", *of_it], check=True)
    run = ["--workload", "mynet.net:make", *RUN, "--rounds", "30"]

    code, found, said = gate(elsewhere, fast, *run, **how)
    assert "both sides import identical code: this is an A/A comparison" in said
    assert found["code"]["identical"] is True
    assert found["code"]["candidate"]["workload"]["commit"] == same
    # A busy machine may leave it undecided; it must not be called a change.
    assert code in (ExitCode.OK, ExitCode.UNDECIDED), str(found["comparisons"][0])

    slow = commit(project, {"mynet/net.py": NET.format(products=400)})
    code, found, said = gate(elsewhere, fast, *run, **how)
    assert f"baseline mynet {fast[:7]}, torch" in said
    assert f"candidate mynet {slow[:7]}, torch" in said
    assert code == ExitCode.FAILED, str(found["comparisons"][0])
    assert found["code"]["baseline"]["workload"]["file"] == "mynet/net.py"


@pytest.mark.campaign
def test_both_sides_load_the_workload_before_anything_is_timed(tmp_path, monkeypatch, capsys):
    """A dry run plans both commits; one that lacks the function has nothing to compare."""
    project = tmp_path / "mynet"
    lacks = commit(project, {"net.py": NET.format(products=1).replace("def make()", "def other()")})
    has = commit(project, {"net.py": NET.format(products=1)})
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    run = ["--workload", "net:make", *RUN, "--rounds", "5"]
    assert main(["--interleave", has, "--dry-run", "--", *run]) == ExitCode.OK
    baseline, candidate, cases, _, expected = capsys.readouterr().out.splitlines()
    version = torch.__version__.partition("+")[0]
    assert baseline == f"baseline: git reference {has}, {sys.executable}, torch {version}"
    assert candidate.startswith("candidate: the code as it stands, ")
    assert cases.startswith("1 case a side: single-n1-")
    assert re.fullmatch(r"Expected time: about \d.* to .*, at \d+s a launch\.", expected)
    assert main(["--interleave", lacks, "--out", str(tmp_path / "out"), "--", *run]) == ExitCode.UNDECIDED
    (said,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "nothing to compare: the baseline has no such workload or option (" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.campaign
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has none of the instructions"
)
def test_the_documented_variable_slows_the_step_on_a_cpu(capsys):
    """As docs/gate.md prints it, with a smaller network and fewer launches."""
    (found,) = (one for one in in_page(ROOT / "docs/gate.md") if "ATEN_CPU_CAPABILITY=default" in one.words)
    given = [*found.words[2:]]
    assert found.words[:2] == ("ddp-bench", "gate")
    end = given.index("--")
    quick = ["--arch", "resnet20", "--batch-size", "8", "--rounds", "8"]
    assert main([*given[:end], "--launches", "1", "--json", *given[end:], *quick]) == ExitCode.FAILED
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "regression"
    assert told["sentence"].startswith("Regression: single on 1 CPU core is ")
    assert told["compared"].endswith(", ATEN_CPU_CAPABILITY=default")
