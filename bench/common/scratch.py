"""Temporary folders of our processes: marked, locked, and removed with whoever made them.

What a killed command left, the next one removes: only a folder that holds the mark which we wrote into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from .process import hold_signals

PREFIX = ".ddp-bench-"
"""First characters of a scratch folder's name; short, for a Unix socket's path has room for 108 bytes."""

MARK_FILE = ".made-by-ddp-bench"
"""File in every scratch folder that says who made it; a folder without it is somebody else's."""

MAX_MARK_BYTES = 1000

_locks: list[int] = []
"""Descriptors that hold this process's folders locked."""


@contextlib.contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """Make a temporary folder that lasts as long as the context; after a kill, until the next command."""
    remove_abandoned()
    made: tuple[Path, int] | None = None
    try:
        # A signal between its making and the lock would leave it behind.
        with hold_signals():
            made = _make_folder()
            _locks.append(made[1])
        yield made[0]
    finally:
        if made is not None:
            _remove(made[0])
            _locks.remove(made[1])
            os.close(made[1])


def get_locks() -> Sequence[int]:
    """Return what a process that works in these folders inherits: they are in use until it has ended, too."""
    return tuple(_locks)


def remove_abandoned() -> None:
    """Remove this user's marked scratch folders whose process has ended: the kernel released its lock."""
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(folder)


def _make_folder() -> tuple[Path, int]:
    """Make a folder, and return it with a descriptor that holds it locked; the mark comes last.

    A kill before the mark leaves an empty folder, which nobody removes.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    # Where the file system has no locks, nobody can lock the folder, and so nobody removes it.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    who = f"made by process {os.getpid()} on {datetime.now(UTC):%F %T} UTC, removed after its end"
    mark = f"{_make_identity(folder, os.fstat(descriptor))}\n{who}\n"
    (folder / MARK_FILE).write_text(mark, encoding="utf-8", errors="surrogateescape")
    return folder, descriptor


def _make_identity(folder: Path, found: os.stat_result) -> str:
    """Return the mark's first line, which no copy of the folder and no folder of another name has."""
    return f"ddp-bench scratch folder {folder.name} {found.st_dev}:{found.st_ino}"


def _is_marked(folder: Path, descriptor: int) -> bool:
    mark = os.open(MARK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
    with os.fdopen(mark, "rb") as file:
        found = os.fstat(mark)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_nlink != 1:
            return False
        first = file.read(MAX_MARK_BYTES).partition(b"\n")[0]
    return first == os.fsencode(_make_identity(folder, os.fstat(descriptor)))


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder that is marked and not in use. Raises OSError where it cannot be read or locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid() or not _is_marked(folder, descriptor):
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder, the mark last: where a kill interrupts this, the next command finishes it."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MARK_FILE:
            with contextlib.suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
