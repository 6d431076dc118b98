"""Results tables from disk, within limits and with their schema's types; every failure is a UsageError."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from bench.errors import UsageError
from bench.results import bounded
from bench.results.round_times import RoundTimes, blocks
from bench.results.schema import BLOCKS, Column, typed_frame
from bench.text import csv_text

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


def read_table(path: Path, columns: tuple[Column, ...]) -> pd.DataFrame:
    """A whole table; columns that it lacks are NA, and a missing file is an empty table.

    A last line without its end is not read: whoever wrote it was killed, or still writes.
    """
    if not path.exists():
        return typed_frame([], columns)
    content = bounded.read_bytes(path, most_bytes=MOST_TABLE_BYTES)
    whole = content[: content.rfind(b"\n") + 1]
    if not whole:
        return typed_frame([], columns)
    try:
        raw = pd.read_csv(io.BytesIO(whole), dtype="string", keep_default_na=False, na_values=[""])
        return pd.DataFrame({column.name: _typed(raw, column) for column in columns}, index=raw.index)
    except (ValueError, TypeError, OverflowError, OSError) as error:
        raise _unreadable(path, error) from None


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
    bounded.check(path, most_bytes=bounded.MOST_CSV_BYTES)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from blocks(_rows(csv.reader(_ended(file), strict=True)))
    except (csv.Error, ValueError, KeyError, OSError) as error:
        raise _unreadable(path, error) from None


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


def read_ledger(path: Path) -> RoundTimes:
    """What the summary of a run needs of its blocks.csv, without holding its rows."""
    times = RoundTimes()
    for rows in read_blocks(path):
        try:
            times.add(rows)
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            raise _unreadable(path, error) from None
    return times


def read_longest(path: Path, num_ranks: Mapping[str, int] | None = None) -> pd.DataFrame:
    """Of every block the row of its longest rank, which alone makes its throughput; see `load_blocks`."""
    whole = _whole(read_blocks(path), num_ranks or {})
    longest = (max(rows, key=lambda row: float(row["block_ms"])) for rows in whole)
    pieces = []
    try:
        while piece := list(islice(longest, _PIECE_ROWS)):
            pieces.append(typed_frame(piece, BLOCKS))
    except (TypeError, OverflowError) as error:
        raise _unreadable(path, error) from None
    return pd.concat(pieces, ignore_index=True) if pieces else typed_frame([], BLOCKS)


def _whole(
    found: Iterator[list[dict[str, Any]]], num_ranks: Mapping[str, int]
) -> Iterator[list[dict[str, Any]]]:
    """The blocks but for a last one that lacks ranks."""
    for rows, after in pairwise(chain(found, [None])):
        if rows and (after or len(rows) >= num_ranks.get(rows[0]["case_id"], 1)):
            yield rows


def _unreadable(path: Path, error: Exception) -> UsageError:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UsageError(f"{path} cannot be read: {first}; restore the file or leave the run out")
