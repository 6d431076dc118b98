"""Workers as forks of one process that has imported torch: importing it costs seconds of a core.

The conductor starts this file, which imports what it is told to and then answers on a socket, line by line:
it forks a worker, says how one ended, and ends all that are left when the conductor has gone. It waits for
none. Where it cannot fork it leaves, and the conductor starts each worker as a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.process import end_with


def can_fork() -> bool:
    """Tell whether a fork has all of this process: not other threads, nor what a GPU's driver keeps."""
    threads = list(Path("/proc/self/task").iterdir())
    files = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    return len(threads) == 1 and not any(file.startswith("/dev/nvidia") for file in files)


def serve(conductor: socket.socket, modules: Sequence[str]) -> tuple[dict[str, str], int] | None:
    """Answer the conductor; in a fork its environment and connection, and None at the end."""
    try:
        for module in modules:
            importlib.import_module(module)
            if not can_fork():
                return None
    except Exception:  # noqa: BLE001 - whatever it is, a worker that imports by itself says it
        return None
    codes: dict[int, int | None] = {}
    while (asked := _receive_request(conductor)) is not None:
        request, descriptors = asked
        if "pid" in request:
            answer = codes[request["pid"]]
            if answer is None and (found := os.waitpid(request["pid"], os.WNOHANG))[0]:
                answer = codes[found[0]] = os.waitstatus_to_exitcode(found[1])
        else:
            server, answer = os.getpid(), os.fork()
            if answer == 0:
                os.setsid()
                end_with(server)
                return request["environment"], *descriptors
            codes[answer] = None
            os.close(*descriptors)
        with contextlib.suppress(OSError):  # it has gone
            conductor.sendall(json.dumps([request["ask"], answer]).encode() + b"\n")
    for pid in [pid for pid, code in codes.items() if code is None]:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _receive_request(conductor: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive the next request and its descriptor, if any; None where the conductor has gone."""
    line, descriptors = b"", list[int]()
    while not line.endswith(b"\n"):
        content, more, *_ = socket.recv_fds(conductor, 2**16, 1, socket.MSG_CMSG_CLOEXEC)
        if not content:
            return None
        line += content
        descriptors += more
    return json.loads(line), descriptors


def main(arguments: Sequence[str]) -> None:
    """Serve, and in a fork be a worker."""
    parent, descriptor, *modules = arguments
    end_with(int(parent))  # imports take seconds, in which nobody reads the socket
    with socket.socket(fileno=int(descriptor)) as conductor:
        found = serve(conductor, modules)
    if found is not None:
        environment, connection = found
        os.environ.clear()
        os.environ.update(environment)
        start = importlib.import_module("ddp_bench.bench.worker.main").start
        start(connection)


if __name__ == "__main__":
    main(sys.argv[1:])
