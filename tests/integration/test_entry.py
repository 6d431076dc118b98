"""`ddp-bench`: one entry for all commands, in a checkout or installed among packages of our names."""

import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ROOT, finished
from own_project import OURS, SMALL, project_with

from ddp_bench.bench.commands import COMMANDS
from ddp_bench.bench.package import own_command

SCRIPT = "import sys; from ddp_bench.__main__ import console; sys.argv[0] = 'ddp-bench'; console()"
"""What the console script of an installed package does."""


@pytest.fixture
def without_torch(tmp_path):
    """An environment in which whatever imports torch fails."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def entered(*arguments, env, script=True):
    command = [sys.executable, "-c", SCRIPT] if script else [sys.executable, "-m", "ddp_bench"]
    return finished([*command, *arguments], env=env)


def test_help_names_every_command_on_a_line_of_its_own(without_torch):
    done = entered("--help", env=without_torch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ddp-bench COMMAND")
    lines = done.stdout.splitlines()
    assert all(
        any(line.split() == [name, *what.split()] for line in lines) for name, what in COMMANDS.items()
    )


MISTAKES = {
    "rum": "ddp-bench: error: unknown command 'rum'; did you mean 'run'? known: run, tune, ",
    "": "ddp-bench: error: name a command: run, tune, ",
    "--verson": "ddp-bench: error: unrecognized arguments: --verson; did you mean --version?",
    "run --gpu x": "ddp-bench run: error: ",
    "tune --gpuz 2": "ddp-bench tune: error: unrecognized arguments",
    "report nowhere": "ddp-bench report: error: nowhere",
}

EACH = """
import sys
from ddp_bench.__main__ import console
for line in sys.argv[1:]:
    sys.argv = ["ddp-bench", *line.split()]
    try:
        console()
    except SystemExit as end:
        print(end.code)
"""


def test_a_mistake_is_one_line_before_torch_is_imported(without_torch):
    command = [sys.executable, "-c", EACH, *MISTAKES]
    done = finished(command, env=without_torch)
    assert done.stdout == "2\n" * len(MISTAKES)
    for line, said in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        assert line.startswith(said)


def test_help_of_a_command_names_it_in_the_form_that_was_typed(without_torch):
    for name in ("run", "report"):
        done = entered(name, "--help", env=without_torch)
        assert done.stdout.startswith(f"usage: ddp-bench {name} "), done.stderr
        assert "python -m bench." not in done.stdout
    as_module = entered("run", "--help", env=without_torch, script=False)
    assert as_module.stdout.startswith("usage: python -m ddp_bench run ")


def test_versions_come_from_what_is_installed(without_torch):
    done = entered("--version", env=without_torch)
    assert done.returncode == 0
    assert done.stdout.startswith("ddp-bench ")
    assert ", torch " in done.stdout


def test_our_own_processes_start_in_any_folder(tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__init__.py").write_text("raise SystemExit('theirs')\n")
    for safe in ("", "1"):
        env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe}
        done = finished(own_command("report", "nowhere"), tmp_path, env)
        assert done.stderr.startswith("report: error: nowhere"), done.stderr


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


@pytest.mark.campaign
def test_the_wheel_holds_what_the_page_needs_and_the_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {f"ddp_bench/report/templates/{path.name}" for path in (ROOT / "report/templates").iterdir()}
    assert templates | {"ddp_bench/py.typed", "ddp_bench/bench/run/main.py"} <= names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"ddp_bench"}


@pytest.mark.campaign
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


@pytest.mark.campaign
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


@pytest.mark.campaign
@pytest.mark.parametrize("command", [["ddp_bench", "run"], ["ddp_bench.bench.run"]], ids=" ".join)
def test_torchrun_starts_ours_in_a_project_with_the_same_names(programs, command, tmp_path):
    project = project_with(OURS, tmp_path / "project")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *command)
    run = ("--modes", "ddp", "--gpus", "2", *SMALL, "--rounds", "1", "--passes", "none")
    done = ended(str(programs / "python"), *torchrun, *run, "--out", str(tmp_path / "run"), folder=project)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.campaign
def test_the_fixture_is_there_and_leaves_a_session_its_own_names(programs, tmp_path):
    project = project_with(OURS, tmp_path / "project")
    (project / "test_step.py").write_text(OWN_TEST)
    done = ended(str(programs / "python"), "-m", "pytest", "-p", "no:cacheprovider", folder=project)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
