"""The path that imports from another checkout, against what Python imports."""

import os
import subprocess
import sys

from made_project import commit

from ddp_bench.bench.gate.importing import moved_folder, moved_path


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
    wanted = [
        place / "src/net_e.py",
        place / "libs/net_f.py",
        "net_g",
        other / "net_h.py",
        top / "env/net_i.py",
    ]
    assert said.split() == [str(file) for file in wanted]


def test_a_folder_of_the_repository_is_moved_and_one_elsewhere_stays(tmp_path):
    top, inner, place = tmp_path / "mynet", tmp_path / "mynet" / "a", tmp_path / "mynet" / "tmp" / "checkout"
    assert moved_folder(inner, top, place) == place / "a"
    assert moved_folder(tmp_path, top, place) == tmp_path
    assert moved_folder(place / "a", top, place) == place / "a", "it is in the checkout already"
