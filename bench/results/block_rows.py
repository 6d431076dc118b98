"""The blocks of a loaded blocks.csv, which has a row for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from .blocks import Block

_BLOCK_DEFAULTS: Mapping[str, Any] = {"case_id": "", "phase": "", "round": 0, "launch": 1, "started_s": 0.0}
"""Columns in which the ranks of a block agree, and what an empty cell means."""

_NO_TEXTS: Sequence[Sequence[str]] = ((), (), ())
"""Hosts, single steps and details of a block, which take most of the time to read, and nobody asks for."""

Numbers = npt.NDArray[np.int64]


def assign_block_numbers(frame: pd.DataFrame) -> Numbers:
    """Assign each row the number of its block, ascending by case, phase and round."""
    found = np.zeros(len(frame), np.int64)
    for name in ("case_id", "phase", "round"):
        codes, values = pd.factorize(frame[name], sort=True)
        found = found * len(values) + codes
    return found


def group_blocks(frame: pd.DataFrame) -> Iterator[Block]:
    """Make the blocks of a blocks.csv, by case, phase and round."""
    numbers = assign_block_numbers(frame)
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    firsts = order[starts]
    common = (frame[name].iloc[firsts].fillna(usual).tolist() for name, usual in _BLOCK_DEFAULTS.items())
    columns = [frame[name].to_numpy() for name in ("rank", "num_steps", "block_ms")]
    for told, rows in zip(zip(*common, strict=True), np.split(order, starts[1:]), strict=False):
        yield Block(*told, *(column[rows].tolist() for column in columns), *_NO_TEXTS)
