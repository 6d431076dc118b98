"""Data-parallel training in PyTorch, measured: `from ddp_bench import Workload, load_run, compare`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_bench.api import Run, compare, load_run
    from ddp_bench.bench.watch.launch import watch
    from ddp_bench.models.workload import Batch, Workload

__all__ = ["Batch", "Run", "Workload", "compare", "load_run", "watch"]

_MODULES = {
    **dict.fromkeys(("Run", "compare", "load_run"), "ddp_bench.api"),
    **dict.fromkeys(("Batch", "Workload"), "ddp_bench.models.workload"),
    "watch": "ddp_bench.bench.watch.launch",
}


def __getattr__(name: str) -> Any:
    # Every command imports this package first: pandas and torch take seconds, which not all of them need.
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
