"""Ends a process when its parent ends, by the kernel, even where that was killed; only on Linux.

As a script it becomes a command that ends so. It then runs without this project's packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Number of Linux's prctl that names the signal for the end of the parent's thread that started a process."""


def end_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Get the signal `by` when the process `parent` ends; end at once if it has."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    number, *command = sys.argv[1:]
    end_with(int(number), by=signal.SIGTERM)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")
