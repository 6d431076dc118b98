"""Workers' processes: forks of one that has imported torch, or started each by itself."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.process import Child, make_package_command, make_rank_variables, wait_or_kill
from ..machine.gpus import describe_gpus
from ..plan.settings import Settings

ANSWER_TIMEOUT_S = 10.0
"""The process with torch only forks and looks: it answers sooner, or it is stopped or stuck."""

IMPORT_TIMEOUT_S = 600.0
"""Seconds that it may import torch before that: slow file systems take minutes."""

INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

OTHER_GPUS = ("kfd", "nvhost-gpu", "nvidiactl")
"""Entries of /dev where there is a GPU that NVML does not know of."""


class Processes:
    """Starts workers with `variables` beside this process's environment, and tells how they ended."""

    def __init__(self, variables: Mapping[str, str], modules: Sequence[str]) -> None:
        """Begin to import `modules` for them; takes no time of this process."""
        self.variables = dict(variables)
        self.stuck: list[int] = []
        """Processes that have been killed and do not end: the kernel holds them."""
        self._children: dict[int, Child] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self._requests, theirs = socket.socketpair()
        with theirs:
            if sys.platform == "linux":
                whose = map(str, (theirs.fileno(), os.getpid()))
                self.server = subprocess.Popen(
                    make_package_command("-m", "ddp_bench.bench.worker.main", *whose, *modules),
                    env=os.environ | self.variables,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for this process
                )
        self._answers = self._requests.makefile("rb")
        self._asks = itertools.count()

    def start(self, rank: int, connection: socket.socket, environment: Mapping[str, str]) -> None:
        """Start a worker that has the other end of a connection: nobody else can connect in its place."""
        whole = {**os.environ, **self.variables, **environment}
        pid = self.ask_server({"environment": whole}, [connection.fileno()], within_s=IMPORT_TIMEOUT_S)
        if pid is not None:
            self._children[rank] = _Forked(self, pid)
            return
        self._children[rank] = subprocess.Popen(
            make_package_command("-m", "ddp_bench.bench.worker.main", str(connection.fileno())),
            env=whole,
            pass_fds=[connection.fileno()],
            start_new_session=True,
        )

    def collect_exit_codes(self, ranks: Iterable[int], *, within_s: float = 2.0) -> dict[int, int]:
        """Collect the exit codes of workers started here, or minus their signals; kill those that live on."""
        found = {rank: self._children.pop(rank) for rank in [*ranks] if rank in self._children}
        codes = wait_or_kill([*found.values()], within_s=within_s)
        self.stuck += [one.pid for one, code in zip(found.values(), codes, strict=True) if code is None]
        return {rank: code for rank, code in zip(found, codes, strict=True) if code is not None}

    def end_all(self) -> None:
        """End those that are left, whatever they do."""
        self.collect_exit_codes([*self._children], within_s=0.0)

    def close(self) -> None:
        """End all, and what they are forks of; those that are started later start each by itself."""
        self.end_all()
        self._answers.close()
        self._requests.close()
        self._end_server()

    def _end_server(self) -> None:
        if self.server is not None and wait_or_kill([self.server], within_s=0.0) == [None]:
            self.stuck.append(self.server.pid)
        self.server = None

    def ask_server(
        self,
        request: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        *,
        within_s: float = ANSWER_TIMEOUT_S,
    ) -> int | None:
        """Ask the process with torch for its answer; None where it has gone, or is ended for giving none."""
        if self.server is None:
            return None
        number = next(self._asks)
        line = json.dumps({"ask": number, **request}).encode() + b"\n"
        self._requests.settimeout(within_s)
        with contextlib.suppress(OSError):
            sent = socket.send_fds(self._requests, [line], descriptors)
            self._requests.sendall(line[sent:])
            while answer := self._answers.readline():
                asked, value = json.loads(answer)
                if asked == number:  # an answer before it was not waited for: Ctrl-C came
                    return None if value is None else int(value)
        self._end_server()
        return None


class _Forked:
    """A worker that the process with torch has forked, which alone can ask how it ended."""

    def __init__(self, processes: Processes, pid: int) -> None:
        self._processes, self.pid = processes, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; SIGKILL, with which the kernel ends it, where its parent has gone."""
        if self._code is None:
            self._code = self._processes.ask_server({"pid": self.pid})
        if self._code is None and self._processes.server is None:
            self._code = -signal.SIGKILL
        return self._code


def make_worker_variables(device_type: str) -> dict[str, str]:
    """Return the variables that a worker on this machine needs beside this process's."""
    # What the environment says of interfaces is for ranks on several machines: it would open ports to these.
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)
    return make_rank_variables(os.environ, device_type) | loopback


def guess_device(settings: Settings) -> str:
    """Guess the kind of device that torch will find, as far as can be told without it."""
    seen = bool(describe_gpus()) or any((Path("/dev") / name).exists() for name in OTHER_GPUS)
    return "cuda" if settings.device != "cpu" and seen else "cpu"


def list_modules(settings: Settings) -> list[str]:
    """List the modules that workers are to have imported before they are forked.

    The first one starts threads where OMP_NUM_THREADS asks for some: then there is nothing to fork. DDP and
    the count of FLOPs import torch's compiler, which takes more than a second in each worker.
    """
    more = ["torchvision.models"] if settings.workload is None and settings.arch != "resnet20" else []
    return ["numpy", "ddp_bench.bench.worker.rank", "torch._dynamo", *more]
