"""The blocks of a loaded blocks.csv, which has a row for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from .blocks import Block

_BLOCK_DEFAULTS: Mapping[str, Any] = {"case_id": "", "phase": "", "round": 0, "launch": 1, "started_s": 0.0}
"""Columns in which the ranks of a block agree, and what an empty cell means."""

_TEXTS = ("host", "steps_ms", "detail")
_RANK_COLUMNS = ("rank", "num_steps", "block_ms", *_TEXTS)

_PIECE_ROWS = 50_000
"""Rows that are held as Python's objects at a time."""

Numbers = npt.NDArray[np.int64]


def assign_block_numbers(frame: pd.DataFrame) -> Numbers:
    """Assign each row the number of its block, ascending by case, phase and round."""
    found = np.zeros(len(frame), np.int64)
    for name in ("case_id", "phase", "round"):
        codes, values = pd.factorize(frame[name], sort=True)
        found = found * len(values) + codes
    return found


def group_blocks(frame: pd.DataFrame, *, with_texts: bool = True) -> Iterator[Block]:
    """Make the blocks of a blocks.csv, by case, phase and round.

    Hosts, single steps and details, which take most of the time, only `with_texts`.
    """
    numbers = assign_block_numbers(frame)
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    common = (
        frame[name].iloc[order[starts]].fillna(usual).tolist() for name, usual in _BLOCK_DEFAULTS.items()
    )
    columns = [
        frame[name].astype(object).where(frame[name].notna(), None).to_numpy()
        if name in _TEXTS
        else frame[name].to_numpy()
        for name in _RANK_COLUMNS
        if with_texts or name not in _TEXTS
    ]
    begun = held = 0
    for (start, end), told in zip(
        pairwise([*starts.tolist(), len(frame)]), zip(*common, strict=True), strict=True
    ):
        if end > held:
            begun, held = start, max(start + _PIECE_ROWS, end)
            cells = [column[order[begun:held]].tolist() for column in columns]
            cells += [[]] * (len(_RANK_COLUMNS) - len(cells))
        yield Block(*told, *(column[start - begun : end - begun] for column in cells))
