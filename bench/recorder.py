"""Rank 0's books: outcomes and blocks, written as they are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from bench.aggregate import Outcome, allreduce_rows, bucket_rows, case_rows, worst_half_width
from bench.plan import BucketLayout, Planned
from bench.schema import BLOCKS, typed_frame
from bench.store import RunWriter

NOT_REACHED = "not measured: the run ended before this case's first block"


class Recorder:
    """Keeps what was measured and puts it on disk; a case without a block yet counts as not reached."""

    def __init__(self, plan: Sequence[Planned], writer: RunWriter) -> None:
        self._writer = writer
        self._rows: list[dict[str, Any]] = []
        self._layouts: dict[str, BucketLayout] = {}
        self._outcomes = [Outcome(p, "skipped", p.skip_reason or NOT_REACHED) for p in plan]
        self.timed_s = 0.0
        self.cases = self.write()

    def set_outcome(
        self, index: int, status: str, reason: str = "", facts: Mapping[str, Any] | None = None
    ) -> None:
        """Status of case `index`; facts are added to those known."""
        old = self._outcomes[index]
        self._outcomes[index] = Outcome(old.planned, status, reason, {**old.facts, **(facts or {})})

    def set_layout(self, case_id: str, layout: BucketLayout | None) -> None:
        """The gradient buckets of a DDP case."""
        if layout is not None:
            self._layouts[case_id] = layout

    def add_block(self, rows: Sequence[dict[str, Any]]) -> None:
        """The rows of one block, one per rank that took part."""
        self._writer.append("blocks.csv", rows)
        self._rows += rows
        if rows[0]["phase"] in ("timed", "no_sync"):
            self.timed_s += max(row["block_ms"] for row in rows) / 1000

    def add_trace(self, case_id: str, rank: int, trace: bytes) -> None:
        """A gzipped Chrome trace of one rank; a later one of the same case replaces it."""
        self._writer.write_trace(f"{case_id}-rank{rank}.json.gz", trace)

    def add_allreduce(self, num_ranks: int, backend: str, times_ms: Mapping[int, Sequence[float]]) -> None:
        """Times of the all-reduce by itself, by message size in bytes."""
        self._writer.append("allreduce.csv", allreduce_rows(num_ranks, backend, times_ms))

    def blocks(self) -> pd.DataFrame:
        """All blocks so far."""
        return typed_frame(self._rows, BLOCKS)

    def write(self) -> pd.DataFrame:
        """Bring cases.csv and buckets.csv up to date; the frame of cases."""
        measured = {row["case_id"] for row in self._rows if row["phase"] == "timed"}
        shown = [
            Outcome(o.planned, "skipped", NOT_REACHED, o.facts)
            if o.status == "ok" and o.planned.case.case_id not in measured
            else o
            for o in self._outcomes
        ]
        blocks = self.blocks()
        self.cases = case_rows(shown, blocks)
        self._writer.replace("cases.csv", self.cases)
        self._writer.replace("buckets.csv", bucket_rows(self._layouts, blocks))
        return self.cases

    def half_width(self) -> float:
        """The widest throughput interval as last written, a fraction; NaN before two rounds."""
        return worst_half_width(self.cases)
