"""Where this package lies, how its own processes start, and which version of a package is installed."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).parents[1].resolve()

ROOT = PACKAGE.parent
"""The checkout that this code runs from, or the folder that it is installed in."""

OWN_FOLDERS = frozenset(path.resolve() for path in (PACKAGE, *PACKAGE.iterdir()) if path.is_dir())
"""Folders of this code; in a checkout the package has links to some."""


def own_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command line of `ddp-bench arguments` that finds this package, in any folder.

    With `-m` and one of our modules as first arguments it runs that module.
    """
    return [python, str(PACKAGE / "__main__.py"), *arguments]


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
