"""The blocks of a run, each a phase of a case in one round, made of rows of blocks.csv: one for each rank."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..common.errors import UsageError
from .columns import BLOCKS
from .disk import MOST_LINE, open_regular

_COMMON: Mapping[str, Any] = {"case_id": "", "phase": "", "round": 0, "launch": 1, "started_s": 0.0}
"""Columns in which the ranks of a block agree, and what an empty cell means."""

_TEXTS = ("host", "steps_ms", "detail")
_OF_RANKS = ("rank", "num_steps", "block_ms", *_TEXTS)

_PIECE_ROWS = 50_000
"""Rows that are held as Python's objects at a time."""

Numbers = npt.NDArray[np.int64]


class Block(NamedTuple):
    """Values that the ranks of a block have in common, and those of each rank in their order."""

    case_id: str
    phase: str
    round_index: int
    launch: int
    started_s: float
    """Seconds since the run began."""
    ranks: Sequence[int]
    num_steps: Sequence[int]
    block_ms: Sequence[float]
    hosts: Sequence[str | None]
    """Empty, as what follows, where texts were not asked for."""
    steps_ms: Sequence[Any]
    """Durations of the steps, or their text."""
    details: Sequence[Any]
    """Further values that the phase measured, or their JSON."""

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Block:
        """The block that these rows are."""
        common = (rows[0].get(name) or usual for name, usual in _COMMON.items())
        return cls(*common, *([row.get(name) for row in rows] for name in _OF_RANKS))


def block_numbers(frame: pd.DataFrame) -> Numbers:
    """Number each row's block, ascending by case, phase and round."""
    found = np.zeros(len(frame), np.int64)
    for name in ("case_id", "phase", "round"):
        codes, values = pd.factorize(frame[name], sort=True)
        found = found * len(values) + codes
    return found


def starts_of(numbers: Numbers) -> npt.NDArray[np.intp]:
    """Find the places at which another number begins."""
    return np.flatnonzero(np.diff(numbers, prepend=-1))


def blocks_of(frame: pd.DataFrame, *, in_order: bool = False, with_texts: bool = True) -> Iterator[Block]:
    """Make the blocks of a blocks.csv, by case, phase and round, or `in_order` of their rows.

    Hosts, single steps and details, which take most of the time, only `with_texts`.
    """
    numbers = block_numbers(frame)
    order = np.arange(len(frame)) if in_order else np.argsort(numbers, kind="stable")
    starts = starts_of(numbers[order])
    common = (frame[name].iloc[order[starts]].fillna(usual).tolist() for name, usual in _COMMON.items())
    columns = [
        frame[name].astype(object).where(frame[name].notna(), None).to_numpy()
        if name in _TEXTS
        else frame[name].to_numpy()
        for name in _OF_RANKS
        if with_texts or name not in _TEXTS
    ]
    begun = held = 0
    for (start, end), told in zip(
        pairwise([*starts.tolist(), len(frame)]), zip(*common, strict=True), strict=True
    ):
        if end > held:
            begun, held = start, max(start + _PIECE_ROWS, end)
            cells = [column[order[begun:held]].tolist() for column in columns]
            cells += [[]] * (len(_OF_RANKS) - len(cells))
        yield Block(*told, *(column[start - begun : end - begun] for column in cells))


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
