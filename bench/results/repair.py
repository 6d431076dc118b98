"""Repairs tables that grow while a run measures: they are cut off behind the last whole block or curve."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.results.disk import MOST_LINE, MOST_TABLE_BYTES, open_regular, open_text, replace_file
from ddp_bench.bench.results.schema import ALLREDUCE, BLOCKS

MOST_DROPPED = 10_000
"""Rows that a repair leaves out; a curve that was cut off has tens."""

_TAIL_BYTES = 2**18
_PHASE, _ROUND, _RANK = (
    next(i for i, c in enumerate(BLOCKS) if c.name == n) for n in ("phase", "round", "rank")
)
_HEADERS = {
    name: ",".join(column.name for column in columns).encode() + b"\n"
    for name, columns in (("blocks.csv", BLOCKS), ("allreduce.csv", ALLREDUCE))
}


def repair_blocks(path: Path, num_ranks: Mapping[str, int]) -> int:
    """Cut blocks.csv behind its last whole block; the number of bytes that went.

    A block is whole with a row of every rank: `num_ranks` by case. Only the end of the file is read: rows are
    appended and synced block by block, so no crash damages more than the last. Raises OSError.
    """
    if not os.path.lexists(path):
        return 0
    with os.fdopen(open_regular(path, os.O_RDWR), "r+b") as file:
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
    if at_start and not (lines and lines[0] == _HEADERS["blocks.csv"]):
        return 0
    if not at_start:
        lines = lines[1:]  # its begin is cut off
    begin = len(tail) - sum(map(len, lines)) + (len(lines[0]) if at_start else 0)
    rows = [_row(line) for line in (lines[1:] if at_start else lines)]
    lengths = [len(line) for line in (lines[1:] if at_start else lines)]
    # A machine that lost power may leave zeros: nothing behind the first broken row counts.
    good = next((i for i, row in enumerate(rows) if row is None), len(rows))
    if good == 0:
        return begin if at_start else None
    last = rows[good - 1]
    first = good
    while first and (row := rows[first - 1]) is not None and last is not None and row[:3] == last[:3]:
        first -= 1
    if first == 0 and not at_start:
        return None
    assert last is not None
    whole = good - first >= num_ranks.get(last[0], 1)
    return begin + sum(lengths[: good if whole else first])


def _row(line: bytes) -> tuple[str, str, str, str] | None:
    """Case, phase, round and rank of a whole row; None for a broken one."""
    if not line.endswith(b"\n") or b"\0" in line:
        return None
    try:
        cells = next(csv.reader([line.decode("utf-8")], strict=True))
    except (csv.Error, UnicodeDecodeError, StopIteration):
        return None
    if len(cells) != len(BLOCKS) or not cells[_RANK].isdigit():
        return None
    return cells[0], cells[_PHASE], cells[_ROUND], cells[_RANK]


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
