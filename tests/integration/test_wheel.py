"""What is installed, from a wheel or a checkout, runs in a project that has packages of the same names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ROOT
from own_names import SMALL, project_with

from ddp_bench import NAMES

pytestmark = pytest.mark.campaign

OWN_TEST = """
from models.net import Net
def test_step(train_step_benchmark):
    import torch
    net, images = Net(), torch.zeros(2, 48)
    train_step_benchmark(lambda: net(images), rounds=2)
"""


def finished(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def pip(*arguments: str) -> None:
    done = finished(sys.executable, "-m", "pip", *arguments, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: building leaves files in them."""
    folder = tmp_path_factory.mktemp("sources")
    for name in NAMES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ddp_bench.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    out = sources.parent / "wheels"
    pip("wheel", str(sources), "--no-deps", "--no-build-isolation", "--wheel-dir", str(out))
    (found,) = out.glob("ddp_bench-*.whl")
    return found


@pytest.fixture(scope="module", params=["wheel", "editable"])
def programs(
    request: pytest.FixtureRequest, sources: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of programs of a fresh environment, which takes what we depend on from this one."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    what = [str(wheel)] if request.param == "wheel" else ["--no-build-isolation", "--editable", str(sources)]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(programs / "python"), "install", "--no-deps", "--no-index", *what)
    return programs


def test_the_wheel_holds_what_the_page_needs_and_the_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {f"report/templates/{path.name}" for path in (ROOT / "report/templates").iterdir()}
    assert templates | {"bench/py.typed", "models/py.typed", "ddp_bench.py"} <= names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {*NAMES, "ddp_bench.py"}


def test_every_command_works_in_a_project_with_the_same_names(programs: Path, tmp_path: Path) -> None:
    project = project_with(NAMES, tmp_path / "project")
    command, runs = str(programs / "ddp-bench"), [str(tmp_path / name) for name in ("first", "second")]
    run = ("run", "--modes", "single,ddp", "--gpus", "1,2", *SMALL, "--rounds", "3")
    for out in runs:
        done = finished(command, *run, "--out", out, folder=project)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "ddp-bench" in done.stdout, "the next command is in the form that was typed"
        assert "python -m bench" not in done.stdout + done.stderr
        assert (Path(out) / "report.html").exists()
    page = finished(command, "report", *runs, "--out", str(tmp_path / "page.html"), folder=project)
    assert page.returncode == 0, page.stderr
    gate = finished(command, "gate", *runs, folder=project)
    assert gate.returncode in (0, 1, 3), gate.stderr
    assert "images/s" in gate.stdout
    doctor = finished(command, "doctor", "--json", folder=project)
    assert doctor.returncode in (0, 1), doctor.stderr
    assert doctor.stdout.startswith("{")


def test_python_m_survives_the_names_that_it_does_not_start_with(programs: Path, tmp_path: Path) -> None:
    project = project_with(["models", "report"], tmp_path / "project")
    run = ("-m", "bench.run", "--modes", "ddp", "--gpus", "2", *SMALL, "--rounds", "1", "--passes", "none")
    done = finished(str(programs / "python"), *run, "--out", str(tmp_path / "run"), folder=project)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/report.html").exists()


def test_the_fixture_is_there_and_leaves_a_session_its_own_names(programs: Path, tmp_path: Path) -> None:
    project = project_with(NAMES, tmp_path / "project")
    (project / "test_step.py").write_text(OWN_TEST)
    done = finished(str(programs / "python"), "-m", "pytest", "-p", "no:cacheprovider", folder=project)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
