"""The first worker of a command within the test's own process: it resolves and plans, and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ddp_bench.bench.settings import Settings
from ddp_bench.bench.worker import messages as m


class Reached(BaseException):
    """A command accepted its input and would now start processes."""


def reached(*_arguments: object, **_options: object) -> NoReturn:
    raise Reached


class FirstWorker:
    """Stands for the workers of a command until they would be started."""

    launched = None

    def __init__(self) -> None:
        from ddp_bench.bench.worker.rank import Rank  # most tests need no torch

        self._rank = Rank(0, 0)

    def __len__(self) -> int:
        return 1

    def open(self) -> None: ...

    def suit(self, _device_type: str) -> bool:
        return True

    def value(self, _rank: int, command: m.Command, *_: object) -> Any:
        return getattr(self._rank, f"_{command.name}")(command)

    def grow(self, _num_ranks: int) -> None:
        reached()


@contextmanager
def first_worker(_settings: Settings) -> Iterator[FirstWorker]:
    """What to put in the place of `running_workers`."""
    yield FirstWorker()
