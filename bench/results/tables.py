"""Tables of a results folder, read within limits and checked against the schema: the folder may be anyone's.

Every failure to read is a UsageError that names the file. Tables that grow while a run measures are repaired
where it goes on: cut off behind the last whole block or curve.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.results.column_types import LEAST, Column
from ddp_bench.bench.results.disk import (
    MOST_CSV_BYTES,
    MOST_LINE,
    MOST_TABLE_BYTES,
    open_regular,
    open_text,
    read_bytes,
    replace_file,
)
from ddp_bench.bench.results.round_times import blocks
from ddp_bench.bench.results.schema import ALLREDUCE, BLOCKS, typed, typed_frame
from ddp_bench.bench.text import csv_text

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

_PIECE_ROWS = 50_000

_TRUTHS: dict[str, bool] = {"true": True, "false": False}

_READERS: dict[str, Callable[[str], Any]] = {
    "text": lambda cell: csv_text(cell) or None,
    "int": lambda cell: int(cell) if cell else None,
    "float": lambda cell: float(cell) if cell else None,
    "bool": lambda cell: _TRUTHS[cell.lower()] if cell else None,
}


def read_table(path: Path, columns: tuple[Column, ...]) -> pd.DataFrame:
    """A whole table; cells that it lacks are NA, and a missing file is an empty table.

    A last line without its end is not read: whoever wrote it was killed, or still writes. Raises UsageError
    for a cell that the schema does not allow.
    """
    if not os.path.lexists(path):
        return typed_frame([], columns)
    content = read_bytes(path, most_bytes=MOST_TABLE_BYTES)
    content = content[: content.rfind(b"\n") + 1]
    if not content:
        return typed_frame([], columns)
    with readable(path):
        # In pieces, so that a file of nonsense ends here before all of it is in memory.
        pieces = pd.read_csv(io.BytesIO(content), dtype=object, na_filter=False, chunksize=_PIECE_ROWS)
        return pd.concat([_checked(piece, columns) for piece in pieces])


def _checked(raw: pd.DataFrame, columns: tuple[Column, ...]) -> pd.DataFrame:
    """Cells as texts become typed columns; by arrays, since pandas takes long for each of many columns."""
    places, cells = {name: i for i, name in enumerate(raw.columns)}, raw.to_numpy()
    for column in columns:
        if column.needed and column.name not in places:
            raise ValueError(f"it lacks the column {column.name}")
    made = {}
    for column in columns:
        place = places.get(column.name)
        texts = [""] * len(raw) if place is None else cells[:, place].tolist()
        made[column.name] = _typed(
            [text if isinstance(text, str) else "" for text in texts], column, raw.index
        )
    return pd.DataFrame(made, index=raw.index)


def _typed(cells: Sequence[str], column: Column, lines: pd.Index[int]) -> Any:
    missing = np.array([not cell for cell in cells], dtype=bool)
    if missing.all() and not column.needed:
        return typed([None] * len(cells), column.kind)

    def refuse(bad: BoolArray, allowed: str) -> None:
        if bad.any():
            at = int(bad.argmax())
            raise ValueError(f"{column.name} is not {allowed} (line {lines[at] + 2}: {cells[at][:40]!r})")

    if column.kind == "bool":
        truths = [_TRUTHS.get(cell.lower()) for cell in cells]
        refuse(np.array([truth is None for truth in truths], dtype=bool) & ~missing, "True or False")
        return typed(truths, column.kind)
    if column.kind == "text":
        texts = [csv_text(cell) or None for cell in cells]
        missing = np.array([text is None for text in texts], dtype=bool)
        refuse(refused(column, texts, missing), column.allowed)
        return typed(texts, column.kind)
    numbers = np.array([_number(cell) for cell in cells])
    missing = np.isnan(numbers)
    refuse(refused(column, numbers, missing), column.allowed)
    if column.kind == "float":
        return numbers
    refuse(~missing & (numbers % 1 != 0), "a whole number")
    return typed([None if math.isnan(number) else int(number) for number in numbers.tolist()], column.kind)


def refused(column: Column, values: Sequence[str | None] | FloatArray, missing: BoolArray) -> BoolArray:
    """Whether each of the values of a column is one that it must not hold; as `Column.allows`, by arrays."""
    bad = np.zeros(len(missing), dtype=bool)
    if column.kind in ("int", "float"):
        found = np.asarray(values)
        bad = ~((found > column.above) & (found <= column.most) & ((found == 0) | (abs(found) >= LEAST)))
    elif column.among:
        bad = np.array([value not in column.among for value in values], dtype=bool)
    return (missing & column.needed) | (bad & ~missing)


def _number(cell: str) -> float:
    """A cell of a column of numbers; NaN is an empty one, and infinity what is no number."""
    if not cell:
        return math.nan
    try:
        found = float(cell)
    except ValueError:
        found = math.nan
    return math.inf if math.isnan(found) else found


def is_large(path: Path) -> bool:
    """Whether a blocks.csv is too large for a frame of all its rows."""
    return path.exists() and path.stat().st_size > MOST_TABLE_BYTES


def load_blocks(path: Path, num_ranks: Mapping[str, int] | None = None) -> pd.DataFrame:
    """A blocks.csv of any size: all rows, or where they are too many the longest rank's of each block.

    The last block is left out where it lacks ranks of its case's `num_ranks`: its writer was killed.
    """
    num_ranks = num_ranks or {}
    if is_large(path):
        return _read_longest(path, num_ranks)
    rows = read_table(path, BLOCKS)
    if rows.empty:
        return rows
    same = [(rows[name] == rows[name].iloc[-1]).fillna(False) for name in ("case_id", "phase", "round")]
    last = same[0] & same[1] & same[2]
    lacks_ranks = last.sum() < num_ranks.get(rows["case_id"].iloc[-1], 1)
    return rows[~last] if lacks_ranks else rows


def read_blocks(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Block after block of a blocks.csv of any size: the rows of all its ranks together."""
    with open_text(path, most_bytes=MOST_CSV_BYTES) as file, readable(path):
        yield from blocks(_rows(csv.reader(_ended(file), strict=True)))


def _ended(file: TextIO) -> Iterator[str]:
    """The lines of a file but for a last one without its end; ValueError for one that no run writes."""
    while line := file.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise ValueError(f"a line is longer than {MOST_LINE} characters")
        if line.endswith(("\n", "\r")):
            yield line


def _rows(lines: Iterator[list[str]]) -> Iterator[dict[str, Any]]:
    known = {column.name: column for column in BLOCKS}
    header = next(lines, [])
    missing = [column.name for column in BLOCKS if column.needed and column.name not in header]
    if missing:
        raise ValueError(f"it lacks the column {missing[0]}")
    readers = [(name, _READERS[known[name].kind] if name in known else str) for name in header]
    checked = [known[name] for name in header if name in known]
    for number, cells in enumerate(lines, start=2):
        row = {name: read(cell) for (name, read), cell in zip(readers, cells, strict=True)}
        for column in checked:
            if not column.allows(row[column.name]):
                raise ValueError(f"{column.name} is not {column.allowed} (line {number})")
        yield row


def _read_longest(path: Path, num_ranks: Mapping[str, int]) -> pd.DataFrame:
    """Of every block the row of its longest rank, which alone makes its throughput; see `load_blocks`."""
    longest, pieces = _longest(path, num_ranks), []
    with readable(path):
        while piece := list(islice(longest, _PIECE_ROWS)):
            pieces.append(typed_frame(piece, BLOCKS))
    return pd.concat(pieces, ignore_index=True) if pieces else typed_frame([], BLOCKS)


def _longest(path: Path, num_ranks: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for rows, after in pairwise(chain(read_blocks(path), [None])):
        if rows and (after or len(rows) >= num_ranks.get(rows[0]["case_id"], 1)):
            yield max(rows, key=lambda row: float(row["block_ms"]))


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


MOST_DROPPED = 10_000
"""Rows that a repair leaves out; a curve that was cut off has tens."""

_TAIL_BYTES = 2**18
_PHASE, _ROUND, _RANK = map([column.name for column in BLOCKS].index, ("phase", "round", "rank"))
_HEADERS = {
    name: ",".join(column.name for column in columns).encode() + b"\n"
    for name, columns in (("blocks.csv", BLOCKS), ("allreduce.csv", ALLREDUCE))
}


def repair_blocks(path: Path, num_ranks: Mapping[str, int]) -> int:
    """Cut blocks.csv behind its last whole block; the number of bytes that went.

    A block is whole with a row of every rank: `num_ranks` by case. Only the end of the file is read: rows are
    appended and synced block by block, so no crash damages more than the last. Raises OSError, and UsageError
    for the columns of another version.
    """
    if not os.path.lexists(path):
        return 0
    with os.fdopen(open_regular(path, os.O_RDWR), "r+b") as file:
        header = file.readline(MOST_LINE)
        if header.startswith(b"case_id,") and header.endswith(b"\n") and header != _HEADERS["blocks.csv"]:
            raise UsageError(f"{path} has other columns; go on with the ddp-bench that began the run")
        size = file.seek(0, os.SEEK_END)
        tail_bytes = _TAIL_BYTES
        while True:
            start = max(0, size - tail_bytes)
            file.seek(start)
            keep = _whole_bytes(file.read(), at_start=start == 0, num_ranks=num_ranks)
            if keep is not None:
                break
            tail_bytes *= 4
        if start + keep < size:
            file.truncate(start + keep)
            os.fsync(file.fileno())
        return size - start - keep


def _whole_bytes(tail: bytes, *, at_start: bool, num_ranks: Mapping[str, int]) -> int | None:
    """Bytes of `tail` up to the end of the last whole block; None where it begins before the tail."""
    lines = tail.splitlines(keepends=True)
    if at_start and lines[:1] != [_HEADERS["blocks.csv"]]:
        return 0
    # Before the rows stands the header, or the end of a row that begins before the tail.
    begin, lines = len(lines[0]), lines[1:]
    found = list(_places(lines))
    if not found:
        return begin if at_start else None
    first = len(found)
    while first and found[first - 1] == found[-1]:
        first -= 1
    if first == 0 and not at_start:
        return None
    is_whole = len(found) - first >= num_ranks.get(found[-1][0], 1)
    return begin + sum(map(len, lines[: len(found) if is_whole else first]))


def _places(lines: Iterable[bytes]) -> Iterator[tuple[str, str, str]]:
    """Case, phase and round of each row before the first broken one: a loss of power may leave zeros."""
    for line in lines:
        if not line.endswith(b"\n") or b"\0" in line:
            return
        try:
            cells = next(csv.reader([line.decode("utf-8")], strict=True))
        except (csv.Error, UnicodeDecodeError, StopIteration):
            return
        if len(cells) != len(BLOCKS) or not cells[_RANK].isdigit():
            return
        yield cells[0], cells[_PHASE], cells[_ROUND]


def repair_allreduce(path: Path, done: set[tuple[int, str]]) -> None:
    """Keep the rows of curves that are `done` (rank count, backend), in the file's order.

    Raises OSError, and UsageError for what is no table of all-reduces.
    """
    if not os.path.lexists(path):
        return
    header = _HEADERS["allreduce.csv"].decode()
    kept, dropped = [header], 0
    with open_text(path, most_bytes=MOST_TABLE_BYTES, errors="replace") as file:
        damaged = file.readline(MOST_LINE) != header
        while line := file.readline(MOST_LINE):
            cells = line.split(",")
            if line.endswith("\n") and cells[0].isdigit() and (int(cells[0]), cells[1]) in done:
                kept.append(line)
            elif (dropped := dropped + 1) > MOST_DROPPED:
                raise UsageError(f"{path} is no table of all-reduces; restore it, or remove it")
    if damaged or dropped:
        replace_file(path, lambda part: part.write_text("".join(kept), encoding="utf-8"))
