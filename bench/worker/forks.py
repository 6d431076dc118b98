"""Workers as forks of one process that has imported torch: importing it costs seconds of a core.

The conductor starts this file, which imports what it is told to and then answers on a socket, line by line:
it forks a worker, says how one ended, and ends all that are left when the conductor has gone. Where it cannot
fork it leaves, and the conductor starts each worker as a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..parent_death import end_with


def can_fork() -> bool:
    """Whether a fork has all of this process: not other threads, nor what a GPU's driver keeps."""
    threads = list(Path("/proc/self/task").iterdir())
    files = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    return len(threads) == 1 and not any(file.startswith("/dev/nvidia") for file in files)


def serve(conductor: socket.socket, modules: Sequence[str]) -> dict[str, Any] | None:
    """Answer the conductor; in a fork, what it was asked for, and None where there is nothing left to do."""
    try:
        for module in modules:
            importlib.import_module(module)
            if not can_fork():
                return None
    except Exception:  # noqa: BLE001 - whatever it is, a worker that imports by itself says it
        return None
    pids: set[int] = set()
    with conductor.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            if "pid" in request:
                answer: Any = _code(request["pid"], within_s=request["within_s"])
                if answer is not None:
                    pids.discard(request["pid"])
            else:
                server, answer = os.getpid(), os.fork()
                if answer == 0:
                    os.setsid()
                    end_with(server)
                    conductor.close()
                    found: dict[str, Any] = request
                    return found
                pids.add(answer)
            conductor.sendall(json.dumps(answer).encode() + b"\n")
    for pid in pids:
        _code(pid, within_s=0.0)
    return None


def _code(pid: int, *, within_s: float | None) -> int | None:
    """The exit code of a worker, or minus its signal; it is killed after a while, with what it started.

    With None for the while it is left alone, and None returned, while it lives.
    """
    deadline_s = time.monotonic() + (within_s or 0.0)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if within_s is None:
            return None
        if time.monotonic() >= deadline_s:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[1])


def main(arguments: Sequence[str]) -> None:
    """Serve, and in a fork be a worker."""
    descriptor, *modules = arguments
    conductor = socket.socket(fileno=int(descriptor))
    asked = serve(conductor, modules)
    conductor.close()
    if asked is not None:
        os.environ.clear()
        os.environ.update(asked["environment"])
        start = importlib.import_module("ddp_bench.bench.worker.main").start
        start((asked["host"], asked["port"]), asked["token"], forked=True)


if __name__ == "__main__":
    main(sys.argv[1:])
