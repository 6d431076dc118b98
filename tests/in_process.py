"""The first worker of a command within the test's own process: it resolves and plans, and starts nothing."""

from contextlib import contextmanager


class Reached(BaseException):
    """A command accepted its input and would now start processes."""


def reached(*_arguments, **_options):
    raise Reached


class FirstWorker:
    """Stands for the workers of a command until they would be started."""

    launched = None

    def __init__(self):
        from ddp_bench.bench.worker.rank import Rank  # most tests need no torch

        self._rank = Rank(0, 0)

    def __len__(self):
        return 1

    def open(self): ...

    def suit(self, _device_type):
        return True

    def value(self, _rank, command, *_):
        return self._rank.result(command)

    def values(self, commands, *_):
        return {rank: self._rank.result(one) for rank, one in commands.items()}

    def grow(self, _num_ranks):
        reached()

    def end(self): ...


@contextmanager
def first_worker(_settings):
    """What to put in the place of `running_workers`."""
    yield FirstWorker()
