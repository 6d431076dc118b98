"""The tables of a run, made of its log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..machine.manifest import Manifest
from ..plan.settings import IMAGES, PARAMETER_PRECISIONS
from ..stats.fit import FittedSteps
from .aggregate import describe_planned_case, make_allreduce_rows, make_bucket_rows, make_case_rows
from .blocks import Block
from .case_result import CaseResult
from .columns import BY_PLAN, COMPARISONS, NOT_REACHED, make_frame
from .comparisons import Comparison, compare_pairs, list_pairs
from .journal import Settled, State
from .run_folder import write_blocks, write_table

NOT_REACHED_REASON = "not measured: the run ended before this case's first block"
"""Reason of a case that is shown as skipped because its turn never came."""


@dataclass(frozen=True)
class LogTables:
    """The tables that follow from a run's log; a case without a block yet counts as not reached."""

    manifest: Manifest
    state: State
    pairs: Sequence[tuple[str, str]] | None = None
    """Cases to compare, where they are others than `list_pairs` would have."""

    def list_pairs(self) -> Sequence[tuple[str, str]]:
        """List the pairs to compare; a case whose bucket layout another has stands for nothing."""
        if self.pairs is not None:
            return self.pairs
        skipped = {index for index, known in self.state.settled.items() if known.status == "skipped"}
        plan = [p for i, p in enumerate(self.state.plan) if p.skip_reason is None and i not in skipped]
        return list_pairs(CaseResult.from_row(describe_planned_case(p)) for p in plan)

    @cached_property
    def _typical(self) -> FittedSteps:
        return self.state.times.fit_steps()

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Return the comparisons that the run answers."""
        units = {p.case.case_id: p.case.units_per_step for p in self.state.plan}
        return compare_pairs(self.list_pairs(), self._typical, units=units, margin=self.manifest.margin)

    @cached_property
    def cases(self) -> pd.DataFrame:
        """cases.csv."""
        rows = self._describe_cases()
        return make_case_rows(rows, self.state.times, self.comparisons, typical=self._typical)

    def _describe_cases(self) -> Iterator[dict[str, Any]]:
        """Yield what is known of each case beside its blocks."""
        run = {
            "run_id": self.manifest.run_id,
            "started_at": self.manifest.created_utc,
            "torch_version": self.manifest.versions.get("torch"),
        }
        own = PARAMETER_PRECISIONS.get(self.manifest.model.dtype or "")
        if own and self.manifest.settings.precision in ("fp32", "tf32"):
            run["precision"] = own
        measured = self.state.times.collect_step_ms("timed")
        for index, planned in enumerate(self.state.plan):
            known = self.state.settled.get(index) or Settled(index=index, status="ok")
            told = {**known.facts, "status": known.status, "reason": known.reason}
            if planned.skip_reason:
                told = {"status": "skipped", "reason": planned.skip_reason, "reason_code": BY_PLAN}
            elif known.status == "ok" and planned.case.case_id not in measured:
                told |= {"status": "skipped", "reason": NOT_REACHED_REASON, "reason_code": NOT_REACHED}
            yield describe_planned_case(planned, **told | run)

    def write(self, folder: Path, blocks: Iterable[Block]) -> None:
        """Write all tables of a run with these blocks. Raises OSError."""
        unit = next((p.case.unit for p in self.state.plan), IMAGES)
        compared = make_frame((one.to_row(unit) for one in self.comparisons), COMPARISONS)
        write_blocks(folder, blocks)
        write_table(folder, "buckets.csv", make_bucket_rows(self.state.layouts, self.state.times))
        write_table(folder, "allreduce.csv", make_allreduce_rows(self.state.curves.values()))
        write_table(folder, "comparisons.csv", compared)
        write_table(folder, "cases.csv", self.cases)
