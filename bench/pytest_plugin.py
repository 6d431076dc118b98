"""A fixture for your own repository: benchmark your training step under pytest-benchmark.

    def test_my_step(train_step_benchmark):
        train_step_benchmark(my_step, device="cuda")

Then `pytest --benchmark-autosave` once and `pytest --benchmark-compare --benchmark-compare-fail=median:5%`
from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def train_step_benchmark(benchmark: Any) -> Callable[..., None]:
    """Time a step in blocks: `run(step, device="cpu", warmup=5, steps=5, rounds=20)`.

    A round of pytest-benchmark is one block of `steps` calls of `step`, garbage collection held back, the
    device waited for at the end of the block only. Reported times are of whole blocks, in seconds.
    """

    def run(
        step: Callable[[], Any], *, device: str = "cpu", warmup: int = 5, steps: int = 5, rounds: int = 20
    ) -> None:
        # Imported here: a test session that does not use the fixture should not pay for torch.
        import torch  # noqa: PLC0415

        from bench.measure.clock import make_clock  # noqa: PLC0415
        from bench.measure.timed import run_block  # noqa: PLC0415

        clock = make_clock(torch.device(device))
        run_block(step, warmup, clock)  # which also waits for the device
        benchmark.extra_info["steps_per_block"] = steps
        benchmark.pedantic(lambda: run_block(step, steps, clock), rounds=rounds)

    return run
