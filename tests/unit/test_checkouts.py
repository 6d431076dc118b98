"""Whose repository is compared, and what is refused before anything is measured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from made_project import commit, git

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate import checkouts
from ddp_bench.bench.gate.checkouts import Checkout, refuse_uncompared
from ddp_bench.bench.gate.importing import Seen, moved_folder, moved_path
from ddp_bench.bench.gate.interleave import from_any_folder
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.manifest import WorkloadCode
from ddp_bench.bench.run.main import settings_of
from ddp_bench.models import resnet


def looked(workload, folder):
    """What the candidate's side imports, which starts where this process is."""
    return checkouts.look(Checkout("candidate", Path.cwd(), sys.executable), ["--workload", workload], folder)


NET = """
from torch import nn
def make(): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
"""


def test_the_repository_is_that_of_the_workloads_file(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "mynet", tmp_path / "elsewhere"
    commit(project, {"src/net_p.py": NET})
    commit(elsewhere, {"a": ""})
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PYTHONPATH", str(project / "src"))
    found = looked("net_p:make", tmp_path)
    assert checkouts.repository_to_compare("net_p:make", found) == project
    assert found.modules == {"net_p": project / "src" / "net_p.py"}


@pytest.mark.campaign
def test_a_workload_in_no_repository_leaves_the_current_folders(tmp_path, monkeypatch):
    (tmp_path / "net_q.py").write_text(NET)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = looked("net_q:make", tmp_path)
    with pytest.raises(UsageError, match=r"neither .*net_q\.py nor the current folder is in a git repos"):
        checkouts.repository_to_compare("net_q:make", found)
    commit(tmp_path / "here", {"a": ""})
    assert checkouts.repository_to_compare("net_q:make", looked("net_q:make", tmp_path)) == tmp_path / "here"


@pytest.mark.campaign
def test_what_is_no_workload_of_the_users_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be measured: .*no module 'no_such_net' found from"):
        looked("no_such_net:make", tmp_path)
    own = Seen(WorkloadCode(), Path(resnet.__file__), {}, None)
    with pytest.raises(UsageError, match="leave it out"):
        checkouts.repository_to_compare("ddp_bench.models.resnet:resnet20", own)


def test_the_built_in_models_are_compared_in_ddp_benchs_own_checkout_alone(tmp_path, monkeypatch):
    own, theirs, neither = (tmp_path / name for name in ("own", "theirs", "neither"))
    commit(own, {"bench/a": ""})
    commit(theirs, {"a": ""})
    neither.mkdir()
    monkeypatch.setattr(checkouts, "ROOT", own)
    for here in (own, own / "bench"):
        monkeypatch.chdir(here)
        assert checkouts.own_repository() == own
    monkeypatch.chdir(neither)
    with pytest.raises(UsageError, match="do not change here; name a workload"):
        checkouts.own_repository()
    monkeypatch.chdir(theirs)
    with pytest.raises(UsageError, match=r"do not change with the commits of .*theirs; name a workload"):
        checkouts.own_repository()
    monkeypatch.setattr(checkouts, "ROOT", theirs / "env" / "site-packages")
    (theirs / "env" / "site-packages").mkdir(parents=True)
    with pytest.raises(UsageError, match="runs from no git checkout here; name a workload of yours"):
        checkouts.own_repository()


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
    with checkouts.worktree(tmp_path, "HEAD") as place:
        assert (place / "a").read_text() == "1"
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1


def test_a_shallow_clone_and_a_linked_worktree_are_compared_as_far_as_they_reach(tmp_path):
    project, shallow, linked = tmp_path / "project", tmp_path / "shallow", tmp_path / "linked"
    commit(project, {"net.py": "first"})
    commit(project, {"net.py": "second"})
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{project}", str(shallow))
    with checkouts.worktree(shallow, "HEAD") as place:
        assert (place / "net.py").read_text() == "second"
    with (
        pytest.raises(UsageError, match=r"'HEAD~1' in .*, a shallow clone, which git fetch --unshallow comp"),
        checkouts.worktree(shallow, "HEAD~1"),
    ):
        pytest.fail("that commit is not there")
    git(project, "worktree", "add", "-q", "--detach", str(linked))
    with checkouts.worktree(linked, "HEAD~1") as place:
        assert (place / "net.py").read_text() == "first"
    assert linked.exists()
    listed = subprocess.check_output(["git", "worktree", "list"], cwd=project, text=True).splitlines()
    assert len(listed) == 2, "its own are there still, and no other"


@pytest.mark.campaign
def test_a_baseline_without_its_submodules_says_so(tmp_path, monkeypatch):
    part, project = tmp_path / "part", tmp_path / "project"
    commit(part, {"width.py": "WIDTH = 2"})
    commit(project, {"net_s.py": NET + "from lib.width import WIDTH"})
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(part), "lib")
    commit(project, {"a": ""})
    monkeypatch.chdir(project)
    arguments = ["--workload", "net_s:make"]
    with (
        pytest.raises(UsageError, match=r"baseline side .*'lib.width'; its checkout has no files of subm"),
        checkouts.both_checkouts("HEAD", settings_of(arguments), arguments, None),
    ):
        pytest.fail("it cannot be imported")


def seen(file, modules=None):
    return Seen({}, file, {"net": file, **(modules or {})})


@pytest.fixture
def project(tmp_path):
    commit(tmp_path / "mynet", {"net.py": "", "part.py": "", ".gitignore": "env\n"})
    return tmp_path / "mynet"


def test_files_of_the_two_checkouts_are_compared(project, tmp_path):
    place = tmp_path / "checkout"
    not_tracked = {"tool": project / "env" / "src" / "tool.py"}
    refuse_uncompared(seen(place / "net.py", not_tracked), seen(project / "net.py"), project, place)
    needs_the_working_tree = seen(place / "net.py", {"part": project / "part.py"})
    with pytest.raises(UsageError, match=r"both sides load .*part\.py"):
        refuse_uncompared(needs_the_working_tree, seen(project / "net.py"), project, place)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ("mynet/net.py", "mynet/net.py", "both sides load .*mynet/net.py, .*leave that to PYTHONPATH"),
        ("a/site-packages/net.py", "a/site-packages/net.py", "both sides load .*pip install -e"),
        ("aside/net.py", "aside/net.py", "both sides load .*outside of the repository"),
        ("checkout/net.py", "aside/net.py", "the candidate loads .*aside/net.py.*outside of the repository"),
        ("a/site-packages/net.py", "mynet/net.py", "the baseline loads .*pip install -e"),
    ],
)
def test_a_side_that_loads_another_file_is_refused(ours, theirs, message, project, tmp_path):
    with pytest.raises(UsageError, match=message):
        refuse_uncompared(seen(tmp_path / ours), seen(tmp_path / theirs), project, tmp_path / "checkout")


def test_equal_code_in_two_environments_is_no_a_a_comparison(tmp_path):
    code = WorkloadCode(repository="mynet", commit="a" * 40, code_sha256="x")
    sides = [Checkout("a side", tmp_path, python, code=code) for python in ("python3", "python3", "python4")]
    assert "this is an A/A comparison" in checkouts.planned_code(*sides[:2]).lines()[1]
    assert "what differs is the environment" in checkouts.planned_code(*sides[1:]).lines()[1]


def test_a_runs_files_are_those_of_the_folder_that_the_gate_is_called_in(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text('data = "images"\nrounds = 7\n')
    monkeypatch.chdir(tmp_path)
    given = ["--config", "run.toml", "--seed", "3"]
    whole = from_any_folder(given, settings_of(given))
    monkeypatch.chdir(ROOT)
    found = settings_of(whole)
    assert (found.data, found.rounds, found.seed) == (str(tmp_path / "images"), 7, 3)
    assert from_any_folder(["--data", "host"], settings_of(["--data", "host"])) == ["--data", "host"]


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
    path = moved_path([top / "src"], top, place, python_path=given)
    ask = "import sys; from importlib.util import find_spec as find\n"
    ask += "print(*[getattr(find(name), 'origin', name) for name in sys.argv[1:]])"
    names = [f"net_{letter}" for letter in "efghi"]
    said = subprocess.check_output(
        [sys.executable, "-P", "-c", ask, *names], env={**os.environ, "PYTHONPATH": path}, text=True
    )
    wanted = f"{place}/src/net_e.py {place}/libs/net_f.py net_g {other}/net_h.py {top}/env/net_i.py"
    assert said.split() == wanted.split()


def test_a_folder_of_the_repository_is_moved_and_one_elsewhere_stays(tmp_path):
    top, inner, place = tmp_path / "mynet", tmp_path / "mynet" / "a", tmp_path / "mynet" / "tmp" / "checkout"
    assert moved_folder(inner, top, place) == place / "a"
    assert moved_folder(tmp_path, top, place) == tmp_path
    assert moved_folder(place / "a", top, place) == place / "a", "it is in the checkout already"
