"""The first worker of a command within the test's own process: it resolves and plans, and starts nothing."""

from contextlib import contextmanager
from types import SimpleNamespace

from stand_ins import Patch

PROFILES = {}
"""Profiles of models by name, pixels and user's function: to count them takes longer than all the rest."""


class Reached(BaseException):
    """A command accepted its input and would now start processes."""


def reached(*_arguments, **_options):
    raise Reached


class FirstWorker:
    """Stands for the workers of a command until they would be started."""

    launched = None
    name, store_port, hosts = "", 0, {0: "here"}

    def __init__(self):
        from ddp_bench.bench.worker.rank import Rank  # most tests need no torch

        self._rank = Rank(0, 0)

    def __len__(self):
        return 1

    def open(self): ...

    def restart_for_device(self, _device_type):
        return True

    def ask_worker(self, _rank, command, *_):
        if type(command).__name__ == "Prepare":  # a dry run's
            return SimpleNamespace(times=SimpleNamespace(steps_ms=(9.0, 5.0, 4.0, 4.0)))
        return self._rank.compute_reply(command)

    def ask_workers(self, commands, *_):
        """Answer all, but begin nothing: this process stays in no group and on all of its cores."""
        asked = {rank: one for rank, one in commands.items() if type(one).__name__ != "Begin"}
        return {rank: self._rank.compute_reply(one) for rank, one in asked.items()}

    def grow(self, _num_ranks):
        reached()

    def end(self): ...


@contextmanager
def first_worker(_settings):
    """What to put in the place of `running_workers`."""
    from ddp_bench.bench.worker import rank
    from ddp_bench.models.registry import list_resnet_layers

    count = rank.profile_workload

    def profile_once(workload):
        ours = workload.layers is list_resnet_layers  # whose functions are made anew each time
        key = workload.name, workload.image_size, None if ours else workload.module
        if key not in PROFILES:
            PROFILES[key] = count(workload)
        return PROFILES[key]

    with Patch.context() as patch:
        patch.setattr(rank, "profile_workload", profile_once)
        yield FirstWorker()
