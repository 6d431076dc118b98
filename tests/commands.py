"""The suite's commands, run as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import psutil

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")
SMALL = ("--arch", "resnet20", "--batch-size", "8", "--device", "cpu")


def start_run(*arguments: str, stdout: IO[str], stderr: IO[str]) -> subprocess.Popen[str]:
    """`bench.run`, under way."""
    command = [sys.executable, "-m", "bench.run", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr, text=True)


def finished(
    command: Sequence[str],
    cwd: Path = ROOT,
    env: Mapping[str, str | None] | None = None,
    *,
    timeout_s: float = 280,
) -> subprocess.CompletedProcess[str]:
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


def python(
    *arguments: str, env: Mapping[str, str | None] | None = None, timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """This interpreter with `arguments`, finished."""
    return finished([sys.executable, *arguments], env=env, timeout_s=timeout_s)


def bench_run(
    *arguments: str, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """`bench.run`, finished."""
    return python("-m", "bench.run", *arguments, env=env)


def eventually(holds: Callable[[], T], within_s: float = 60) -> T:
    """What `holds` returns as soon as it is true; a failure of the test if that never comes."""
    until_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until_s, f"not within {within_s:g} s"
        time.sleep(0.02)
    return found


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent to ask how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
