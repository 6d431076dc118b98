"""The user's own packages `bench`, `models` and `report` beside ours of the same names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from own_names import SMALL, project_with

from ddp_bench import NAMES, own_command


def finished(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.campaign
def test_packages_on_the_path_are_trained_too(tmp_path: Path) -> None:
    project = project_with(NAMES, tmp_path / "project")
    run = ("run", *SMALL, "--modes", "ddp", "--gpus", "1", "--rounds", "1", "--passes", "none")
    path = os.pathsep.join([str(project), str(ROOT)])
    done = finished(own_command(*run, "--out", str(tmp_path / "run")), project, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.campaign
def test_under_python_m_their_models_and_report_are_survived(tmp_path: Path) -> None:
    project = project_with(["models", "report"], tmp_path / "project")
    run = ("run", *SMALL, "--modes", "single,ddp", "--gpus", "1,2", "--rounds", "3", "--compile", "off,on")
    done = finished(
        [sys.executable, "-m", f"bench.{run[0]}", *run[1:], "--out", str(tmp_path / "run")], project
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/report.html").exists()


IDENTITY = """
import sys
from ddp_bench import Workload, give_names, install
install()
from models.workload import Workload as ours
assert Workload is ours
sys.path.insert(0, ".")
assert give_names() == ["bench", "models", "report"]
from models.net import Net
from ddp_bench import Workload as after
assert after is ours
"""


def test_our_workload_has_a_name_that_nobody_else_has(tmp_path: Path) -> None:
    project = project_with(NAMES, tmp_path)
    done = finished([sys.executable, "-c", IDENTITY], project)
    assert done.returncode == 0, done.stderr


def test_a_project_that_wants_our_workload_from_its_own_models_is_told_how(tmp_path: Path) -> None:
    project = project_with(NAMES, tmp_path / "project")
    (project / "net.py").write_text("from models import Workload\n")
    done = finished(own_command("run", *SMALL, "--dry-run"), project)
    assert done.returncode == 2
    assert "write from ddp_bench import Workload" in done.stderr.splitlines()[-1]


def test_a_folder_of_weights_called_models_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/weights.bin").touch()
    code = "from ddp_bench import give_names, install; install(); print(give_names())"
    said = [finished([sys.executable, "-c", code], tmp_path).stdout]
    (tmp_path / "models/net.py").touch()
    said += [finished([sys.executable, "-c", code], tmp_path).stdout]
    assert said == ["[]\n", "['models']\n"]
