"""Tables of a results folder, read within limits and checked against the schema: the folder may be anyone's.

Every failure to read is a UsageError that names the file. blocks.csv, which grows while a run measures, is
repaired where it goes on: cut off behind the last whole block.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from ..common.errors import UsageError
from ..common.text import csv_cell, csv_text
from .columns import BLOCKS, Column, typed_frame
from .disk import MOST_CSV_BYTES, MOST_LINE, MOST_TABLE_BYTES, open_regular, open_text
from .round_times import blocks

_PIECE_ROWS = 50_000

_READERS: dict[str, Callable[[str], Any]] = {
    "text": lambda cell: csv_text(cell) or None,
    "int": lambda cell: int(number) if (number := float(cell)).is_integer() else number,
    "float": float,
    "bool": lambda cell: {"true": True, "false": False}[cell.lower()],
}

csv.field_size_limit(MOST_LINE)  # the steps of one block may take more than the 128 KiB of Python's default


def read_table(path: Path, columns: tuple[Column, ...]) -> pd.DataFrame:
    """A whole table; cells that it lacks are NA, and a missing file is an empty table.

    Raises UsageError for a cell that the schema does not allow.
    """
    by_rank = any(column.name == "rank" for column in columns)
    most_bytes = MOST_CSV_BYTES if by_rank else MOST_TABLE_BYTES
    return _frame(_rows(path, columns, most_bytes=most_bytes), path, columns)


def load_blocks(path: Path, num_ranks: Mapping[str, int], *, grows: bool) -> pd.DataFrame:
    """A blocks.csv; the last block of one that `grows` is left out where it lacks ranks of its case.

    Their number is in `num_ranks`. Then its writer was killed, or still writes. Raises UsageError where
    another file has been cut.
    """
    known = pairwise(chain(read_blocks(path, grows=grows), [None]))
    whole = (
        rows for rows, after in known if rows and (after or _is_whole(rows, path, num_ranks, grows=grows))
    )
    return _frame(chain.from_iterable(whole), path, BLOCKS)


def _is_whole(rows: list[dict[str, Any]], path: Path, num_ranks: Mapping[str, int], *, grows: bool) -> bool:
    case_id = rows[0]["case_id"]
    if len(rows) >= num_ranks.get(case_id, 1):
        return True
    if not grows:
        raise UsageError(f"{path} has been cut: the last block of {case_id} lacks ranks; restore the file")
    return False


def read_blocks(path: Path, *, grows: bool = True) -> Iterator[list[dict[str, Any]]]:
    """Block after block of a blocks.csv, which may still be one that `grows`: rows of all ranks together."""
    return blocks(_rows(path, BLOCKS, most_bytes=MOST_CSV_BYTES, grows=grows))


def _frame(rows: Iterator[dict[str, Any]], path: Path, columns: tuple[Column, ...]) -> pd.DataFrame:
    """Piece by piece, for rows as mappings take several times the memory of a frame."""
    pieces = []
    if os.path.lexists(path):
        while piece := list(islice(rows, _PIECE_ROWS)):
            pieces.append(typed_frame(piece, columns))
    return pd.concat(pieces, ignore_index=True) if pieces else typed_frame([], columns)


def _rows(
    path: Path, columns: tuple[Column, ...], *, most_bytes: int, grows: bool = False
) -> Iterator[dict[str, Any]]:
    with open_text(path, most_bytes=most_bytes) as file, readable(path):
        lines = csv.reader(_ended(file, grows=grows), strict=True)
        header = next(lines, None)
        if header is None:
            return
        for column in columns:
            if column.needed and column.name not in header:
                raise ValueError(f"it lacks the column {column.name}")
        # Most cells of a column have stood there before.
        known = [
            (column.name, header.index(column.name), lru_cache(1000)(partial(_value, column)))
            for column in columns
            if column.name in header
        ]
        for cells in lines:
            try:
                if len(cells) != len(header):
                    raise ValueError(f"cells: {len(cells)}, columns: {len(header)}")
                yield {name: value_of(cells[place]) for name, place, value_of in known}
            except ValueError as error:
                raise ValueError(f"{error} (line {lines.line_num})") from None


def _ended(file: TextIO, *, grows: bool) -> Iterator[str]:
    """The lines of a file; ValueError for one that no run writes.

    A last line without its end is left out of a file that `grows`: whoever wrote it was killed, or still
    writes. Any other file was written as a whole.
    """
    while line := file.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise ValueError(f"a line is longer than {MOST_LINE} characters")
        if line.endswith(("\n", "\r")):
            yield line
        elif not grows:
            raise ValueError("its last line has no end: the file has been cut")


def _value(column: Column, cell: str) -> Any:
    """Return a cell's value; None where it is empty. Raises ValueError for what the column does not allow."""
    with contextlib.suppress(ValueError, KeyError):
        value = _READERS[column.kind](cell) if cell else None
        if column.allows(value):
            return value
    raise ValueError(f"{column.name} cannot be {cell[:40]!r}")


def csv_bytes(lines: Iterable[Iterable[str]]) -> bytes:
    """The content of a table's file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode("utf-8")


def table_bytes(rows: pd.DataFrame) -> bytes:
    """The content of a table's file, of a frame."""
    return csv_bytes([[*rows], *([csv_value(cell) for cell in row] for row in rows.itertuples(index=False))])


def as_written(rows: pd.DataFrame) -> pd.DataFrame:
    """The frame as it is read again from `table_bytes`: numbers with as many digits."""
    floats = rows.select_dtypes("float64")
    return rows.assign(**{name: [float(csv_value(x) or "nan") for x in floats[name]] for name in floats})


def csv_value(value: Any) -> str:
    """A cell that `read_table` reads as `value`; missing and NaN are empty."""
    if value is None or value is pd.NA:
        return ""
    if isinstance(value, float):
        return "" if value != value else f"{value:.12g}"  # noqa: PLR0124 - NaN alone differs from itself
    if isinstance(value, tuple):
        return " ".join(f"{ms:.5g}" for ms in value)
    if isinstance(value, Mapping):
        return csv_cell(json.dumps(value)) if value else ""
    return csv_cell(value) if isinstance(value, str) else str(value)


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


_PHASE, _ROUND, _RANK = map([column.name for column in BLOCKS].index, ("phase", "round", "rank"))


def repair_blocks(path: Path, num_ranks: Mapping[str, int]) -> None:
    """Cut blocks.csv behind its last whole block, which has a row of every rank: `num_ranks` by case.

    Rows are appended and synced block by block, so no crash damages more than the last. What is broken before
    a whole block stays for its reader to refuse. Raises OSError, and UsageError for the columns of another
    version.
    """
    if not os.path.lexists(path):
        return
    with os.fdopen(open_regular(path, os.O_RDWR), "r+b") as file:
        header = file.readline(MOST_LINE)
        known = ",".join(column.name for column in BLOCKS).encode() + b"\n"
        if header != known and header.endswith(b"\n"):
            raise UsageError(f"{path} has other columns; go on with the ddp-bench that began the run")
        keep = end = len(header) if header == known else 0
        block, count = None, 0
        while line := file.readline(MOST_LINE):
            end += len(line)
            before, block = block, _block_of(line)
            count = count + 1 if block == before else 1
            if block and count >= num_ranks.get(block[0], 1):
                keep = end
        if keep < end:
            file.truncate(keep)
            os.fsync(file.fileno())


def _block_of(line: bytes) -> tuple[str, str, str] | None:
    """Case, phase and round of a row; None of a broken one: a loss of power may leave zeros."""
    if not line.endswith(b"\n") or b"\0" in line:
        return None
    try:
        cells = next(csv.reader([line.decode("utf-8")], strict=True))
    except (csv.Error, UnicodeDecodeError, StopIteration):
        return None
    if len(cells) != len(BLOCKS) or not cells[_RANK].isdigit():
        return None
    return cells[0], cells[_PHASE], cells[_ROUND]
