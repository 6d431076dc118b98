"""Whose repository is compared, and what is refused before anything is measured."""

import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
from commands import ROOT
from made import made_manifest
from made_project import commit, git

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.gate import checkouts
from ddp_bench.bench.gate.checkouts import (
    check_loaded,
    find_comparable_repository,
    find_workload_file,
    make_worktree,
    move_python_path,
)
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.gate.sides import make_paths_absolute
from ddp_bench.bench.run.main import parse_settings

NET = """
from torch import nn
def make(): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
"""


def found(workload):
    return find_comparable_repository(workload, find_workload_file(workload.partition(":")[0]))


def test_the_repository_is_that_of_the_workloads_file_which_is_not_imported(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "mynet", tmp_path / "elsewhere"
    commit(
        project, {"src/net_p/part/net.py": "raise", "src/net_p/__init__.py": "raise", ".gitignore": "env\n"}
    )
    commit(elsewhere, {"a": ""})
    monkeypatch.chdir(elsewhere)
    monkeypatch.syspath_prepend(project / "src")
    assert find_workload_file("net_p.part.net") == project / "src" / "net_p" / "part" / "net.py"
    assert found("net_p.part.net:make") == project
    (elsewhere / "net_p.py").touch()
    assert found("net_p:make") == elsewhere, "the current folder comes first, as in a run"
    with pytest.raises(UsageError, match=r"no module 'net_p\.part\.net' found from"):
        found("net_p.part.net:make")


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (
            "aside",
            r"aside/net_q\.py is in no git repository: put it under version control, .*--interleave \.",
        ),
        ("mynet/env/site-packages", "is an installed copy: install the project with pip install -e"),
    ],
)
def test_a_workload_that_no_commit_has_is_refused(folder, message, tmp_path, monkeypatch):
    commit(tmp_path / "mynet", {"a": ""})
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "net_q.py").touch()
    monkeypatch.chdir(tmp_path / "mynet")
    monkeypatch.syspath_prepend(tmp_path / folder)
    with pytest.raises(UsageError, match=message):
        found("net_q:make")


def test_ddp_benchs_own_is_no_workload():
    with pytest.raises(UsageError, match="leave it out"):
        found("ddp_bench.models.resnet:resnet20")


def test_the_built_in_models_are_compared_in_ddp_benchs_own_checkout_alone(tmp_path, monkeypatch):
    own, theirs, neither = (tmp_path / name for name in ("own", "theirs", "neither"))
    commit(own, {"bench/a": ""})
    commit(theirs, {"a": ""})
    neither.mkdir()
    monkeypatch.setattr(checkouts, "ROOT", own)
    for here in (own, own / "bench"):
        monkeypatch.chdir(here)
        assert checkouts.find_package_repository() == own
    installed = theirs / "env" / "site-packages"
    installed.mkdir(parents=True)
    for code, here in ((own, neither), (own, theirs), (installed, theirs)):
        monkeypatch.setattr(checkouts, "ROOT", code)
        monkeypatch.chdir(here)
        with pytest.raises(UsageError, match=r"not a ddp-bench checkout, .*; name your model after --"):
            checkouts.find_package_repository()


@pytest.mark.campaign
def test_an_unknown_reference_of_a_users_project_is_one_line(tmp_path, monkeypatch, capsys):
    commit(tmp_path, {"net_r.py": NET})
    monkeypatch.chdir(tmp_path)
    assert main(["--interleave", "fast", "--", "--workload", "net_r:make"]) == 2
    error = capsys.readouterr().err.strip()
    assert f"git knows no 'fast' in {tmp_path}" in error
    assert "\n" not in error


def test_a_worktree_runs_no_hook_of_the_repository(tmp_path):
    commit(tmp_path, {"a": "1"})
    hook = tmp_path / ".git" / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    with make_worktree(tmp_path, "HEAD") as place:
        assert (place / "a").read_text() == "1"
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1


def test_only_our_lost_worktrees_are_forgotten(tmp_path):
    """A user's may lie on a disk that is not mounted now: with it its branch's HEAD would go."""
    top, theirs = tmp_path / "top", tmp_path / "ddp-bench-main" / "checkout"
    commit(top, {"net.py": ""})
    theirs.parent.mkdir()
    for arguments in (["add", "--detach", str(theirs)], ["lock", "--reason", "on a stick", str(theirs)]):
        subprocess.run(["git", "-C", str(top), "worktree", *arguments], check=True, capture_output=True)
    with make_worktree(top, "HEAD") as ours:
        kept = shutil.copytree(top / ".git" / "worktrees", tmp_path / "kept")
    shutil.copytree(kept, top / ".git" / "worktrees", dirs_exist_ok=True)  # as a kill leaves it
    shutil.rmtree(theirs)
    known = partial(subprocess.check_output, ["git", "worktree", "list"], cwd=top, text=True)
    assert str(ours) in known()
    with make_worktree(top, "HEAD"):
        assert str(ours) not in known()
    assert str(theirs) in known()


def test_a_machine_without_git_is_told_so(tmp_path, monkeypatch):
    commit(tmp_path, {"net_s.py": ""})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="git is not installed"):
        found("net_s:make")


@pytest.mark.parametrize("folder", ["was_file", ".git"])
def test_a_folder_that_the_baseline_lacks_room_for_is_one_line(folder, tmp_path, monkeypatch, capsys):
    top = tmp_path / "top"
    before = commit(top, {"net.py": "", "was_file": ""})
    (top / "was_file").unlink()
    commit(top, {"was_file/other.py": ""})
    monkeypatch.chdir(top / folder)
    monkeypatch.syspath_prepend(top)
    assert main(["--interleave", before, "--", "--workload", "net:make", "--modes", "ddp"]) == 2
    assert f"has no folder {folder}" in capsys.readouterr().err.splitlines()[-1]


def test_a_shallow_clone_and_a_linked_worktree_are_compared_as_far_as_they_reach(tmp_path):
    project, shallow, linked = tmp_path / "project", tmp_path / "shallow", tmp_path / "linked"
    commit(project, {"net.py": "first"})
    commit(project, {"net.py": "second"})
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{project}", str(shallow))
    with make_worktree(shallow, "HEAD") as place:
        assert (place / "net.py").read_text() == "second"
    with (
        pytest.raises(UsageError, match=r"'HEAD~1' in .*, a shallow clone, which git fetch --unshallow comp"),
        checkouts.make_worktree(shallow, "HEAD~1"),
    ):
        pytest.fail("that commit is not there")
    git(project, "worktree", "add", "-q", "--detach", str(linked))
    with make_worktree(linked, "HEAD~1") as place:
        assert (place / "net.py").read_text() == "first"
    assert linked.exists()
    listed = subprocess.check_output(["git", "worktree", "list"], cwd=project, text=True).splitlines()
    assert len(listed) == 2, "its own are there still, and no other"


def test_the_baseline_has_loaded_the_files_of_its_commit_alone(tmp_path):
    project, place = tmp_path / "mynet", tmp_path / "checkout"
    commit(project, {"net.py": "", "part.py": "", ".gitignore": "env\n"})

    def check(*files):
        check_loaded(made_manifest(workload={"files": {str(file): "x" for file in files}}), project, place)

    check(place / "net.py", project / "env" / "src" / "tool.py")  # which git does not track
    with pytest.raises(UsageError, match=r"the baseline loads .*mynet/part\.py, .*in PYTHONPATH"):
        check(place / "net.py", project / "part.py")
    with pytest.raises(UsageError, match=r"loads .*site-packages/net\.py"):
        check(tmp_path / "env" / "site-packages" / "net.py")


def test_a_runs_files_are_those_of_the_folder_that_the_gate_is_called_in(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text('data = "images"\nrounds = 7\n')
    monkeypatch.chdir(tmp_path)
    given = ["--config", "run.toml", "--seed", "3"]
    whole = make_paths_absolute(given, parse_settings(given))
    monkeypatch.chdir(ROOT)
    found = parse_settings(whole)
    assert (found.data, found.rounds, found.seed) == (str(tmp_path / "images"), 7, 3)
    assert make_paths_absolute(["--data", "host"], parse_settings(["--data", "host"])) == ["--data", "host"]


def test_everything_of_the_repository_is_moved_and_nothing_else(tmp_path, monkeypatch):
    """The oracle is Python itself: where it imports from with that path."""
    top, place, other = (tmp_path / name for name in ("mynet", "checkout", "other"))
    old = {"src/net_e.py": "", "libs/net_f.py": ""}
    new = {**old, "later/net_g.py": "", ".gitignore": "env\n"}
    commit(top, new)
    for folder, files in ((place, old), (other, {"net_h.py": ""}), (top, {"env/net_i.py": ""})):
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
    monkeypatch.chdir(top)
    monkeypatch.setattr(sys, "path", [*sys.path, str(top / "libs")])
    given = os.pathsep.join([str(other), "later", "env"])
    path = move_python_path([top / "src"], top, place, python_path=given)
    ask = "import sys; from importlib.util import find_spec as find\n"
    ask += "print(*[getattr(find(name), 'origin', name) for name in sys.argv[1:]])"
    names = [f"net_{letter}" for letter in "efghi"]
    said = subprocess.check_output(
        [sys.executable, "-P", "-c", ask, *names], env={**os.environ, "PYTHONPATH": path}, text=True
    )
    wanted = f"{place}/src/net_e.py {place}/libs/net_f.py net_g {other}/net_h.py {top}/env/net_i.py"
    assert said.split() == wanted.split()
