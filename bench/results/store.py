"""A run's folder: claimed once, synced as results are known, loaded with types."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.errors import UsageError
from ..machine.conditions import machine_kind
from ..machine.manifest import MANIFEST, Manifest, manifest_of
from ..plan.case import STAND_IN
from ..plan.modes import RANK_PER_DEVICE
from ..stats.fit import Typical
from .archive import opened
from .case_columns import FILES
from .case_result import CaseResult, case_results
from .columns import BLOCKS, records, typed_frame
from .comparisons import Comparison, of_table
from .disk import LOCK, append, make_folder, open_regular, read_json, replace_file, writable, write_file
from .journal import JOURNAL, read
from .published import Scaling, published_scalings
from .round_times import RoundTimes
from .tables import csv_bytes, csv_value, load_blocks, read_table, table_bytes

CALIBRATION = "calibration.json"
FAILURES = "failures"
"""Folder of what is kept of failed cases."""

MOST_FAILURE_BYTES = 4 * 2**20
"""Of one case's file: hundreds of failures of a few ranks, or one of a hundred ranks."""

_MOST_NAME = 150
"""Characters of a file's name before its ending; file systems take 255 bytes."""

RUN_FILES = frozenset({*FILES, MANIFEST, JOURNAL, CALIBRATION, LOCK})
"""Files of a results folder that cannot be made again, by name: no command writes its output over one."""


@dataclass(frozen=True)
class RunData:
    """A loaded run; frames hold exactly the columns of `case_columns.py`, missing values as NA."""

    path: Path
    manifest: Manifest
    cases: pd.DataFrame
    blocks: pd.DataFrame
    buckets: pd.DataFrame
    allreduce: pd.DataFrame
    comparisons: pd.DataFrame = field(default_factory=lambda: typed_frame([], FILES["comparisons.csv"]))
    resumable: bool = True
    """Whether its journal is there; baselines and archives have none."""
    published: tuple[Scaling, ...] = field(default_factory=published_scalings, repr=False)
    """Efficiencies of others, to hold those of this run against."""

    @cached_property
    def times(self) -> RoundTimes:
        """Its blocks as numbers, without the single steps and what else they tell in detail."""
        return RoundTimes.of(self.blocks.assign(steps_ms=None, detail=None))

    @cached_property
    def typical(self) -> Typical:
        """The fit of its blocks."""
        return self.times.fitted()

    @cached_property
    def results(self) -> list[CaseResult]:
        """Its cases, as typed records."""
        return case_results(self.cases)

    @cached_property
    def compared(self) -> list[Comparison]:
        """What `comparisons` holds, but for those that earlier versions made with DP's stand-in."""
        stand_ins = {case.case_id for case in self.results if case.impl == STAND_IN}
        return [one for one in of_table(records(self.comparisons)) if one.reference_id not in stand_ins]

    @cached_property
    def earlier(self) -> list[tuple[list[CaseResult], list[Comparison]]]:
        """Cases and comparisons of earlier runs that lie beside it: see `earlier_runs`."""
        return earlier_runs(self.path, self.manifest)


MOST_EARLIER = 20
"""Runs of the same plan that are looked at, the latest ones."""


def earlier_runs(path: Path, manifest: Manifest) -> list[tuple[list[CaseResult], list[Comparison]]]:
    """Cases and comparisons of what the same kind of machine measured of the same plan, in folders beside it.

    Those of the same owner that ended before this run began, oldest first; what cannot be read is passed
    over. Runs in turns and archives have none.
    """
    if manifest.interleaved_id or manifest.plan_hash is None or not path.is_dir():
        return []
    found = []
    for folder in neighbours(path):
        with passed_over():
            other = read_manifest(folder)
            alike = other.plan_hash == manifest.plan_hash and machine_kind(other) == machine_kind(manifest)
            if alike and (other.created_utc or "") < (manifest.created_utc or ""):
                cases, compared = (read_table(folder / n, FILES[n]) for n in ("cases.csv", "comparisons.csv"))
                found.append((other.created_utc or "", case_results(cases), of_table(records(compared))))
    latest = sorted(found, key=lambda one: one[0])[-MOST_EARLIER:]
    return [(cases, compared) for _, cases, compared in latest]


def neighbours(path: Path) -> list[Path]:
    """List the folders beside a run's that have the same owner; none where that cannot be told."""
    with passed_over():
        owner = path.stat().st_uid
        beside = sorted(path.absolute().parent.iterdir())
        return [one for one in beside if is_folder_of(one, owner) and not one.samefile(path)]
    return []


def is_folder_of(path: Path, owner: int) -> bool:
    """Tell whether `path` is a folder, not a link to one, of the user with the number `owner`."""
    with passed_over():
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == owner
    return False


def passed_over() -> contextlib.AbstractContextManager[None]:
    """Suppress whatever a folder raises that this run only looks at: it may hold anything, of anyone."""
    return contextlib.suppress(Exception)


def failure_file(case_id: str) -> str:
    """Name, within a run's folder, of the file that keeps the failures of a case."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in case_id).lstrip(".")
    if safe != case_id or not 0 < len(safe) <= _MOST_NAME:
        safe = f"{safe[:_MOST_NAME]}-{hashlib.sha256(case_id.encode(errors='replace')).hexdigest()[:8]}"
    return f"{FAILURES}/{safe}.txt"


def shown(path: Path) -> str:
    """A path for the terminal: relative to the current folder where it lies below it."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)


def default_folder(*, host: str, name: str) -> Path:
    """`results/<UTC time>-<host>-<name>`."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    safe_host = "".join(c if c.isalnum() or c in "-_" else "-" for c in host) or "host"
    return Path("results") / f"{stamp}-{safe_host}-{name}"


def check_claimable(folder: Path, *, option: str = "--out") -> None:
    """Raise UsageError if `folder`, of `option`, holds anything or cannot be written; leaves no trace."""
    for parent in folder.absolute().parents:
        if (parent / MANIFEST).is_file() and (parent / "cases.csv").is_file():
            raise UsageError(f"{option} {folder} is inside the results of {parent}; name a folder elsewhere")
    with writable(f"{option} {folder}"):
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{option} {folder} already holds a run or other files; name a new folder")
        place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=place):
            pass


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Make `folder` this run's own; undone where the run cannot be begun within.

    Raises UsageError, with the reason, if it holds anything or cannot be written.
    """
    check_claimable(folder)
    is_new = not folder.exists()
    with writable(f"--out {folder}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MANIFEST).touch(exist_ok=False)
        except FileExistsError:
            raise UsageError(f"--out {folder} is a file or another run's folder; name a new folder") from None
    try:
        with writable(f"--out {folder}"):
            yield folder
    except UsageError:
        for name in RUN_FILES:
            (folder / name).unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


class RunWriter:
    """Writes one run's files; only the conductor has one.

    Every method raises OSError where the disk is full or the folder has gone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blocks = open_regular(folder / "blocks.csv", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if os.fstat(self._blocks).st_size == 0:
            self._append([[column.name for column in BLOCKS]])

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to blocks.csv, all or none, and sync them before returning."""
        self._append([[csv_value(row.get(column.name)) for column in BLOCKS] for row in rows])

    def _append(self, lines: list[list[str]]) -> None:
        before = os.fstat(self._blocks)
        try:
            append(self._blocks, csv_bytes(lines))
            os.fsync(self._blocks)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._blocks, before.st_size)
            raise

    def is_in_place(self) -> bool:
        """Whether the folder has not been removed, and no other is at its place by now."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.lstat(self.folder / "blocks.csv"), os.fstat(self._blocks))
        return False

    def close(self) -> None:
        os.close(self._blocks)

    def write_trace(self, name: str, content: bytes) -> None:
        folder = self.folder / "traces"
        make_folder(folder)
        replace_file(folder / name, lambda path: path.write_bytes(content))

    def append_failure(self, case_id: str, text: str) -> Path:
        """Append to the file of a case in `failures/`, which begins anew where it has become too long."""
        path = self.folder / failure_file(case_id)
        make_folder(path.parent)
        content = text.encode("utf-8", errors="backslashreplace")
        descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size + len(content) > MOST_FAILURE_BYTES:
                os.ftruncate(descriptor, 0)
            append(descriptor, content[:MOST_FAILURE_BYTES])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return path

    def replace(self, name: str, rows: pd.DataFrame) -> None:
        """Replace a table as a whole, so that a reader never sees half of it."""
        replace_file(self.folder / name, lambda path: path.write_bytes(table_bytes(rows)))

    def write_manifest(self, manifest: Manifest) -> None:
        replace_file(self.folder / MANIFEST, lambda path: path.write_bytes(manifest.as_json()))


def write_output(target: Path, write: Callable[[Path], object], *, option: str) -> None:
    """Write a file that the user named with `option`, whole or not at all, or into a pipe or a device.

    Raises UsageError where it cannot be written, is a link to a file, or is what a run has measured or would
    be taken for.
    """
    if target.name in RUN_FILES and (target.exists() or (target.parent / MANIFEST).exists()):
        raise UsageError(f"{option} {target} is a file of a run's results; name another file")
    with writable(f"{option} {target}", "file"):
        write_file(target, write)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run's folder. Raises UsageError where it is missing, damaged or of another schema."""
    path = folder / MANIFEST
    if not os.path.isfile(path):  # noqa: PTH113 - Path's raises where a name is too long
        raise UsageError(f"{folder} is not a results folder: it has no {MANIFEST}; name a run's folder")
    return manifest_of(read_json(path), path)


def load_run(path: Path) -> RunData:
    """Read a results folder or an archive. Raises UsageError where it is neither, or of another schema."""
    with opened(path) as folder:
        return replace(_load(folder), path=path)


def _load(path: Path) -> RunData:
    manifest = read_manifest(path)
    if not os.path.lexists(path / "cases.csv"):
        raise UsageError(
            f"{path / 'cases.csv'} is missing; restore the file, or finish the run with --resume"
        )
    cases = read_table(path / "cases.csv", FILES["cases.csv"])
    if cases.empty:
        raise UsageError(f"{path / 'cases.csv'} holds no case; restore the file, or measure again")
    twice = cases["case_id"].duplicated()
    if twice.any():
        name = cases["case_id"][twice].iloc[0]
        raise UsageError(f"{path / 'cases.csv'}: a case_id stands twice ({name}); restore the file")
    world_size = cases["num_devices"].where(cases["mode"].isin(RANK_PER_DEVICE), 1).fillna(1)
    return RunData(
        path,
        manifest,
        cases,
        load_blocks(
            path / "blocks.csv",
            dict(zip(cases["case_id"], world_size, strict=True)),
            grows=(path / JOURNAL).is_file() and not read(path).ended,
        ),
        read_table(path / "buckets.csv", FILES["buckets.csv"]),
        read_table(path / "allreduce.csv", FILES["allreduce.csv"]),
        read_table(path / "comparisons.csv", FILES["comparisons.csv"]),
        resumable=(path / JOURNAL).is_file(),
    )
