"""Which file a workload would come from, against what Python imports; and the path of another checkout."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_project import commit

from ddp_bench.bench.gate.importing import moved_folder, moved_path, source_of

ENDS = "raise SystemExit('this was run')"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The current folder, and one on the path."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(there), *sys.path])
    return here, there


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("net_a", "net_a.py"),
        ("net_b", "net_b/__init__.py"),
        ("net_b.inner.net", "net_b/inner/net.py"),
        ("net_c.deep.er.net", "net_c/deep/er/net.py"),
    ],
)
def test_the_file_is_found_and_not_run(module: str, file: str, folders: tuple[Path, Path]) -> None:
    """Also in packages without `__init__.py`, and below a package that would fail."""
    for folder in reversed(folders):
        place = folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        if module.startswith("net_b"):
            (folder / "net_b" / "__init__.py").write_text(ENDS)
        place.write_text(ENDS)
        assert source_of(module) == place, "the current folder comes first"
    before = list(sys.path)
    with pytest.raises(SystemExit, match="this was run"):
        importlib.import_module(module)
    assert sys.path == before


@pytest.mark.parametrize("module", ["no_such_module", "json.no_such_module", "sys", "", "tests_of_nobody.x"])
def test_what_has_no_file_is_none(module: str) -> None:
    assert source_of(module) is None


def test_a_users_package_of_our_name_is_not_what_a_run_imports(folders: tuple[Path, Path]) -> None:
    (folders[0] / "models").mkdir()
    (folders[0] / "models" / "__init__.py").write_text(ENDS)
    found = source_of("ddp_bench.models.workload")
    assert found is not None
    assert folders[0] not in found.parents


FINDER = """
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "net_d":
            return importlib.util.spec_from_file_location(name, {file!r})
"""


def test_an_editable_installs_finder_is_asked(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folders[0] / "lib" / "net_d.py"
    made: dict[str, type] = {}
    exec(FINDER.format(file=str(file)), made)  # as setuptools writes one
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, made["Finder"]])
    assert source_of("net_d") == file


def test_everything_of_the_repository_is_moved_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    wanted = [
        place / "src/net_e.py",
        place / "libs/net_f.py",
        "net_g",
        other / "net_h.py",
        top / "env/net_i.py",
    ]
    assert said.split() == [str(file) for file in wanted]


def test_a_folder_of_the_repository_is_moved_and_one_elsewhere_stays(tmp_path: Path) -> None:
    top, inner, place = tmp_path / "mynet", tmp_path / "mynet" / "a", tmp_path / "mynet" / "tmp" / "checkout"
    assert moved_folder(inner, top, place) == place / "a"
    assert moved_folder(tmp_path, top, place) == tmp_path
    assert moved_folder(place / "a", top, place) == place / "a", "it is in the checkout already"
