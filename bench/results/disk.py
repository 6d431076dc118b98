"""Reads and writes the files of a results folder, which may be anyone's: regular files, never through a link.

Nothing here, or anywhere else in the suite, unpickles what it reads. Every failure to read is a UsageError
that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..common.errors import UsageError
from ..common.scratch import make_scratch_folder

MAX_JSON_BYTES = 8 * 2**20
"""Bytes of a manifest; thousands of ranks take some MiB, parsed 20 times that."""

MAX_TRACE_BYTES = 2 * 2**30
"""Bytes of a trace, not packed; a few steps make some tens of MiB."""

MAX_CSV_BYTES = 2**30
"""Bytes of a table with rows for each rank; 1,000 cases x 30 rounds x 64 ranks of ten steps take 400 MiB in
blocks.csv, 9 cases x 1,024 ranks x 66 buckets 75 MiB in buckets.csv.
"""

MAX_TABLE_BYTES = 64 * 2**20
"""Bytes of a table with a row for each case; 20,000 cases take 30 MiB."""

MAX_LINE = 2**22
"""Characters of a line of a table; one of thousands of steps or parameters takes some 100,000."""

LOCK = ".lock"
"""The file that a run holds locked; its text names the process."""

_UNFINISHED = re.compile(r"\.(.+)-[a-z0-9_]{8}")
"""Name of a file that `replace_file` has begun; the group is what it was to replace."""


def open_regular(path: Path, flags: int, *, follow: bool = False, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor; a link only with `follow`; a new one of `mode`.

    Raises OSError for a link, a pipe or a device, and before writing to a file that has a second name.
    """
    try:
        descriptor = os.open(
            path, flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), mode
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    found = os.fstat(descriptor)
    odd = "" if stat.S_ISREG(found.st_mode) else "it is no regular file"
    if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
        odd = "it has a second name elsewhere (a hard link)"
    if odd:
        os.close(descriptor)
        raise OSError(errno.EINVAL, odd, str(path))
    return descriptor


def open_binary(path: Path, *, most_bytes: int, follow: bool = False) -> BinaryIO:
    """Open a file of at most `most_bytes`; `follow` links of a path that the user named."""
    try:
        descriptor = open_regular(path, os.O_RDONLY, follow=follow)
    except FileNotFoundError:
        raise UsageError(f"{path} is missing; name a folder or file that is whole") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {describe_error(error)}; name a readable file") from None
    size = os.fstat(descriptor).st_size
    if size > most_bytes:
        os.close(descriptor)
        raise UsageError(f"{path} is too large: {size} bytes, at most {most_bytes} are read; is it the one?")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, *, most_bytes: int, follow: bool = False) -> bytes:
    """Read the content of a file that `open_binary` opens."""
    try:
        with open_binary(path, most_bytes=most_bytes, follow=follow) as file:
            return file.read(most_bytes)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {describe_error(error)}; name a readable file") from None


def read_text(path: Path, *, most_bytes: int, follow: bool = False) -> str:
    """Read the text of a file of at most `most_bytes`."""
    try:
        return read_bytes(path, most_bytes=most_bytes, follow=follow).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text ({error.reason}); name another file, or restore it") from None


def read_json(path: Path, *, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read the value in a JSON file."""
    return parse_json(read_bytes(path, most_bytes=most_bytes), path)


def parse_json(content: bytes | str, where: Path | str) -> Any:
    """Parse the value that `content` holds; `where` is named in errors. NaN and infinity are null."""
    try:
        return json.loads(content, parse_constant=lambda _: None)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply to be read; restore the file") from None
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON ({error}): broken off or edited; restore it") from None


def append(descriptor: int, content: bytes) -> None:
    """Append to a file in one piece. Raises OSError where the disk is full."""
    if os.write(descriptor, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def replace_file(target: Path, write: Callable[[Path], object]) -> None:
    """Call `write(path)` on a file beside `target`, then put it in target's place atomically.

    Only a regular file is replaced, whose mode and owner stay. Raises OSError, also where something else is
    at `target`.
    """
    before = _read_status(target)
    part = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    os.close(
        os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666 if before is None else 0o600
        )
    )
    try:
        write(part)
        if before is not None:
            part.chmod(stat.S_IMODE(before.st_mode))
            if before.st_uid != os.geteuid():
                with contextlib.suppress(OSError):
                    os.chown(part, before.st_uid, before.st_gid)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _read_status(path: Path) -> os.stat_result | None:
    """Return the status of what `replace_file` may replace; None where nothing is there. Raises OSError."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link, which is neither replaced nor followed", str(path))
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found


def write_file(target: Path, write: Callable[[Path], object]) -> None:
    """Write what a user named: a file is replaced as a whole, a pipe or a character device written into.

    Raises OSError, also for a link to a file, a block device, or a pipe that nobody reads.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = target.stat().st_mode  # /dev/stdout is a link to a pipe
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            _write_into(target, write)
            return
    replace_file(target, write)


def _write_into(stream: Path, write: Callable[[Path], object]) -> None:
    try:
        descriptor = os.open(stream, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a pipe that nobody reads", str(stream)) from None
        raise
    with os.fdopen(descriptor, "wb") as file, make_scratch_folder() as folder:
        os.set_blocking(descriptor, True)
        write(folder / "content")
        file.write((folder / "content").read_bytes())


def remove_unfinished(folder: Path, targets: frozenset[str]) -> None:
    """Remove what `replace_file` had begun of `targets` in a run's folder when its process was killed."""
    for path in folder.glob(".*"):
        begun = _UNFINISHED.fullmatch(path.name)
        if begun and begun[1] in targets and stat.S_ISREG(path.lstat().st_mode):
            path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder inside a results folder. Raises OSError where something else, or a link, is there."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))


def describe_error(error: Exception) -> str:
    """Return the kernel's, or Python's, message about a file."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextlib.contextmanager
def report_write_errors(what: str, kind: str = "folder") -> Iterator[None]:
    """Within it, an OSError is a UsageError: `what` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} cannot be written: {error.strerror}; name another {kind}") from None


def _has_ended(owner: str) -> bool:
    """Tell whether the process that a lock names was one of this host and is gone."""
    found = re.fullmatch(r"process (\d{1,9}) on (.+)", owner)
    if found is None or found[2] != socket.gethostname():
        return False
    return not Path(f"/proc/{found[1]}").exists()


class FolderLock:
    """One run at a time in a folder: held until `release` or the end of the process.

    The kernel holds the lock, so that of a dead run holds nobody up. Raises UsageError where another process
    has it.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        with report_write_errors(str(folder)):
            # Whoever may open it may lock it.
            descriptor = open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT, mode=0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if _has_ended(owner):
                raise UsageError(
                    f"{folder / LOCK} is locked, though not by the run that wrote into it, which has ended "
                    f"({owner}): end the process that fuser {LOCK} names, or name another folder"
                ) from None
            raise UsageError(
                f"{folder} is in use by another run ({owner or 'another process'}); wait for its end or name "
                "another folder"
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
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
