"""One run at a time in a results folder. The kernel holds the lock, so that of a dead run holds nobody up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from bench.errors import UsageError

LOCK = ".lock"


class FolderLock:
    """Held until `release` or the end of the process. Raises UsageError where another process has it."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{folder} cannot be written: {error.strerror}; name another folder") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UsageError(
                f"{folder} is in use by another run ({owner}); wait for its end or name another folder"
            ) from None
        except OSError:
            os.close(descriptor)
            return  # a file system without locks, as some network ones are: go without
        self._descriptor = descriptor
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        # A forked loader process would hold the lock beyond our end.
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Let go of the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
