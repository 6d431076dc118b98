"""The fixture for users' own steps, with a device and a benchmark that write down what they are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import pytest_plugin


class Benchmark:
    """Calls the block once for each round, as pytest-benchmark does."""

    def __init__(self, done: list[str]) -> None:
        self.extra_info: dict[str, Any] = {}
        self._done = done

    def pedantic(self, block: Callable[[], object], *, rounds: int) -> None:
        for _ in range(rounds):
            self._done.append("round")
            block()


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, _stream: object) -> None:
        """Nothing to record."""

    def elapsed_time(self, _other: Event) -> float:
        return 1.0


def test_the_first_round_begins_with_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"wait for {device}"))
    fixture: Any = pytest_plugin.train_step_benchmark
    run = fixture.__wrapped__(Benchmark(done))
    run(lambda: done.append("step"), device="cuda:1", warmup=2, steps=3, rounds=2)
    waited = "wait for cuda:1"
    warm_up, block = ["step"] * 2 + [waited], ["round"] + ["step"] * 3 + [waited]
    assert done == warm_up + block + block
