"""The blocks of a run, each a phase of a case in one round: a line of its log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ..machine.records import Count
from ..plan.settings import MAX_DEVICES
from .block_times import BlockTimes
from .columns import MAX_NUMBER, MIN_NUMBER, PHASES

_ROW_BYTES = 100
"""Bytes of the numbers and separators in a row of blocks.csv, at most."""

_Rank = Annotated[int, Meta(ge=0, le=MAX_DEVICES)]
_NumSteps = Annotated[int, Meta(ge=1, le=10**15)]
Milliseconds = Annotated[float, Meta(ge=MIN_NUMBER, le=MAX_NUMBER)]


class Block(msgspec.Struct, frozen=True, tag_field="event", tag="block"):
    """Values that the ranks of a block have in common, and those of each rank in their order."""

    case_id: str
    phase: Annotated[str, Meta(pattern=f"^({'|'.join(PHASES)})$")]
    round_index: Count
    launch: Count
    started_s: Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
    """Seconds since the run began."""
    ranks: Sequence[_Rank]
    num_steps: Sequence[_NumSteps]
    block_ms: Sequence[Milliseconds]
    hosts: Sequence[str | None]
    """Empty, as what follows, where it comes from blocks.csv."""
    steps_ms: Sequence[str | None]
    """Durations of the steps, as blocks.csv has them."""
    details: Sequence[str | None]
    """Further values that the phase measured, as JSON."""
    position: Count = 0
    """Place in its round, which only the log and blocks.csv tell."""

    @classmethod
    def from_times(
        cls,
        launch: int,
        case_id: str,
        phase: str,
        round_index: int,
        position: int,
        started_s: float,
        times: Sequence[tuple[str, int, BlockTimes]],
    ) -> Block:
        """Make a block of the host, number and times of each rank that took part."""
        hosts, ranks, blocks = zip(*times, strict=True)
        return cls(
            case_id,
            phase,
            round_index,
            launch,
            round(started_s, 4),
            ranks,
            [len(one.steps_ms) for one in blocks],
            [round(one.block_ms, 4) for one in blocks],
            hosts,
            [" ".join([f"{ms:.5g}" for ms in one.steps_ms]) for one in blocks],
            [json.dumps(one.detail) if one.detail else None for one in blocks],
            position,
        )

    @property
    def table_bytes(self) -> int:
        """The size of its rows in blocks.csv, at most, but for what is odd in names."""
        texts = sum(len(text) for texts in (self.hosts, self.steps_ms) for text in texts if text)
        details = sum(len(text) + text.count('"') for text in self.details if text)
        return len(self.ranks) * (len(self.case_id) + _ROW_BYTES) + texts + details
