"""Temporary folders that go even after a kill: what a killed command left, the next one removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .process import uninterrupted

PREFIX = "ddp-bench-"
"""What the names of these folders begin with; short, for a Unix socket's path has room for 108 bytes only."""

_locks: list[int] = []
"""Descriptors that hold this process's folders locked."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder while the context lasts; after a kill, until the next command makes one."""
    remove_abandoned()
    made: tuple[Path, int] | None = None
    try:
        # Between its making and the lock a signal would leave it behind.
        with uninterrupted():
            made = _make()
            _locks.append(made[1])
        yield made[0]
    finally:
        if made is not None:
            shutil.rmtree(made[0], ignore_errors=True)
            _locks.remove(made[1])
            os.close(made[1])


def locks() -> Sequence[int]:
    """What a process that works in these folders inherits: they are in use until it has ended, too."""
    return tuple(_locks)


def remove_abandoned() -> None:
    """Remove this user's scratch folders whose process has ended: the kernel has let go of its lock."""
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(folder)


def _make() -> tuple[Path, int]:
    """A new folder, and a descriptor that holds it locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another command has taken it for abandoned: it was not locked yet
        # Where the file system has no locks, nobody can lock the folder, and so nobody removes it.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _remove_if_abandoned(folder: Path) -> None:
    """Raises OSError where it is in use, or another user's."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
