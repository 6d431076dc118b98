"""The suite's commands, run as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
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
