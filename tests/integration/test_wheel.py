"""What is installed, from a wheel or a checkout, runs in a project that has packages of the same names."""

import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ROOT, finished
from own_project import OURS, SMALL, project_with

pytestmark = pytest.mark.campaign

OWN_TEST = """
from models.net import Net
def test_step(train_step_benchmark):
    import torch
    net, images = Net(), torch.zeros(2, 48)
    train_step_benchmark(lambda: net(images), rounds=2)
"""


def ended(*command, folder):
    return finished(command, folder, {"PYTHONPATH": None})


def pip(*arguments):
    done = ended(sys.executable, "-m", "pip", *arguments, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the sources: building leaves files in them."""
    folder = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*OURS, "ddp_bench"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources):
    out = sources.parent / "wheels"
    pip("wheel", str(sources), "--no-deps", "--no-build-isolation", "--wheel-dir", str(out))
    (found,) = out.glob("ddp_bench-*.whl")
    return found


@pytest.fixture(scope="module", params=["wheel", "editable"])
def programs(request, sources, wheel, tmp_path_factory):
    """The folder of programs of a fresh environment, which takes what we depend on from this one."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    what = [str(wheel)] if request.param == "wheel" else ["--no-build-isolation", "--editable", str(sources)]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(programs / "python"), "install", "--no-deps", "--no-index", *what)
    return programs


def test_the_wheel_holds_what_the_page_needs_and_the_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {f"ddp_bench/report/templates/{path.name}" for path in (ROOT / "report/templates").iterdir()}
    assert templates | {"ddp_bench/py.typed", "ddp_bench/bench/run/main.py"} <= names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"ddp_bench"}


def test_every_command_works_in_a_project_with_the_same_names(programs, tmp_path):
    project = project_with(OURS, tmp_path / "project")
    command, runs = str(programs / "ddp-bench"), [str(tmp_path / name) for name in ("first", "second")]
    run = ("run", "--modes", "single,ddp", "--gpus", "1,2", *SMALL, "--rounds", "3")
    for out in runs:
        done = ended(command, *run, "--out", out, folder=project)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "ddp-bench" in done.stdout, "the next command is in the form that was typed"
        assert "python -m bench" not in done.stdout + done.stderr
        assert (Path(out) / "report.html").exists()
    page = ended(command, "report", *runs, "--out", str(tmp_path / "page.html"), folder=project)
    assert page.returncode == 0, page.stderr
    gate = ended(command, "gate", *runs, folder=project)
    assert gate.returncode in (0, 1, 3), gate.stderr
    assert "images/s" in gate.stdout
    doctor = ended(command, "doctor", "--json", folder=project)
    assert doctor.returncode in (0, 1), doctor.stderr
    assert doctor.stdout.startswith("{")


def test_the_gate_in_turns_works_in_a_project_with_the_same_names(programs, tmp_path):
    project = project_with(OURS, tmp_path / "project")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=me", "-c", "user.email=me@x", "commit", "-qm", "all"],
    ):
        assert ended("git", *command, folder=project).returncode == 0
    # Another content, for the same file on both sides is refused.
    for name in ("net.py", "models/net.py"):
        (project / name).write_text((project / name).read_text() + "\n# changed\n")
    of_run = ("--modes", "ddp", "--gpus", "1", *SMALL, "--rounds", "5", "--passes", "none")
    where = ("--out", str(tmp_path / "sides"), "--launches", "1")
    gate = ended(
        str(programs / "ddp-bench"), "gate", "--interleave", "HEAD", *where, "--", *of_run, folder=project
    )
    assert gate.returncode in (0, 1, 3), gate.stderr[-3000:]
    assert "images/s" in gate.stdout


@pytest.mark.parametrize("command", [["ddp_bench", "run"], ["ddp_bench.bench.run"]], ids=" ".join)
def test_torchrun_starts_ours_in_a_project_with_the_same_names(programs, command, tmp_path):
    project = project_with(OURS, tmp_path / "project")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *command)
    run = ("--modes", "ddp", "--gpus", "2", *SMALL, "--rounds", "1", "--passes", "none")
    done = ended(str(programs / "python"), *torchrun, *run, "--out", str(tmp_path / "run"), folder=project)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/report.html").exists()


def test_the_fixture_is_there_and_leaves_a_session_its_own_names(programs, tmp_path):
    project = project_with(OURS, tmp_path / "project")
    (project / "test_step.py").write_text(OWN_TEST)
    done = ended(str(programs / "python"), "-m", "pytest", "-p", "no:cacheprovider", folder=project)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
