"""The user's own packages `bench`, `models` and `report` beside ours of the same names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from own_names import OURS, SMALL, project_with

from ddp_bench.bench.package import own_command

RUN = ROOT / "results/samples/predictions/resnet18-2hosts/1gbit"


def finished(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.campaign
def test_packages_on_the_path_are_trained_too(tmp_path: Path) -> None:
    project = project_with(OURS, tmp_path / "project")
    run = ("run", *SMALL, "--modes", "ddp", "--gpus", "1", "--rounds", "3", "--compile", "off,on")
    path = os.pathsep.join([str(project), str(ROOT)])
    done = finished(own_command(*run, "--out", str(tmp_path / "run")), project, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_our_workload_has_a_name_that_nobody_else_has(tmp_path: Path) -> None:
    project = project_with(OURS, tmp_path)
    code = "import bench, models, report, ddp_bench; assert models.OWN; print(ddp_bench.Workload.__module__)"
    done = finished([sys.executable, "-c", code], project, PYTHONPATH=str(ROOT))
    assert done.stdout == "ddp_bench.models.workload\n", done.stderr


def test_a_project_that_wants_our_workload_from_its_own_models_is_told_what_lacks(tmp_path: Path) -> None:
    project = project_with(OURS, tmp_path / "project")
    (project / "net.py").write_text("from models import Workload\n")
    done = finished(own_command("run", *SMALL, "--dry-run"), project)
    assert done.returncode == 2
    assert "cannot import name 'Workload' from 'models'" in done.stderr


ONE_NAME = """
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
for name, *arguments in {commands}:
    try:
        import_module(f"ddp_bench.{{name}}.main").main(arguments)
    except SystemExit:
        pass
files = [(name, Path(module.__file__).resolve()) for name, module in list(sys.modules.items())
         if getattr(module, "__file__", None) and name != "__main__"]
ours = [(name, file) for name, file in files if file.is_relative_to({root!r})]
assert {{name.partition(".")[0] for name, _ in ours}} == {{"ddp_bench"}}, ours
twice = [file for file, times in Counter(file for _, file in ours).items() if times > 1]
assert not twice, twice
"""


@pytest.mark.campaign
@pytest.mark.smoke
def test_no_module_of_ours_is_loaded_under_two_names(tmp_path: Path) -> None:
    run = str(RUN)
    commands = [
        ["bench.run", "--modes", "ddp", "--gpus", "2", "--dry-run", "--device", "cpu"],
        ["bench.gate", run, run],
        ["bench.export", run, "--format", "bencher"],
        ["bench.predict", run, "--gpus", "2"],
        ["report", run, "--out", str(tmp_path / "page.html")],
        ["bench.doctor", "--quiet"],
        *([f"bench.{name}", "--help"] for name in ("tune", "lab")),
    ]
    code = ONE_NAME.format(commands=commands, root=str(ROOT))
    done = finished([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


SHELLS = """
import contextlib, runpy, sys
for command in ("bench.run", "bench.gate", "report"):
    sys.argv = [command, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_module(command, run_name="__main__", alter_sys=True)
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("bench", "models", "report")))
"""


def test_python_m_in_a_checkout_loads_ours_by_the_one_name() -> None:
    done = finished([sys.executable, "-c", SHELLS], ROOT)
    assert done.stdout.splitlines()[-1] == str(["bench", "bench.gate", "bench.run", "report"]), done.stderr
