"""Measures data-parallel training in PyTorch: single device, DataParallel, DistributedDataParallel.

`from bench import load_run, compare` gives runs as frames. Importing `bench` alone imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.api import Run, compare, load_run

__all__ = ["Run", "compare", "load_run"]


def __getattr__(name: str) -> Any:
    # Every command imports this package first: pandas takes a second, which not all of them need.
    if name in __all__:
        return getattr(import_module("bench.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
