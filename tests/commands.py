"""The suite's commands, run as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--arch", "resnet20", "--batch-size", "8", "--device", "cpu")


def start_run(*arguments: str, stdout: IO[str], stderr: IO[str]) -> subprocess.Popen[str]:
    """`bench.run`, under way."""
    command = [sys.executable, "-m", "bench.run", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr, text=True)


def python(
    *arguments: str, env: dict[str, str] | None = None, timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """This interpreter with `arguments`, finished."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def bench_run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`bench.run`, finished."""
    return python("-m", "bench.run", *arguments, env=env)
