"""Starts a module of this suite so that `bench`, `models` and `report` are those beside this file.

`python -m` puts the current folder first: there a project may have packages of the same names. As a script,
`python -P start.py MODULE ARGUMENTS`, this runs without having imported any package of the suite.
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds the packages: a checkout, or site-packages."""

PACKAGES = ("bench", "models", "report")


def arguments_of(module: str) -> list[str]:
    """Return what to give Python so that it runs `module` of the suite; the module's own arguments follow."""
    return ["-P", __file__, module]


class OwnPackages:
    """Finds the packages of the suite, before any folder on the path is asked."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, _: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a package of the suite is; None for everything else."""
        if path is not None or name not in PACKAGES:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [str(ROOT)])


if __name__ == "__main__":
    sys.meta_path.insert(0, OwnPackages)
    _, name, *sys.argv[1:] = sys.argv
    runpy.run_module(name, run_name="__main__", alter_sys=True)
