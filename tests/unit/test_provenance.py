"""What a manifest says of a workload's code, against git and sha256sum themselves."""

import importlib
import subprocess
import sys

import pytest
from made_project import commit, git
from msgspec import structs, to_builtins

from ddp_bench.bench.machine import provenance
from ddp_bench.bench.machine.manifest import Git, WorkloadCode
from ddp_bench.bench.machine.provenance import describe_package_commit, describe_workload_code


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Modules and path as they were, whatever a test imports."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def code_of(spec, root):
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    importlib.import_module(spec.partition(":")[0])
    return describe_workload_code(spec)


def test_a_workload_is_told_by_repository_commit_and_content(tmp_path):
    top = tmp_path / "my.net"
    files = {"src/net_k/__init__.py": "from net_k import part", "src/net_k/part.py": "A = 1", "other.py": ""}
    made = commit(top, files)
    git(top, "remote", "add", "origin", "https://me:secret@example.org/team/net.git?token=c")
    code = code_of("net_k:make", top / "src")
    digest = subprocess.check_output(["sha256sum", str(top / "src/net_k/__init__.py")], text=True).split()[0]
    assert code == WorkloadCode(
        spec="net_k:make",
        file="src/net_k/__init__.py",
        code_sha256=code.code_sha256,
        repository="net",
        commit=made,
        dirty=False,
        files=code.files,
    )
    assert code.files.keys() == {str(top / name) for name in ("src/net_k/__init__.py", "src/net_k/part.py")}
    assert code.files[str(top / "src/net_k/__init__.py")] == digest
    (top / "other.py").write_text("not imported")
    assert describe_workload_code("net_k:make") == structs.replace(code, dirty=True)
    (top / "src/net_k/part.py").write_text("A = 2")
    changed = describe_workload_code("net_k:make")
    assert changed.files.keys() == code.files.keys()
    assert changed.code_sha256 != code.code_sha256


def test_the_same_code_has_the_same_hash_in_another_worktree(tmp_path):
    """What the other one loads of the first is told with it."""
    top, place = tmp_path / "mynet", tmp_path / "checkout"
    commit(top, {"net_l.py": "import net_l_part", "net_l_part.py": ""})
    git(top, "worktree", "add", "--quiet", "--detach", str(place))
    first = code_of("net_l:make", top)
    for name in ("net_l", "net_l_part"):
        del sys.modules[name]
    again = code_of("net_l:make", place)
    assert structs.replace(again, files={}) == structs.replace(first, files={})
    assert again.files.keys() == {str(place / name) for name in ("net_l.py", "net_l_part.py")}
    for name in ("net_l", "net_l_part"):
        del sys.modules[name]
    (place / "net_l_part.py").unlink()
    files = code_of("net_l:make", place).files
    assert files.keys() == {str(place / "net_l.py"), str(top / "net_l_part.py")}
    assert first.repository == "mynet"


def test_a_file_that_no_commit_has_is_no_clean_state(tmp_path):
    commit(tmp_path / "mynet", {"a": ""})
    (tmp_path / "mynet" / "net_m.py").write_text("")
    assert code_of("net_m:make", tmp_path / "mynet").dirty is True


@pytest.mark.parametrize("folder", ["elsewhere", "mynet/.venv/lib/site-packages", "mynet/ignored"])
def test_a_workload_in_no_repository_has_its_content_alone(folder, tmp_path):
    """Nor is the commit told of a repository around the environment that it is installed in."""
    commit(tmp_path / "mynet", {".gitignore": "ignored\n"})
    root = tmp_path / folder
    (root / "net_n").mkdir(parents=True)
    (root / "net_n" / "net.py").write_text("")
    code = code_of("net_n.net:make", root)
    assert set(to_builtins(code)) == {"spec", "file", "code_sha256", "files"}
    assert code.file == "net_n/net.py"


def test_a_repository_around_an_installed_ddp_bench_is_not_its_own(tmp_path, monkeypatch):
    commit(tmp_path, {"a": ""})
    (tmp_path / ".venv" / "ddp_bench").mkdir(parents=True)
    (tmp_path / ".venv" / "ddp_bench" / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "ROOT", tmp_path / ".venv")
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / ".venv" / "ddp_bench")
    assert describe_package_commit() == Git()
    made = commit(tmp_path, {})
    assert describe_package_commit() == Git(commit=made, dirty=False), "now it is under version control there"


def test_git_is_asked_of_the_folder_also_within_a_hook(tmp_path, monkeypatch):
    commit(tmp_path / "hooked", {"a": ""})
    commit(tmp_path / "mynet", {"a": ""})
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "hooked" / ".git"))
    assert provenance.find_repository(tmp_path / "mynet") == tmp_path / "mynet"
