"""A fixture for your own repository: benchmark your training step under pytest-benchmark.

    def test_my_step(train_step_benchmark):
        train_step_benchmark(my_step, device="cuda")

Then `pytest --benchmark-autosave` once and `pytest --benchmark-compare --benchmark-compare-fail=median:5%`
from then on.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

MOST_SPREAD = 0.05
"""Interquartile range of the rounds, over their median, from which on a warning is given.

Two medians of 20 such rounds differ by 1.5% (standard deviation): a comparison at 5% can still be trusted.
"""

MOST_BUSY = 0.2
"""Share of the cores' time that others may use before the step is timed."""


class NoisyMachineWarning(pytest.PytestWarning):
    """The times of a step may say more about the machine than about the step."""


@pytest.fixture
def train_step_benchmark(benchmark: Any) -> Callable[..., None]:
    """Time a step: `run(step, device="cpu", warmup=5, steps=5, rounds=20, cores=1)`.

    Reported times are of one step, in seconds. A round is a block of `steps` calls of `step`, over `steps`:
    garbage collection is held back, and a CUDA device is waited for at the end of the block only. On the CPU
    the process runs with `cores` threads on as many cores meanwhile. Warns (NoisyMachineWarning) where other
    processes use the cores, or rounds differ much.
    """

    def run(
        step: Callable[[], Any],
        *,
        device: str = "cpu",
        warmup: int = 5,
        steps: int = 5,
        rounds: int = 20,
        cores: int = 1,
    ) -> None:
        # Imported here: a test session that does not use the fixture should not pay for torch.
        import torch

        from .measure.timed import no_gc

        where = torch.device(device)
        num_calls = 0

        def one_step() -> None:
            nonlocal num_calls
            step()
            num_calls += 1
            if where.type == "cuda" and num_calls % steps == 0:
                torch.cuda.synchronize(where)

        with contextlib.nullcontext() if where.type == "cuda" else _pinned(cores) as used:
            for _ in range(warmup):
                step()
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            busy = 0.0 if benchmark.disabled else _busy_share(used or ())
            benchmark.extra_info["steps_per_round"] = steps
            with no_gc():
                benchmark.pedantic(one_step, rounds=rounds, iterations=steps)
        if not benchmark.disabled:
            _warn_of_noise(benchmark.stats.stats, busy)

    return run


@contextlib.contextmanager
def _pinned(num_cores: int) -> Iterator[Sequence[int]]:
    """Run this process with as many threads of torch on the first `num_cores` of its cores, which it gives.

    Where the system cannot pin, as macOS, the number of threads alone is set, and there are no cores to give.
    """
    import torch

    can_pin = hasattr(os, "sched_getaffinity")
    allowed = sorted(os.sched_getaffinity(0)) if can_pin else []
    if not 1 <= num_cores <= (len(allowed) or os.cpu_count() or 1):
        pytest.fail(
            f"cores={num_cores}: this process may use {len(allowed) or os.cpu_count()}", pytrace=False
        )
    before, num_threads = _affinities() if can_pin else {}, torch.get_num_threads()
    torch.set_num_threads(num_cores)
    try:
        for thread in before:
            _set_affinity(thread, allowed[:num_cores])
        yield allowed[:num_cores]
    finally:
        torch.set_num_threads(num_threads)
        for thread in _affinities() if can_pin else ():
            # Threads that were started meanwhile have the cores of the one that started them.
            _set_affinity(thread, before.get(thread, allowed))


def _affinities() -> dict[int, Sequence[int]]:
    """Return the cores of every thread of this process: those of torch's pool have their own."""
    found: dict[int, Sequence[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found[int(task.name)] = sorted(os.sched_getaffinity(int(task.name)))
    return found


def _set_affinity(thread: int, cores: Sequence[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, cores)


def _busy_share(used: Sequence[int]) -> float:
    """Return the share of time for which others use the cores `used`, or all, whichever is more."""
    import psutil  # sessions without the fixture do without

    loads = psutil.cpu_percent(interval=0.2, percpu=True)
    chosen = [loads[core] for core in used if core < len(loads)]
    return float(max(sum(some) / len(some) for some in (loads, chosen) if some)) / 100


def _warn_of_noise(stats: Any, busy: float) -> None:
    spread = stats.iqr / stats.median
    reasons = [f"the middle half of the rounds spreads over {spread:.0%} of their median"] * (
        spread > MOST_SPREAD
    )
    reasons += [f"other processes used {busy:.0%} of the cores before the start"] * (busy > MOST_BUSY)
    if not reasons:
        return
    warning = NoisyMachineWarning(
        f"ddp-bench: noisy machine: {' and '.join(reasons)}; end what else runs, take more rounds, and "
        "compare only with times of a quiet machine"
    )
    try:
        warnings.warn(warning, stacklevel=3)
    except NoisyMachineWarning:
        # Under -W error: noise is no mistake of the test.
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(warning, stacklevel=3)
