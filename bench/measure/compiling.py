"""What torch.compile did for a case: seconds, graphs and graph breaks, as dynamo itself counts them."""

from __future__ import annotations

import functools
import time
from typing import Any

from ddp_bench.bench.modes import Unsupported
from ddp_bench.bench.results.measured import Compilation

# Importing the compiler takes seconds, which eager cases do without.

NOTHING = (
    "torch.compile made no graph of the model; where it is one of torch's own modules, such as "
    "nn.Sequential, wrap it in a class of yours (torch 2.11 passes over them)"
)


class CompileWatch:
    """Counts from its making to `taken` what this process compiles."""

    def __init__(self) -> None:
        self._before = _counted()

    def taken(self) -> Compilation:
        """What was compiled since. Raises Unsupported where nothing was: the case would be an eager one."""
        since = [now - before for now, before in zip(_counted(), self._before, strict=True)]
        found = Compilation(since[0], *map(int, since[1:]))
        if not found.num_graphs:
            raise Unsupported(NOTHING)
        return found


def _counted() -> tuple[float, int, int, int]:
    """Seconds, graphs, breaks and buckets of this process so far."""
    from torch._dynamo.utils import counters

    return (
        _stopwatch().total_s,
        counters["aot_autograd"]["total"],
        sum(counters["graph_break"].values()),
        counters["inductor"]["ddp_buckets"],
    )


class _Stopwatch:
    """Seconds in dynamo's outermost compilations; `start` and `stop` are its callbacks."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s = 0.0

    def start(self, _: Any) -> None:
        self._began_s = time.perf_counter()

    def stop(self, _: Any) -> None:
        self.total_s += time.perf_counter() - self._began_s


@functools.cache
def _stopwatch() -> _Stopwatch:
    from torch._dynamo.callback import callback_handler

    watch = _Stopwatch()
    callback_handler.register_start_callback(watch.start)
    callback_handler.register_end_callback(watch.stop)
    return watch
