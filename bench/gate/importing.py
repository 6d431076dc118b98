"""Where a workload is imported from, and the path that imports it from another checkout instead."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path

from ..errors import UsageError
from ..manifest import Manifest
from ..package import OWN_FOLDERS
from ..provenance import INSTALLED, is_own, is_tracked, not_found, repository_with


def workload_file(module: str) -> Path:
    """The file that a run here would import `module` from; nothing is imported. Raises UsageError without."""
    top, *parts = module.split(".")
    folders = [str(Path.cwd()), *sys.path]
    found = next((spec for one in sys.meta_path if (spec := one.find_spec(top, folders))), None)
    for part in parts:
        # The finders above would look for the package in sys.modules.
        within = map(pkgutil.get_importer, (found and found.submodule_search_locations) or ())
        found = next((spec for one in within if one and (spec := one.find_spec(part, None))), None)
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise UsageError(not_found(module, Path.cwd()))
    return Path(found.origin).resolve()


def repository_to_compare(workload: str, file: Path) -> Path:
    """The repository with a workload's file. Raises UsageError where no two commits of it can be compared."""
    if any(file.is_relative_to(folder) for folder in OWN_FOLDERS):
        raise UsageError(f"--workload {workload} is ddp-bench's own; leave it out to compare its commits")
    top = repository_with(file)
    if top is not None:
        return top
    if not INSTALLED.isdisjoint(file.parts):
        fix = "is an installed copy: install the project with pip install -e, or run where its source lies"
    else:
        fix = "is in no git repository: put it under version control, or compare the code as it stands with "
        fix += "--interleave ."
    raise UsageError(f"--interleave: {file} {fix}")


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

    `roots`, where the workload is imported from, come first; then `python_path`, the present value, and what
    else on this interpreter's path lies in the repository. What git does not track, such as an environment,
    is in no checkout and stays where it is.
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


def check_loaded(baseline: Manifest, top: Path, place: Path) -> None:
    """Raise UsageError where the baseline has loaded code, by its manifest, that is not its commit's.

    That lies in `place`. What git does not track in `top`, such as a submodule, is the same on both sides.
    """
    files = [Path(file) for file in (baseline.workload.files if baseline.workload else ())]
    outside = [file for file in files if not file.is_relative_to(place)]
    left = [file for file in outside if len(outside) == len(files) or is_tracked(file, top)]
    if left:
        raise UsageError(
            f"--interleave: the baseline loads {left[0]}, which is not of its commit's checkout, so no two "
            "commits would be compared; name its folder in PYTHONPATH, and in nothing else that puts it on "
            "the path"
        )
