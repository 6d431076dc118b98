"""Tables of a results folder, read within limits and checked against the schema: the folder may be anyone's.

Every failure to read is a UsageError that names the file.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from ..common.errors import UsageError
from ..common.text import decode_csv_cell, escape_csv_cell
from .blocks import Block
from .columns import BLOCKS, DTYPES, Column, make_frame
from .disk import MAX_CSV_BYTES, MAX_LINE, MAX_TABLE_BYTES, open_binary

_PIECE_BYTES, _PIECE_ROWS = MAX_LINE, 50_000

_READERS: dict[str, Callable[[str], Any]] = {
    "text": lambda cell: decode_csv_cell(cell) or None,
    "int": lambda cell: int(number) if (number := float(cell)).is_integer() else number,
    "float": float,
    "bool": lambda cell: {"true": True, "false": False}[cell.lower()],
}

csv.field_size_limit(MAX_LINE)  # the steps of one block may take more than the 128 KiB of Python's default


def read_table(path: Path, columns: tuple[Column, ...]) -> pd.DataFrame:
    """Read a whole table; cells that it lacks are NA, and a missing file is an empty table.

    Raises UsageError for a cell that the schema does not allow.
    """
    if not os.path.lexists(path):
        return make_frame([], columns)
    return _join_pieces(_read_pieces(path, columns), columns)


def load_blocks(path: Path, num_ranks: Mapping[str, int]) -> pd.DataFrame:
    """Read a blocks.csv. Raises UsageError where its last block lacks ranks, of `num_ranks` by case."""
    frame = read_table(path, BLOCKS)
    if not frame.empty:
        case_id = frame["case_id"].iloc[-1]
        needed = num_ranks.get(case_id, 1)
        last = frame[["case_id", "phase", "round"]].tail(needed)
        if len(last) < needed or len(last.drop_duplicates()) > 1:
            raise UsageError(f"{path} has been cut: the last block of {case_id} lacks ranks; restore it")
    return frame


def _join_pieces(pieces: Iterable[pd.DataFrame], columns: tuple[Column, ...]) -> pd.DataFrame:
    """One frame of several, column by column: all at once would take their memory twice."""
    parts = [dict(piece.items()) for piece in pieces] or [dict(make_frame([], columns).items())]
    found = {name: pd.concat([part.pop(name) for part in parts], ignore_index=True) for name in [*parts[0]]}
    return pd.DataFrame(found, copy=False)


def _read_pieces(path: Path, columns: tuple[Column, ...]) -> Iterator[pd.DataFrame]:
    """Read a table piece by piece: by columns, and from the first piece on that is odd row by row."""
    by_rank = any(column.name == "rank" for column in columns)
    most_bytes = MAX_CSV_BYTES if by_rank else MAX_TABLE_BYTES
    with open_binary(path, most_bytes=most_bytes) as file, report_read_errors(path):
        if file.read(3) != codecs.BOM_UTF8:
            file.seek(0)
        lines = csv.reader(_read_lines(file), strict=True)
        header = next(lines, None)
        if header is None:
            return
        for column in columns:
            if column.required and column.name not in header:
                raise ValueError(f"it lacks the column {column.name}")
        num_lines = 0
        while content := _read_whole_lines(file):
            piece = _parse_columns(content, header, columns)
            if piece is None:
                file.seek(-len(content), os.SEEK_CUR)
                break
            yield piece
            num_lines += content.count(b"\n")
        rows = _parse_rows(lines, header, columns, num_lines)
        while some := list(islice(rows, _PIECE_ROWS)):
            yield make_frame(some, columns)


def _read_whole_lines(file: BinaryIO) -> bytes:
    """Read on to the end of a line; empty where there is none, or the line is too long."""
    content = file.read(_PIECE_BYTES)
    end = content.rfind(b"\n") + 1
    file.seek(end - len(content), os.SEEK_CUR)
    return content[:end]


_SEPARATORS = {b"", b",,", b",\n", b"\n,", b"\n\n"}
"""First and last byte outside of quotes; nothing at all is within a cell, a quote that stands twice."""

_READ_DTYPES: Mapping[str, Any] = {"text": object, "float": np.float64}

_BY_DEFAULT = tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1)
_EXACT: Mapping[str, Any] = {} if _BY_DEFAULT else {"float_precision": "round_trip"}
"""Has pandas read numbers to the last digit, as Python does."""


def _remove_quoted(content: bytes) -> bytes | None:
    """Whole lines without their quoted cells; None where a quote is not where a writer of tables puts it."""
    if b'"' not in content:
        return content
    outside = (b"\n" + content).split(b'"')[::2]
    is_odd = content.count(b'"') % 2 or not {part[:1] + part[-1:] for part in outside} <= _SEPARATORS
    return None if is_odd else b"".join(outside)[1:]


def _parse_columns(content: bytes, header: Sequence[str], columns: Sequence[Column]) -> pd.DataFrame | None:
    """Read whole lines by columns; None where each cell has to be looked at, if only to say what is wrong."""
    here = [column for column in columns if column.name in header]
    is_usual = not (b"\r" in content or b"\0" in content or any(column.kind == "bool" for column in here))
    if not is_usual or (plain := _remove_quoted(content)) is None:
        return None
    # pandas refuses a line with more cells than the one before, and takes one with fewer.
    num_commas, first = len(header) - 1, plain[: plain.index(b"\n")]
    if first.count(b",") != num_commas or plain.count(b",") != num_commas * plain.count(b"\n"):
        return None
    place = {column.name: str(header.index(column.name)) for column in here}
    try:
        found = pd.read_csv(
            io.BytesIO(content),
            header=None,
            names=[*map(str, range(len(header)))],
            index_col=False,
            dtype={place[c.name]: _READ_DTYPES[c.kind] for c in here if c.kind in _READ_DTYPES},
            na_values=[""],
            keep_default_na=False,
            skip_blank_lines=False,
            low_memory=False,
            encoding="utf-8",
            **_EXACT,
        )
        made: dict[Any, Any] = {c.name: _check_cells(found[place[c.name]], c, content) for c in here}
    except ValueError:
        return None
    made |= make_frame([{}] * len(found), tuple(c for c in columns if c.name not in place)).items()
    return pd.DataFrame({column.name: made[column.name] for column in columns}, copy=False)


def _check_cells(cells: pd.Series[Any], column: Column, content: bytes) -> Any:
    """Return the cells of a column with its type. Raises ValueError for any that it does not allow."""
    refused: Any
    has_missing = (column.required or column.kind != "text") and cells.hasnans
    if column.kind == "text":
        if b"\\" in content or b"'" in content:
            cells = cells.map(decode_csv_cell, na_action="ignore")
        refused = column.choices and not {*cells.dropna().unique()} <= {*column.choices}
    elif cells.dtype.kind not in "if" or (has_missing and b"nan" in content.lower()):
        raise ValueError
    else:
        values = cells.dropna().to_numpy() if has_missing else cells.to_numpy()
        refused = not column.is_within(values).all()
        refused |= column.kind == "int" and (values != np.floor(values)).any()
    if refused or (column.required and has_missing):
        raise ValueError
    found = cells.to_numpy()
    return found if column.kind == "float" else pd.array(found, dtype=DTYPES[column.kind])


def _parse_rows(
    lines: Any, header: Sequence[str], columns: Sequence[Column], num_lines: int
) -> Iterator[dict[str, Any]]:
    """Read the rows that a csv.reader still has, `num_lines` behind what it has read."""
    # Most cells of a column have stood there before.
    known = [
        (column.name, header.index(column.name), lru_cache(1000)(partial(_parse_value, column)))
        for column in columns
        if column.name in header
    ]
    for cells in lines:
        try:
            if len(cells) != len(header):
                raise ValueError(f"cells: {len(cells)}, columns: {len(header)}")
            yield {name: value_of(cells[place]) for name, place, value_of in known}
        except ValueError as error:
            raise ValueError(f"{error} (line {num_lines + lines.line_num})") from None


def _read_lines(file: BinaryIO) -> Iterator[str]:
    """Read the lines of a file, which was written as a whole; ValueError for one that no run writes."""
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise ValueError(f"a line is longer than {MAX_LINE} characters")
        if not line.endswith(b"\n"):
            raise ValueError("its last line has no end: the file has been cut")
        yield line.decode()


def _parse_value(column: Column, cell: str) -> Any:
    """Return a cell's value; None where it is empty. Raises ValueError for what the column does not allow."""
    with contextlib.suppress(ValueError, KeyError):
        value = _READERS[column.kind](cell) if cell else None
        if column.can_hold(value):
            return value
    raise ValueError(f"{column.name} cannot be {cell[:40]!r}")


def encode_csv(lines: Iterable[Iterable[str]]) -> bytes:
    """Encode the content of a table's file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode("utf-8")


def write_block_table(path: Path, blocks: Iterable[Block]) -> None:
    """Write a blocks.csv, block by block. Raises ValueError for a block whose ranks do not tell alike."""
    known = lru_cache(1000)(format_csv_value)  # most of these stood in the block before
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(column.name for column in BLOCKS)
        for one in blocks:
            place = (one.case_id, one.phase, one.round_index, one.position, one.launch, one.started_s)
            *shared, started_s = (repeat(known(value), len(one.ranks)) for value in place)
            names, counts = (map(known, one.hosts), map(known, one.num_steps))
            times = (map(format_csv_value, column) for column in (one.block_ms, one.steps_ms, one.details))
            lines.writerows(
                zip(*shared, map(known, one.ranks), names, started_s, counts, *times, strict=True)
            )


def encode_table(rows: pd.DataFrame) -> bytes:
    """Encode the content of a table's file, of a frame."""
    content = io.BytesIO(encode_csv([map(str, rows)]))
    content.seek(0, os.SEEK_END)
    for at in range(0, len(rows), _PIECE_ROWS):
        piece = rows.iloc[at : at + _PIECE_ROWS]
        lines = map(",".join, zip(*(_format_cells(piece[name]) for name in piece), strict=True))
        content.write("\n".join([*lines, ""]).encode())
    return content.getvalue()


def _format_cells(column: Any) -> list[str]:
    """Format the cells of a column as `encode_csv` writes them."""
    if column.dtype.kind == "f":
        return ["" if x != x else f"{x:.12g}" for x in column.tolist()]  # noqa: PLR0124 - only NaN differs so
    codes, values = pd.factorize(column)  # few of the texts and whole numbers differ
    texts = map(format_csv_value, values)
    cells = ('"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text for text in texts)
    found: list[str] = np.array([*cells, ""], object)[codes].tolist()
    return found


def format_csv_value(value: Any) -> str:
    """Format a cell that `read_table` reads as `value`; missing and NaN are empty."""
    # The most frequent kinds first: a large run writes millions.
    if isinstance(value, str):
        return escape_csv_cell(value)
    if isinstance(value, float):
        return "" if value != value else f"{value:.12g}"  # noqa: PLR0124 - NaN alone differs from itself
    return "" if value is None or value is pd.NA else str(value)


@contextlib.contextmanager
def report_read_errors(path: Path) -> Iterator[None]:
    """Within it, what a broken `path` leads to is a UsageError that names it."""
    try:
        yield
    except UsageError:
        raise
    except (csv.Error, ValueError, TypeError, KeyError, ArithmeticError, RecursionError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} cannot be read: {first}; restore the file or leave the run out") from None
