"""torch.compile, by case: its compiler, its own way of optimising DDP, and what dynamo counts of it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import torch
from torch.utils._triton import has_triton

from ..plan.case import Case
from ..results.block_times import Compilation
from .base import Unsupported

# Importing the compiler takes seconds, which eager cases do without.


def require_compiler(case: Case, device: torch.device) -> None:
    """Raise Unsupported where a compiled case has no compiler for its kernels."""
    if case.compile == "off":
        return
    if missing := _find_missing(device):
        raise Unsupported(f"torch.compile {missing}, or leave --compile off")


def _find_missing(device: torch.device) -> str:
    if device.type == "cuda":
        if not has_triton():
            return "needs Triton, which is not installed or does not know this GPU; pip install triton"
        if not any((os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))):
            return "needs a C compiler to start Triton's kernels; install gcc, set CC"
        return ""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        wanted = os.environ.get("CXX", "g++")
        return f"needs a C++ compiler, and {wanted} does not run; install g++, set CXX to one that runs"
    return ""


@contextlib.contextmanager
def set_optimize_ddp(case: Case) -> Iterator[None]:
    """Within it, DDP is made, and what a step compiles is compiled, as the case's `optimize_ddp` says."""
    if case.compile == "off":
        yield
        return
    from torch import _dynamo

    with _dynamo.config.patch(optimize_ddp=case.optimize_ddp):
        yield


def draw_as_eager() -> contextlib.AbstractContextManager[None]:
    """Within it, what is compiled draws the random numbers that an eager module would."""
    from torch import _inductor

    patched: contextlib.AbstractContextManager[None] = _inductor.config.patch(fallback_random=True)
    return patched


class CompileWatch:
    """Counts from its making to `taken` what this process compiles."""

    def __init__(self) -> None:
        self._before = _read_counters()

    def count_compiled(self) -> Compilation:
        """Count what was compiled since. Raises Unsupported without any: the case would be an eager one."""
        since = [now - before for now, before in zip(_read_counters(), self._before, strict=True)]
        found = Compilation(since[0], *map(int, since[1:]))
        if not found.num_graphs:
            raise Unsupported(
                "torch.compile made no graph of the model; where it is one of torch's own modules, such as "
                "nn.Sequential, wrap it in a class of yours (torch 2.11 passes over them)"
            )
        return found


def _read_counters() -> tuple[float, int, int]:
    from torch._dynamo.utils import calculate_time_spent, counters

    return (
        calculate_time_spent()["total_wall_time"],
        counters["aot_autograd"]["total"],
        sum(counters["graph_break"].values()),
    )
