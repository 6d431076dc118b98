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
from own_names import OURS, SMALL, project_with

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
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*OURS, "ddp_bench"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
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
    templates = {f"ddp_bench/report/templates/{path.name}" for path in (ROOT / "report/templates").iterdir()}
    assert templates | {"ddp_bench/py.typed", "ddp_bench/bench/run/main.py"} <= names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"ddp_bench"}


def test_every_command_works_in_a_project_with_the_same_names(programs: Path, tmp_path: Path) -> None:
    project = project_with(OURS, tmp_path / "project")
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


def test_the_gate_in_turns_works_in_a_project_with_the_same_names(programs: Path, tmp_path: Path) -> None:
    project = project_with(OURS, tmp_path / "project")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=me", "-c", "user.email=me@x", "commit", "-qm", "all"],
    ):
        assert finished("git", *command, folder=project).returncode == 0
    # Another content, for the same file on both sides is refused.
    for name in ("net.py", "models/net.py"):
        (project / name).write_text((project / name).read_text() + "\n# changed\n")
    of_run = ("--modes", "ddp", "--gpus", "1", *SMALL, "--rounds", "5", "--passes", "none")
    where = ("--out", str(tmp_path / "sides"), "--launches", "1")
    gate = finished(
        str(programs / "ddp-bench"), "gate", "--interleave", "HEAD", *where, "--", *of_run, folder=project
    )
    assert gate.returncode in (0, 1, 3), gate.stderr[-3000:]
    assert "images/s" in gate.stdout


@pytest.mark.parametrize("command", [["ddp_bench", "run"], ["ddp_bench.bench.run"]], ids=" ".join)
def test_torchrun_starts_ours_in_a_project_with_the_same_names(
    programs: Path, command: list[str], tmp_path: Path
) -> None:
    project = project_with(OURS, tmp_path / "project")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *command)
    run = ("--modes", "ddp", "--gpus", "2", *SMALL, "--rounds", "1", "--passes", "none")
    done = finished(str(programs / "python"), *torchrun, *run, "--out", str(tmp_path / "run"), folder=project)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/report.html").exists()


def test_the_fixture_is_there_and_leaves_a_session_its_own_names(programs: Path, tmp_path: Path) -> None:
    project = project_with(OURS, tmp_path / "project")
    (project / "test_step.py").write_text(OWN_TEST)
    done = finished(str(programs / "python"), "-m", "pytest", "-p", "no:cacheprovider", folder=project)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
