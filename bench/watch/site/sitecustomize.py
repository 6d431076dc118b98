"""Load the watch into a Python process as soon as it has imported torch, and hide no other sitecustomize.

It stands alone in a folder on PYTHONPATH: nothing else of ours can be imported from there.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

SITE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would delay every start
RANKS = os.path.join(os.path.dirname(SITE), "ranks")  # noqa: PTH118, PTH120
CONFIG_ENV = "_DDP_BENCH_WATCH"
"""Environment variable with the configuration as JSON, made by `make_config`."""

PACKAGE = "_ddp_bench_watch"
"""Private name of the package that is loaded from its file: `bench`, `report` and `models` are the user's."""

AWAITED = ("torch", "torch._dynamo")
"""Modules that the package acts upon, as soon as they are imported."""


def call_package() -> None:
    """Have the package act, loading it at first. Training goes on whatever is raised."""
    with contextlib.suppress(Exception):
        if PACKAGE not in sys.modules:
            file = os.path.join(RANKS, "__init__.py")  # noqa: PTH118
            spec = importlib.util.spec_from_file_location(PACKAGE, file, submodule_search_locations=[RANKS])
            load(PACKAGE, spec)
        sys.modules[PACKAGE].install(os.environ[CONFIG_ENV])


def load(name: str, spec: Any) -> None:
    """Run a module as the one of this name."""
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


class Finder(importlib.abc.MetaPathFinder):
    """Finder that lets the other finders find a module, and acts when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module of torch that the watch waits for."""
        if name not in AWAITED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec: Any = next(filter(None, (one.find_spec(name, path, target) for one in others)), None)
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if execute is not None:

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if name == "torch" or PACKAGE in sys.modules:  # torch may import the other one on its way
                    call_package()

            with contextlib.suppress(Exception):
                spec.loader.exec_module = exec_module
        return spec


def run_hidden() -> None:
    """Run the sitecustomize that this one hides, as Python would have without us."""
    sys.path[:] = others = [path for path in sys.path if os.path.abspath(path) != SITE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        load("sitecustomize", spec)


def begin() -> None:
    """Watch this process as soon as it has torch."""
    if "torch" in sys.modules:
        call_package()
    sys.meta_path.insert(0, Finder())


if __name__ == "sitecustomize":
    if os.environ.get(CONFIG_ENV):
        begin()
    run_hidden()
