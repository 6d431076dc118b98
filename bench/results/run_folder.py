"""A run's folder: claimed once, synced as results are known."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ..common.errors import UsageError
from ..machine.manifest import MANIFEST, Manifest
from .blocks import Block
from .case_columns import FILES
from .disk import LOCK, append, make_folder, open_regular, replace_file, report_write_errors, write_file
from .journal import JOURNAL
from .tables import encode_table, write_block_table

CALIBRATION = "calibration.json"
FAILURES = "failures"
"""Folder of what is kept of failed cases."""

MAX_FAILURE_BYTES = 4 * 2**20
"""Limit of one case's file: hundreds of failures of a few ranks, or one of a hundred ranks."""

_MAX_NAME = 150
"""Characters of a file's name before its ending; file systems take 255 bytes."""

RUN_FILES = frozenset({*FILES, MANIFEST, JOURNAL, CALIBRATION, LOCK})
"""Files of a results folder that cannot be made again, by name: no command writes its output over one."""


def name_failure_file(case_id: str) -> str:
    """Name, within a run's folder, of the file that keeps the failures of a case."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in case_id).lstrip(".")
    if safe != case_id or not 0 < len(safe) <= _MAX_NAME:
        safe = f"{safe[:_MAX_NAME]}-{hashlib.sha256(case_id.encode(errors='replace')).hexdigest()[:8]}"
    return f"{FAILURES}/{safe}.txt"


def format_path(path: Path) -> str:
    """Format a path for the terminal: relative to the current folder where it lies below it."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)


def name_default_folder(*, host: str, name: str) -> Path:
    """`results/<UTC time>-<host>-<name>`."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    safe_host = "".join(c if c.isalnum() or c in "-_" else "-" for c in host) or "host"
    return Path("results") / f"{stamp}-{safe_host}-{name}"


def check_claimable(folder: Path) -> None:
    """Raise UsageError if `folder`, of `--out`, holds anything or cannot be written; leaves no trace."""
    for parent in folder.absolute().parents:
        is_run = any((parent / name).is_file() for name in (JOURNAL, "cases.csv"))
        if is_run and (parent / MANIFEST).is_file():
            raise UsageError(f"--out {folder} is inside the results of {parent}; name a folder elsewhere")
    with report_write_errors(f"--out {folder}"):
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"--out {folder} already holds a run or other files; name a new folder")
        place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=place):
            pass


@contextlib.contextmanager
def claim_folder(folder: Path) -> Iterator[Path]:
    """Make `folder` this run's own; undone where the run cannot be begun within.

    Raises UsageError, with the reason, if it holds anything or cannot be written.
    """
    check_claimable(folder)
    is_new = not folder.exists()
    with report_write_errors(f"--out {folder}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MANIFEST).touch(exist_ok=False)
        except FileExistsError:
            raise UsageError(f"--out {folder} is a file or another run's folder; name a new folder") from None
    try:
        with report_write_errors(f"--out {folder}"):
            yield folder
    except UsageError:
        for name in RUN_FILES:
            (folder / name).unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a run. Raises OSError as all that follow: without room, or a folder."""
    replace_file(folder / MANIFEST, lambda path: path.write_bytes(manifest.to_json()))


def write_table(folder: Path, name: str, rows: pd.DataFrame) -> None:
    """Replace a table of a run as a whole, so that a reader never sees half of it."""
    replace_file(folder / name, lambda path: path.write_bytes(encode_table(rows)))


def write_blocks(folder: Path, blocks: Iterable[Block]) -> None:
    """Replace blocks.csv by one of these, in their order; it may be larger than memory."""
    replace_file(folder / "blocks.csv", lambda path: write_block_table(path, blocks))


def write_trace(folder: Path, name: str, content: bytes) -> None:
    """Write a trace into its folder within that of a run."""
    make_folder(folder / "traces")
    replace_file(folder / "traces" / name, lambda path: path.write_bytes(content))


def append_failure(folder: Path, case_id: str, text: str) -> Path:
    """Append to the file of a case in `failures/`, which begins anew where it has become too long."""
    path = folder / name_failure_file(case_id)
    make_folder(path.parent)
    content = text.encode("utf-8", errors="backslashreplace")
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        if os.fstat(descriptor).st_size + len(content) > MAX_FAILURE_BYTES:
            os.ftruncate(descriptor, 0)
        append(descriptor, content[:MAX_FAILURE_BYTES])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def write_output(target: Path, write: Callable[[Path], object], *, option: str) -> None:
    """Write a file that the user named with `option`, whole or not at all, or into a pipe or a device.

    Raises UsageError where it cannot be written, is a link to a file, or is what a run has measured or would
    be taken for.
    """
    if target.name in RUN_FILES and (target.exists() or (target.parent / MANIFEST).exists()):
        raise UsageError(f"{option} {target} is a file of a run's results; name another file")
    with report_write_errors(f"{option} {target}", "file"):
        write_file(target, write)
