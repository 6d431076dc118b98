"""The first worker of a command within the test's own process: it resolves and plans, and starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ddp_bench.bench.settings import Settings
from ddp_bench.bench.worker import messages as m


class FirstWorker:
    """Stands for the workers of a command until they would be started; then `reached` is called."""

    launched = None

    def __init__(self, reached: Callable[..., NoReturn]) -> None:
        from ddp_bench.bench.worker.rank import Rank  # most tests need no torch

        self._rank = Rank(0, 0)
        self._reached = reached

    def __len__(self) -> int:
        return 1

    def open(self) -> None: ...

    def suit(self, _device_type: str) -> bool:
        return True

    def value(self, _rank: int, command: m.Command, *_: object) -> Any:
        return getattr(self._rank, f"_{command.name}")(command)

    def grow(self, _num_ranks: int) -> None:
        self._reached()


def first_worker(reached: Callable[..., NoReturn]) -> Callable[[Settings], Any]:
    """What to put in the place of `running_workers`."""
    import ddp_bench.bench.worker.rank  # noqa: F401 - its memory is not that of a command

    @contextmanager
    def running(_settings: Settings) -> Iterator[FirstWorker]:
        yield FirstWorker(reached)

    return running
