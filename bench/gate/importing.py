"""Where a workload is imported from, and the path that imports it from another checkout instead.

As a script, `OUT TOP ARGUMENTS` prepares a run with these arguments, does not begin it, and writes to the
file OUT what it has imported of its workload, and every module that is imported from below TOP.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from ddp_bench.bench.cli import guarded, to_json
from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.manifest import WorkloadCode, of_json
from ddp_bench.bench.provenance import imported_below, is_own, is_tracked, workload_code
from ddp_bench.bench.run.main import settings_of


def source_of(module: str) -> Path | None:
    """The file that a run started here would import `module` from, found without executing it.

    None where there is none: no such module, or one without a file.
    """
    names = module.split(".")
    if not all(name.isidentifier() for name in names):
        return None
    with _current_folder_first():
        importlib.invalidate_caches()
        spec = _spec(names[0], None)
        for depth in range(2, len(names) + 1):
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = _spec(".".join(names[:depth]), list(spec.submodule_search_locations))
    return Path(spec.origin).absolute() if spec is not None and spec.has_location and spec.origin else None


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Have the path that `models.registry` imports a workload with."""
    before = list(sys.path)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Ask the import system's finders, as `import` does, the editable installs' among them."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            found: ModuleSpec | None = None if find is None else find(name, path)
        except KeyError:  # a folder without __init__.py in a package that is not imported: PathFinder asks it
            found = _namespace(name, path or ())
        if found is not None:
            return found
    return None


def _namespace(name: str, path: Sequence[str]) -> ModuleSpec:
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = [os.path.join(entry, name.rpartition(".")[2]) for entry in path]  # noqa: PTH118 - as on the path
    return found


def moved_folder(folder: Path, top: Path, place: Path) -> Path:
    """The same folder in the checkout `place` of the repository at `top`; one elsewhere stays."""
    folder = folder.absolute()
    return place / folder.resolve().relative_to(top) if _belongs(folder, top, place) else folder


def moved_path(roots: Iterable[Path], top: Path, place: Path, *, python_path: str) -> str:
    """A PYTHONPATH that imports from the checkout `place` what is now imported from the repository at `top`.

    `roots`, the folders that the workload and its repository's other modules are imported from, come first;
    then `python_path`, the present value, and what else on this interpreter's path lies in the repository.
    What git does not track, such as an environment, is in no checkout and stays where it is.
    """
    given = [Path(entry).absolute() for entry in python_path.split(os.pathsep) if entry]
    found = dict.fromkeys(
        moved
        for entry in [*(Path(root) for root in roots), *given, *map(Path, filter(None, sys.path))]
        for moved in _moved_entry(entry, top, place, is_given=entry in given)
    )
    return os.pathsep.join(map(str, found))


def _moved_entry(entry: Path, top: Path, place: Path, *, is_given: bool) -> list[Path]:
    """What stands for an entry of the path: its like in the checkout, itself, or nothing."""
    moved = moved_folder(entry, top, place)
    if moved != entry.absolute() and moved.exists():
        return [moved]
    # A tracked folder that the other commit lacks has nothing of it.
    return [entry] if is_given and not is_tracked(entry.resolve(), top) else []


def _belongs(folder: Path, top: Path, place: Path) -> bool:
    """Whether a folder is in the repository; its checkout may be in a folder for temporary files there."""
    real = folder.resolve()
    return is_own(real, top) and not real.is_relative_to(place)


@dataclass(frozen=True)
class Seen:
    """What a side imports: `code` as in a manifest, `modules` with their files below a folder."""

    code: WorkloadCode
    file: Path
    modules: Mapping[str, Path]

    @classmethod
    def read(cls, place: Path) -> Seen:
        """What the script has written."""
        told = json.loads(place.read_text(encoding="utf-8"))
        modules = {name: Path(file) for name, file in told["modules"].items()}
        return cls(of_json(told["code"], WorkloadCode, place), Path(told["file"]), modules)


def main(given: Sequence[str]) -> int:
    """Prepare a run and write what it has imported; the exit code."""
    out, top, *arguments = given
    return guarded("run", lambda: _main(Path(out), Path(top), arguments))


def _main(out: Path, top: Path, arguments: Sequence[str]) -> int:
    settings = settings_of(arguments)
    from ddp_bench.bench.worker.job import prepare

    prepare(settings)
    spec = settings.workload or ""
    told = {
        "code": workload_code(spec),
        "file": str(getattr(sys.modules[spec.partition(":")[0]], "__file__", None)),
        "modules": {name: str(file) for name, file in imported_below(top).items()},
    }
    out.write_text(to_json(told), encoding="utf-8")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
