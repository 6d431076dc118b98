"""Formulas of step times, from which the value of a round and the estimate of a run both follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they take a second, and `--help` needs the names of metrics alone
    from ..stats.fit import FittedSteps
    from ..stats.interval import Estimate
    from .case_result import CaseResult
    from .round_times import ByRound, RoundTimes

SINGLE = "single"
"""The timed phase of the case of `single` that a case is compared with; `single` itself has none."""


@dataclass(frozen=True)
class Formula:
    """A function of a case's steps: of those of a round the value there, of fitted ones the estimate."""

    of: Callable[..., float]
    """Takes the case, and ms per step of each of the phases."""
    phases: tuple[str, ...] = ("timed",)
    is_log: bool = True
    """True where its logarithm is estimated: of times, rates and ratios."""
    when: Callable[[CaseResult], bool] = lambda _: True
    """Tells whether it says anything of a case."""
    needs_interval: bool = False
    """True where it says nothing without one: few rounds tell little of a difference of differences."""

    def compute_by_round(self, case: CaseResult, times: RoundTimes) -> ByRound:
        """Return the value of every round that has all of its steps."""
        found = [times.get_case(case_id).get_steps(phase) for case_id, phase in self._list_steps(case)]
        rounds = [r for r in found[0] if all(r in by_round for by_round in found)] if found else ()
        return {r: self.of(case, *(by_round[r] for by_round in found)) for r in rounds}

    def estimate(self, case: CaseResult, typical: FittedSteps) -> Estimate:
        """Return the estimate by the fit of a run, not known where it says nothing of the case."""

        def compute_value(log_ms: Iterable[float]) -> float:
            found = self.of(case, *map(math.exp, log_ms))
            return math.log(found) if self.is_log else found

        found = typical.estimate(compute_value, *self._list_steps(case))
        return typical.estimate(compute_value) if self.needs_interval and math.isnan(found.error) else found

    def _list_steps(self, case: CaseResult) -> list[tuple[str, str]]:
        """Return the case and phase of each step; none where it says nothing of the case."""
        single = case.single
        if not self.when(case) or (SINGLE in self.phases and single is None):
            return []
        return [
            (single.case_id, "timed") if phase == SINGLE and single else (case.case_id, phase)
            for phase in self.phases
        ]
