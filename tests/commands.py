"""The suite's commands, run as a user types them."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--arch", "resnet20", "--batch-size", "8", "--device", "cpu")
TINY = ("--arch", "resnet20", "--batch-size", "2", "--image-size", "16", "--steps", "1", "--device", "cpu")


def finished(command, cwd=ROOT, env=None, *, timeout_s=280):
    """A command that has ended; of this environment with `env`, where None takes a name away."""
    full = {**os.environ, **(env or {})}
    return subprocess.run(
        command,
        cwd=cwd,
        env={name: value for name, value in full.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def python(*arguments, env=None, timeout_s=280):
    """This interpreter with `arguments`, finished."""
    return finished([sys.executable, *arguments], env=env, timeout_s=timeout_s)


def bench_run(*arguments, env=None):
    """`bench.run`, finished."""
    return python("-m", "bench.run", *arguments, env=env)


def eventually(holds, within_s=60):
    """What `holds` returns as soon as it is true; a failure of the test if that never comes."""
    until_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until_s, f"not within {within_s:g} s"
        time.sleep(0.02)
    return found


def find_free_port():
    """Return a TCP port that binds now and that the kernel gives to no other socket by itself.

    A port that it chose (`bind` to 0) may be an outgoing connection's before the ranks listen at it.
    """
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, lowest_given), 100):
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("none of 100 ports binds")


def has_ended(pid):
    """Whether a process is gone, or waits for its parent to ask how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses on which a process and its children accept connections."""
    found: set[tuple[str, int]] = set()
    for one in (process, *process.children(recursive=True)):
        try:
            connections = one.net_connections(kind="inet")
        except psutil.Error:
            continue  # it has just ended
        found |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    return found
