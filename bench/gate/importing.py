"""Where a workload is imported from, and the path that imports it from another checkout instead.

As a script, `OUT TOP ARGUMENTS` prepares a run with these arguments, does not begin it, and writes to the
file OUT what it has imported of its workload, and every module that is imported from below TOP. Where TOP is
empty it is the top of the repository with the workload's file, else of the current folder's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cli import guarded, to_json
from ..errors import ExitCode
from ..manifest import WorkloadCode, of_json
from ..provenance import (
    imported_below,
    is_own,
    is_tracked,
    repository_of,
    repository_with,
    workload_code,
)
from ..run.main import settings_of


def moved_folder(folder: Path, top: Path, place: Path) -> Path:
    """The same folder in the checkout `place` of the repository at `top`; one elsewhere stays.

    So does one in the checkout, which may be in a folder for temporary files of the repository.
    """
    real = folder.resolve()
    if is_own(real, top) and not real.is_relative_to(place):
        return place / real.relative_to(top)
    return folder.absolute()


def moved_path(roots: Iterable[Path], top: Path, place: Path, *, python_path: str) -> str:
    """A PYTHONPATH that imports from the checkout `place` what is now imported from the repository at `top`.

    `roots`, the folders that the workload and its repository's other modules are imported from, come first;
    then `python_path`, the present value, and what else on this interpreter's path lies in the repository.
    What git does not track, such as an environment, is in no checkout and stays where it is.
    """
    given = [Path(entry).absolute() for entry in python_path.split(os.pathsep) if entry]
    found = []
    for entry in [*roots, *given, *map(Path, filter(None, sys.path))]:
        moved = moved_folder(entry, top, place)
        if moved != entry.absolute() and moved.exists():
            found.append(moved)
        elif entry in given and not is_tracked(entry.resolve(), top):
            # A tracked folder that the other commit lacks has nothing of it.
            found.append(entry)
    return os.pathsep.join(map(str, dict.fromkeys(found)))


@dataclass(frozen=True)
class Seen:
    """What a side imports: `code` as in a manifest, `modules` with their files below `top`."""

    code: WorkloadCode
    file: Path
    modules: Mapping[str, Path]
    top: Path | None = None
    """Of the repository; None where there is none."""

    @classmethod
    def read(cls, place: Path) -> Seen:
        """What the script has written."""
        told = json.loads(place.read_text(encoding="utf-8"))
        modules = {name: Path(file) for name, file in told["modules"].items()}
        top = Path(told["top"]) if told["top"] else None
        return cls(of_json(told["code"], WorkloadCode, place), Path(told["file"]), modules, top)


def main(given: Sequence[str]) -> int:
    """Prepare a run and write what it has imported; the exit code."""
    out, top, *arguments = given
    return guarded("run", lambda: _main(Path(out), Path(top) if top else None, arguments))


def _main(out: Path, top: Path | None, arguments: Sequence[str]) -> int:
    settings = settings_of(arguments)
    from ..worker.job import resolve_job

    resolve_job(settings)
    spec = settings.workload or ""
    file = Path(str(getattr(sys.modules[spec.partition(":")[0]], "__file__", None)))
    top = top or repository_with(file.resolve()) or repository_of(Path.cwd())
    told = {
        "code": workload_code(spec),
        "file": str(file),
        "modules": {name: str(path) for name, path in imported_below(top).items()} if top else {},
        "top": str(top or ""),
    }
    out.write_text(to_json(told), encoding="utf-8")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
