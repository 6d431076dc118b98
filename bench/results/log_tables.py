"""The tables of a run, made of its log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from ..machine.manifest import Manifest
from ..plan.settings import IMAGES, OWN_PRECISIONS
from ..stats.fit import Typical
from .aggregate import Outcome, allreduce_rows, bucket_rows, case_rows, identity
from .blocks import Block
from .case_result import CaseResult
from .columns import ALLREDUCE, BY_PLAN, COMPARISONS, NOT_REACHED, typed_frame
from .comparisons import Comparison, compared, pairs_of
from .journal import Settled, State
from .round_times import RoundTimes
from .run_folder import RunWriter

NOT_REACHED_REASON = "not measured: the run ended before this case's first block"
"""Reason of a case that is shown as skipped because its turn never came."""


@dataclass(frozen=True)
class LogTables:
    """The tables that follow from a run's log; a case without a block yet counts as not reached."""

    manifest: Manifest
    state: State
    times: RoundTimes

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to compare; a case whose bucket layout another has stands for nothing."""
        skipped = {index for index, known in self.state.settled.items() if known.status == "skipped"}
        plan = [p for i, p in enumerate(self.state.plan) if p.skip_reason is None and i not in skipped]
        return pairs_of(CaseResult.of(identity(Outcome(p))) for p in plan)

    @cached_property
    def _typical(self) -> Typical:
        return self.times.fitted()

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Return the comparisons that the run answers."""
        units = {p.case.case_id: p.case.units_per_step for p in self.state.plan}
        return compared(self.pairs(), self._typical, units=units, margin=self.manifest.margin)

    @cached_property
    def cases(self) -> pd.DataFrame:
        """cases.csv."""
        run = {
            "run_id": self.manifest.run_id,
            "started_at": self.manifest.created_utc,
            "torch_version": self.manifest.versions.get("torch"),
        }
        own = OWN_PRECISIONS.get(self.manifest.model.dtype or "")
        if own and self.manifest.settings.precision in ("fp32", "tf32"):
            run["precision"] = own
        return case_rows(self._outcomes(), self.times, self.comparisons, run=run, typical=self._typical)

    def _outcomes(self) -> list[Outcome]:
        measured = self.times.step_ms("timed").keys()
        found = []
        for index, planned in enumerate(self.state.plan):
            known = self.state.settled.get(index) or Settled(index=index, status="ok")
            if planned.skip_reason:
                found.append(Outcome(planned, "skipped", planned.skip_reason, {"reason_code": BY_PLAN}))
            elif known.status == "ok" and planned.case.case_id not in measured:
                not_reached = {**known.facts, "reason_code": NOT_REACHED}
                found.append(Outcome(planned, "skipped", NOT_REACHED_REASON, not_reached))
            else:
                found.append(Outcome(planned, known.status, known.reason, known.facts))
        return found

    def write(self, writer: RunWriter, blocks: Iterable[Block]) -> None:
        """Write all tables of a run with these blocks. Raises OSError."""
        unit = next((p.case.unit for p in self.state.plan), IMAGES)
        curves = [
            row
            for curve in self.state.curves.values()
            for row in allreduce_rows(curve.num_ranks, curve.backend, dict(curve.times_ms))
        ]
        writer.write_blocks(blocks)
        writer.replace("buckets.csv", bucket_rows(self.state.layouts, self.times))
        writer.replace("allreduce.csv", typed_frame(curves, ALLREDUCE))
        writer.replace("comparisons.csv", typed_frame((c.row(unit) for c in self.comparisons), COMPARISONS))
        writer.replace("cases.csv", self.cases)
