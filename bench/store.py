"""A run's folder: claimed once, appended and synced as results are known, loaded with types."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from bench.errors import UsageError
from bench.schema import FILES, SCHEMA_VERSION, Column, typed_frame

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class RunData:
    """A loaded run; frames hold exactly the columns of `bench.schema`, missing values as NA."""

    path: Path
    manifest: dict[str, Any]
    cases: pd.DataFrame
    blocks: pd.DataFrame
    buckets: pd.DataFrame
    allreduce: pd.DataFrame


def default_folder(*, host: str, name: str, root: Path = Path("results")) -> Path:
    """`results/<UTC time>-<host>-<name>`."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    safe_host = "".join(c if c.isalnum() or c in "-_" else "-" for c in host) or "host"
    return root / f"{stamp}-{safe_host}-{name}"


def check_claimable(folder: Path) -> None:
    """Raise UsageError if `folder` holds anything or cannot be written; leaves no trace."""
    try:
        if folder.exists():
            if any(folder.iterdir()):
                raise UsageError(f"--out {folder} already holds a run or other files; name a new folder")
            parent = folder
        else:
            parent = next(p for p in folder.absolute().parents if p.exists())
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}; name another folder") from None


def claim(folder: Path) -> Path:
    """Make `folder` this run's own. Raises UsageError if it holds anything or cannot be written."""
    check_claimable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).touch(exist_ok=False)
    except FileExistsError:
        raise UsageError(f"--out {folder} is a file or another run's folder; name a new folder") from None
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}; name another folder") from None
    return folder


class RunWriter:
    """Writes one run's files; only rank 0 has one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("blocks.csv", "allreduce.csv"):
            self._append(name, [[column.name for column in FILES[name]]])

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to `blocks.csv` or `allreduce.csv` and sync them to disk before returning."""
        columns = FILES[name]
        self._append(name, [[_cell(row.get(column.name)) for column in columns] for row in rows])

    def _append(self, name: str, lines: list[list[str]]) -> None:
        with (self.folder / name).open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
            file.flush()
            os.fsync(file.fileno())

    def write_trace(self, name: str, content: bytes) -> None:
        """Put a file into `traces/`."""
        folder = self.folder / "traces"
        folder.mkdir(exist_ok=True)
        replace_file(folder / name, lambda path: path.write_bytes(content))

    def replace(self, name: str, rows: pd.DataFrame) -> None:
        """Replace `cases.csv` or `buckets.csv` as a whole, so that a reader never sees half a table."""
        names = [column.name for column in FILES[name]]
        lines = [names, *([_cell(v) for v in row] for row in rows[names].itertuples(index=False))]

        def write(path: Path) -> None:
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(lines)
                file.flush()
                os.fsync(file.fileno())

        replace_file(self.folder / name, write)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace `manifest.json`."""
        text = json.dumps({"schema_version": SCHEMA_VERSION, **manifest}, indent=2, default=str) + "\n"
        replace_file(self.folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def replace_file(target: Path, write: Any) -> None:
    """Call `write(path)` on a file beside `target`, then put it in target's place atomically."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    os.close(descriptor)
    try:
        write(Path(name))
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_run(path: Path) -> RunData:
    """Read a results folder. Raises UsageError where it is not one, or is of a newer schema."""
    manifest_path = path / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(
            f"{path} is not a results folder: it has no {MANIFEST}; name a run's folder"
        ) from None
    except ValueError:
        raise UsageError(f"{manifest_path} is not valid JSON: the run broke off before it began") from None
    if not isinstance(manifest, dict):
        raise UsageError(f"{manifest_path} does not hold a JSON object")
    version = manifest.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UsageError(f"{path} has schema {version}, this version reads up to {SCHEMA_VERSION}; upgrade")
    frames = {name: _read_csv(path / name, columns) for name, columns in FILES.items()}
    return RunData(
        path,
        manifest,
        frames["cases.csv"],
        frames["blocks.csv"],
        frames["buckets.csv"],
        frames["allreduce.csv"],
    )


def _read_csv(path: Path, columns: tuple[Column, ...]) -> pd.DataFrame:
    if not path.exists():
        return typed_frame([], columns)
    try:
        raw = pd.read_csv(path, dtype="string", keep_default_na=False, na_values=[""])
        frame = pd.DataFrame(index=raw.index)
        for column in columns:
            values = raw[column.name] if column.name in raw else pd.Series(pd.NA, raw.index, dtype="string")
            if column.kind == "bool":
                frame[column.name] = values.map({"True": True, "False": False}).astype("boolean")
            elif column.kind in ("int", "float"):
                numbers = pd.to_numeric(values)
                frame[column.name] = numbers.astype("Int64" if column.kind == "int" else "float64")
            else:
                frame[column.name] = values
    except (ValueError, TypeError, pd.errors.ParserError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} cannot be read: {first}; restore the file or leave the run out") from None
    return frame


def _cell(value: Any) -> str:
    if value is None or value is pd.NA:
        return ""
    if isinstance(value, float):
        return "" if value != value else f"{value:.10g}"  # noqa: PLR0124 - NaN alone differs from itself
    return str(value)
