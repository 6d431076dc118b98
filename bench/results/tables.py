"""Files and tables of a results folder, read within limits: the folder may be anyone's.

Nothing here, or anywhere else in the suite, unpickles what it reads. Every failure is a UsageError that names
the file.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from bench.errors import UsageError
from bench.results.round_times import blocks
from bench.results.schema import BLOCKS, Column, typed_frame
from bench.text import csv_text

MOST_MANIFEST_BYTES = 64 * 2**20
"""Of JSON; a manifest of thousands of ranks takes some MiB."""

MOST_TRACE_BYTES = 2 * 2**30
"""Of a trace, not packed; a few steps make some tens of MiB."""

MOST_CSV_BYTES = 8 * 2**30
"""5,000 cases x 30 rounds x 64 ranks of ten steps take 2 GiB."""

MOST_TABLE_BYTES = 256 * 2**20
"""A larger table is not held whole: in memory it takes several times its size."""

_PIECE_ROWS = 50_000

_BLOCK = ["case_id", "phase", "round"]

_READERS: dict[str, Callable[[str], Any]] = {
    "text": lambda cell: csv_text(cell) or None,
    "int": lambda cell: int(cell) if cell else None,
    "float": lambda cell: float(cell) if cell else None,
    "bool": lambda cell: {"True": True, "False": False, "": None}[cell],
}


def check(path: Path, *, most_bytes: int) -> None:
    """Raise UsageError unless `path` is a regular file of at most `most_bytes`; a pipe could hang us."""
    try:
        if not path.is_file():
            raise UsageError(f"{path} is missing or no regular file; name a folder or file that is whole")
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {_reason(error)}; name a readable file") from None
    if size > most_bytes:
        raise UsageError(f"{path} is too large: {size} bytes, at most {most_bytes} are read; is it the one?")


def read_bytes(path: Path, *, most_bytes: int) -> bytes:
    """The content of a regular file of at most `most_bytes`."""
    check(path, most_bytes=most_bytes)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {_reason(error)}; name a readable file") from None


def read_json(path: Path, *, most_bytes: int = MOST_MANIFEST_BYTES) -> Any:
    """The value in a JSON file."""
    return parse_json(read_bytes(path, most_bytes=most_bytes), path)


def parse_json(content: bytes | str, where: Path | str) -> Any:
    """The value that `content` holds; `where` is named in errors."""
    try:
        return json.loads(content)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply to be read; restore the file") from None
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON ({error}): broken off or edited; restore it") from None


def read_table(path: Path, columns: tuple[Column, ...]) -> pd.DataFrame:
    """A whole table; columns that it lacks are NA, and a missing file is an empty table.

    A last line without its end is not read: whoever wrote it was killed, or still writes.
    """
    if not path.exists():
        return typed_frame([], columns)
    content = read_bytes(path, most_bytes=MOST_TABLE_BYTES)
    whole = content[: content.rfind(b"\n") + 1]
    if not whole:
        return typed_frame([], columns)
    with readable(path):
        raw = pd.read_csv(io.BytesIO(whole), dtype="string", keep_default_na=False, na_values=[""])
        return pd.DataFrame({column.name: _typed(raw, column) for column in columns}, index=raw.index)


def _typed(raw: pd.DataFrame, column: Column) -> pd.Series[Any]:
    missing = column.name not in raw
    values = pd.Series(pd.NA, raw.index, dtype="string") if missing else raw[column.name]
    if column.kind == "bool":
        return values.map({"True": True, "False": False}).astype("boolean")
    if column.kind in ("int", "float"):
        return pd.to_numeric(values).astype("Int64" if column.kind == "int" else "float64")
    return values.map(csv_text, na_action="ignore").astype("string")


def is_large(path: Path) -> bool:
    """Whether a blocks.csv is too large for a frame of all its rows."""
    return path.is_file() and path.stat().st_size > MOST_TABLE_BYTES


def load_blocks(path: Path, num_ranks: Mapping[str, int] | None = None) -> pd.DataFrame:
    """A blocks.csv of any size: all rows, or where they are too many the longest rank's of each block.

    The last block is left out where it lacks ranks of its case's `num_ranks`: its writer was killed.
    """
    num_ranks = num_ranks or {}
    if is_large(path):
        return read_longest(path, num_ranks)
    rows = read_table(path, BLOCKS)
    if rows.empty:
        return rows
    same = [(rows[name] == rows[name].iloc[-1]).fillna(False) for name in _BLOCK]  # noqa: FBT003 - NA is not
    last = same[0] & same[1] & same[2]
    lacks_ranks = last.sum() < num_ranks.get(rows["case_id"].iloc[-1], 1)
    return rows[~last] if lacks_ranks else rows


def read_blocks(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Block after block of a blocks.csv of any size: the rows of all its ranks together."""
    check(path, most_bytes=MOST_CSV_BYTES)
    with readable(path), path.open(newline="", encoding="utf-8") as file:
        yield from blocks(_rows(csv.reader(_ended(file), strict=True)))


def _ended(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.endswith(("\n", "\r")))


def _rows(lines: Iterator[list[str]]) -> Iterator[dict[str, Any]]:
    kinds = {column.name: _READERS[column.kind] for column in BLOCKS}
    header = next(lines, [])
    readers = [(name, kinds.get(name, str)) for name in header]
    if not {"case_id", "phase", "round", "rank", "num_steps", "block_ms"} <= set(header):
        raise ValueError("it lacks a column")
    for number, cells in enumerate(lines, start=2):
        row = {name: read(cell) for (name, read), cell in zip(readers, cells, strict=True)}
        if not ((row["num_steps"] or 0) >= 1 and 0 < (row["block_ms"] or 0) < float("inf")):
            raise ValueError(f"line {number} has no duration")
        yield row


def read_longest(path: Path, num_ranks: Mapping[str, int] | None = None) -> pd.DataFrame:
    """Of every block the row of its longest rank, which alone makes its throughput; see `load_blocks`."""
    whole = _whole(read_blocks(path), num_ranks or {})
    longest = (max(rows, key=lambda row: float(row["block_ms"])) for rows in whole)
    pieces = []
    with readable(path):
        while piece := list(islice(longest, _PIECE_ROWS)):
            pieces.append(typed_frame(piece, BLOCKS))
    return pd.concat(pieces, ignore_index=True) if pieces else typed_frame([], BLOCKS)


def _whole(
    found: Iterator[list[dict[str, Any]]], num_ranks: Mapping[str, int]
) -> Iterator[list[dict[str, Any]]]:
    """The blocks but for a last one that lacks ranks."""
    for rows, after in pairwise(chain(found, [None])):
        if rows and (after or len(rows) >= num_ranks.get(rows[0]["case_id"], 1)):
            yield rows


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within it, what a broken `path` leads to is a UsageError that names it."""
    try:
        yield
    except UsageError:
        raise
    except (csv.Error, ValueError, TypeError, KeyError, ArithmeticError, RecursionError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} cannot be read: {first}; restore the file or leave the run out") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
