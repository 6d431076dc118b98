"""The one name that is surely ours: finds this project's packages whatever else is named like them.

`bench`, `models` and `report` are common names, and a user's project may have packages of its own called so.
A command installs a finder that gives these names to ours, until it imports the user's code: from then on
names that the user has too are the user's, for every import but those in our own modules. Elsewhere, as in a
test session of the user's, our packages are in `sys.modules` only while they import each other.

    ddp-bench run --modes ddp             the console script
    python .../ddp_bench.py run ...       how one of our processes starts another
"""

from __future__ import annotations

import builtins
import importlib
import os
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "ddp_bench"
ROOT = Path(__file__).resolve().parent
NAMES = ("bench", "models", "report")

_MARK = "bench/pytest_plugin.py"
"""Lies beside our packages in every copy, such as an installed one while a checkout runs."""

TYPED_ENV = "_DDP_BENCH_TYPED"
"""How the user called the command, for the commands that messages name; no prefix of a condition of a run."""


def own_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command line of `ddp-bench arguments` that finds these packages, in any folder.

    With `-m` and one of our modules as first arguments it runs that module.
    """
    return [python, str(ROOT / "ddp_bench.py"), *arguments]


@dataclass
class _Names:
    """Which of our names are not ours in this process, and the modules kept out of `sys.modules`."""

    is_installed: bool = False
    given: set[str] = field(default_factory=lambda: set(NAMES))
    aside: dict[str, ModuleType] = field(default_factory=dict)
    depth: int = 0
    """How many `ours` are entered, one in another."""
    lock: threading.RLock = field(default_factory=threading.RLock)


_STATE = _Names()


def _is_given(module: str) -> bool:
    return module.partition(".")[0] in _STATE.given


def _swap() -> None:
    """Exchange the modules of the given names in `sys.modules` with those aside: ours with the user's."""
    found = {name: module for name, module in list(sys.modules.items()) if _is_given(name)}
    for name in found:
        del sys.modules[name]
    sys.modules.update(_STATE.aside)
    _STATE.aside = found


@contextmanager
def ours() -> Iterator[None]:
    """Within, `bench`, `models` and `report` are ours."""
    with _STATE.lock:
        _add_finder()
        _STATE.depth += 1
        if _STATE.depth == 1:
            _swap()
        try:
            yield
        finally:
            if _STATE.depth == 1:
                _swap()
            _STATE.depth -= 1


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,  # noqa: A002 - the signature of __import__
    locals: Mapping[str, object] | None = None,  # noqa: A002
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """What an import statement of our own modules calls."""
    if not _is_given(name):
        return builtins.__import__(name, globals, locals, fromlist, level)
    with ours():
        return builtins.__import__(name, globals, locals, fromlist, level)


_BUILTINS = {**vars(builtins), "__import__": _import}


class _Loader(SourceFileLoader):
    """Loads one of our modules, whose imports then find ours at any time."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = _BUILTINS
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Comes before `sys.path`, for our names alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in (*NAMES, NAME):
            return None
        if _is_given(fullname) and not _STATE.depth:
            return theirs(fullname) if path is None and _STATE.is_installed else None
        spec = PathFinder.find_spec(fullname, [str(ROOT)] if path is None else path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


_FINDER = _Finder()


def _add_finder() -> None:
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def theirs(name: str) -> ModuleSpec | None:
    """Find the user's own package or module of one of our names."""
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    for finder in sys.meta_path:
        found = None
        if finder is PathFinder:
            found = PathFinder.find_spec(name, elsewhere)
        elif finder is not _FINDER:
            found = finder.find_spec(name, None)
        if found is not None and _is_users(found):
            return found
    return None


def _is_users(found: ModuleSpec) -> bool:
    """Whether it is a package of neither this copy of ours nor another, nor a folder without Python files."""
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    if any((folder.parent / _MARK).exists() for folder in folders):
        return False
    return found.origin is not None or any(True for folder in folders for _ in folder.glob("*.py"))


def install() -> None:
    """Make `bench`, `models` and `report` ours in this process; ours that are loaded already load again."""
    if _STATE.is_installed:
        return
    for name in [name for name in list(sys.modules) if _is_given(name)]:
        del sys.modules[name]
    sys.modules.update(_STATE.aside)
    _STATE.is_installed, _STATE.given, _STATE.aside = True, set(), {}
    _add_finder()


def give_names() -> list[str]:
    """Leave to the user's code those of our names that it has too, and return them; ours keep finding ours.

    Does nothing in a process without `install`: there Python alone decides.
    """
    if not _STATE.is_installed:
        return []
    with _STATE.lock:
        taken = {name for name in NAMES if name not in _STATE.given and theirs(name) is not None}
        for name in [name for name in list(sys.modules) if name.partition(".")[0] in taken]:
            _STATE.aside[name] = sys.modules.pop(name)
        _STATE.given |= taken
    return sorted(_STATE.given)


def load(module: str) -> Any:
    """Import one of our modules in a process that runs a command of ours."""
    install()
    return importlib.import_module(module)


def run(arguments: Sequence[str]) -> None:
    """Do what `ddp-bench arguments` does, or with `-m` first what one of our modules does, and leave."""
    if arguments[:1] == ["-m"]:
        install()
        sys.argv[1:] = arguments[2:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        load("bench.__main__").start(list(arguments))


def console() -> None:
    """Run the console script `ddp-bench`."""
    os.environ[TYPED_ENV] = "ddp-bench"
    run(sys.argv[1:])


def pytest_configure(config: Any) -> None:
    """Give pytest the fixture, without our packages in the way of those that a user's tests import."""
    with ours():
        plugin = importlib.import_module("bench.pytest_plugin")
    config.pluginmanager.register(plugin, "ddp_bench.fixtures")


def __getattr__(name: str) -> Any:
    """Return `Workload` or `Batch` of our `models`: for a project that has a package `models` itself."""
    if name not in ("Batch", "Workload"):
        raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
    with ours():
        return getattr(importlib.import_module("models.workload"), name)


if __name__ == "__main__":
    if sys.flags.safe_path:
        sys.path.insert(0, str(ROOT))
    # Once more, as a module: its state is that of the process.
    from ddp_bench import run as run_here

    del sys.path[0]  # Python's own choice is the folder of this file, which is none of the user's
    run_here(sys.argv[1:])
