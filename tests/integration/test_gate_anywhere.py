"""The gate between two commits of a project that is not ddp-bench, however its workload is imported."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from commands import ROOT, finished
from made_project import NET, RUN, commit

from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.package import own_command

SETUP = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "mynet"
version = "1"
[tool.setuptools]
{packages}
"""
FLAT = SETUP.format(packages='packages = ["mynet"]')
"""Setuptools makes a finder of it, which maps the package to its folder."""
IN_SRC = SETUP.format(packages='packages = ["mynet"]\npackage-dir = {"" = "src"}')
"""Setuptools makes a .pth file of it."""


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


def install(python, project, *how):
    pytest.importorskip("setuptools")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "uninstall", "--yes", "mynet"], check=True, capture_output=True)
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-build-isolation", "--no-index", *how, str(project)], check=True
    )


def gate(
    folder,
    reference,
    *arguments,
    python=sys.executable,
    path=(),
):
    """The gate as typed in `folder`: exit code, JSON, stderr."""
    entries = [str(entry) for entry in path] + [os.environ.get("PYTHONPATH", "")]
    command = own_command("gate", "--interleave", reference, "--json", "--", *arguments, python=str(python))
    done = finished(command, folder, {"PYTHONPATH": os.pathsep.join(filter(None, entries))})
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


WAYS = ("current folder", "PYTHONPATH", "editable, with a finder", "editable, with a .pth")


@pytest.mark.campaign
@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_imported_the_commits_are_compared(way, tmp_path, environment):
    """A step with 15% more work is a regression; a commit that changes another file is none."""
    project, elsewhere = tmp_path / "mynet", tmp_path / "elsewhere"
    elsewhere.mkdir()
    in_src = way in ("PYTHONPATH", "editable, with a .pth")
    module = "src/mynet/net.py" if in_src else "mynet/net.py"
    rest = {"pyproject.toml": IN_SRC if in_src else FLAT, ".gitignore": "build\n*.egg-info\n"}
    rest[module.replace("net.py", "__init__.py")] = ""
    fast = commit(project, {module: NET.format(products=200), **rest})
    same = commit(project, {"README": "not imported"})
    folder, python, path = elsewhere, environment, list[Path]()
    if way == "current folder":
        folder = project
    elif way == "PYTHONPATH":
        path = [project / "src"]
    else:
        install(environment, project, "--editable")
    run = ["--workload", "mynet.net:make", *RUN, "--rounds", "100"]

    code, found, said = gate(folder, fast, *run, python=python, path=path)
    assert "both sides import identical code: this is an A/A comparison" in said
    assert found["code"]["identical"] is True
    assert found["code"]["candidate"]["workload"]["commit"] == same
    # A busy machine may leave it undecided; it must not be called a change.
    assert code in (ExitCode.OK, ExitCode.NOT_COMPARABLE), str(found["comparisons"][0])
    aa = found["comparisons"][0]["ratio"]

    slow = commit(project, {module: NET.format(products=230)})
    code, found, said = gate(folder, fast, *run, python=python, path=path)
    assert f"workload: mynet {fast[:7]} -> {slow[:7]}" in said
    assert code == ExitCode.FAILED, str(found["comparisons"][0])
    assert found["code"]["baseline"]["workload"]["file"] == module
    print(f"{way}: A/A {aa}, 15% more work {found['comparisons'][0]['ratio']}")


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["an installed copy", "outside of the repository"])
def test_the_same_file_on_both_sides_is_refused(way, tmp_path, environment):
    project, elsewhere = tmp_path / "mynet", tmp_path / "elsewhere"
    commit(elsewhere, {"a": ""})
    commit(elsewhere, {"a": "b"})
    files = {"mynet/net.py": NET.format(products=1), "mynet/__init__.py": "", "pyproject.toml": FLAT}
    commit(project, files)
    if way == "an installed copy":
        install(environment, project)
        python, path, fix = str(environment), list[Path](), "pip install -e"
    else:
        (tmp_path / "aside" / "mynet").mkdir(parents=True)
        (tmp_path / "aside" / "mynet" / "net.py").write_text(NET.format(products=1))
        python, path, fix = sys.executable, [tmp_path / "aside"], "outside of the repository"
    run = ["--workload", "mynet.net:make", *RUN, "--rounds", "3"]
    code, _, said = gate(elsewhere, "HEAD~1", *run, python=python, path=path)
    assert code == ExitCode.USAGE, said
    assert len(said.strip().splitlines()) == 1
    assert "both sides load" in said
    assert "net.py" in said
    assert fix in said
