"""The processes of the workers on this machine: forks of one that has imported torch, or each by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cluster.process import rank_variables
from ..gpus import gpus
from ..package import own_command
from ..settings import Settings

END_S = 30.0
"""So long may killed workers take to go: one that the kernel holds back is left to it."""

INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

OTHER_GPUS = ("kfd", "nvhost-gpu", "nvidiactl")
"""What /dev holds where there is a GPU that NVML does not know of."""


class Processes:
    """Starts workers with `variables` beside this process's environment, and tells how they ended."""

    def __init__(self, variables: Mapping[str, str], modules: Sequence[str]) -> None:
        """Begin to import `modules` for them; takes no time of this process."""
        self.variables = dict(variables)
        self._pids: dict[int, int] = {}
        self._alone: dict[int, subprocess.Popen[bytes]] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._requests, theirs = socket.socketpair()
        with theirs:
            if sys.platform == "linux":
                self._server = subprocess.Popen(
                    own_command("-m", "ddp_bench.bench.worker.forks", str(theirs.fileno()), *modules),
                    env=os.environ | self.variables,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for this process
                )
        self._answers = self._requests.makefile("rb")

    def start(self, rank: int, address: tuple[str, int], token: str, environment: Mapping[str, str]) -> None:
        """Start a worker that connects to `address`."""
        whole = {**os.environ, **self.variables, **environment}
        host, port = address
        pid = self._asked({"host": host, "port": port, "token": token, "environment": whole})
        if pid is not None:
            self._pids[rank] = pid
            return
        command = own_command("-m", "ddp_bench.bench.worker.main", host, str(port), token)
        self._alone[rank] = subprocess.Popen(command, env=whole, start_new_session=True)

    def code(self, rank: int, *, within_s: float = 2.0) -> int | None:
        """The exit code of a worker, or minus its signal; it is killed if it lives on.

        None for one that this process has not started.
        """
        if rank in self._pids:
            code = self._asked({"pid": self._pids.pop(rank), "within_s": within_s})
            return -signal.SIGKILL if code is None else code
        if rank not in self._alone:
            return None
        process = self._alone.pop(rank)
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def ended(self, rank: int) -> int | None:
        """The exit code of a worker that has ended; None while it lives."""
        if rank in self._pids:
            found = self._asked({"pid": self._pids[rank], "within_s": None})
            if found is not None or self._server is None:
                del self._pids[rank]
            return -signal.SIGKILL if self._server is None else found
        return self._alone[rank].poll() if rank in self._alone else None

    def restart(self, variables: Mapping[str, str]) -> None:
        """Start those that follow, each by itself, with other variables."""
        self.close()
        self.variables = dict(variables)

    def end_all(self) -> None:
        """End those that are left, whatever they do."""
        for rank in [*self._pids, *self._alone]:
            self.code(rank, within_s=0.0)

    def close(self) -> None:
        """End all, and what they are forks of."""
        self.end_all()
        self._answers.close()
        self._requests.close()
        if self._server is not None:
            try:
                self._server.wait(END_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None

    def _asked(self, request: Mapping[str, Any]) -> int | None:
        """What the process with torch answers; None where it has gone."""
        if self._server is None:
            return None
        with contextlib.suppress(OSError):
            self._requests.sendall(json.dumps(request).encode() + b"\n")
            if line := self._answers.readline():
                found: int | None = json.loads(line)
                return found
        self._server.wait()
        self._server = None
        return None


def worker_variables(device_type: str) -> dict[str, str]:
    """What the environment of a worker on this machine needs beside this process's."""
    # What the environment says of interfaces is for ranks on several machines: it would open ports to these.
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)
    return rank_variables(os.environ, device_type) | loopback


def expected_device(settings: Settings) -> str:
    """The kind of device that torch will find, as far as can be told without it."""
    seen = bool(gpus()) or any((Path("/dev") / name).exists() for name in OTHER_GPUS)
    return "cuda" if settings.device != "cpu" and seen else "cpu"


def modules_for(settings: Settings) -> list[str]:
    """What workers are to have imported before they are forked.

    The first one starts threads where OMP_NUM_THREADS asks for some: then there is nothing to fork. DDP and
    the count of FLOPs import torch's compiler, which takes more than a second in each worker.
    """
    more = ["torchvision.models"] if settings.workload is None and settings.arch != "resnet20" else []
    return ["numpy", "ddp_bench.bench.worker.main", "torch._dynamo", *more]
