"""Formulas of step times, from which the value of a round and the estimate of a run both follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they take a second, and `--help` needs the names of metrics alone
    from ..stats.fit import Typical
    from ..stats.interval import Estimate, Interval
    from .case_result import CaseResult
    from .round_times import ByRound, RoundTimes


@dataclass(frozen=True)
class Formula:
    """A function of a case's steps: of those of a round the value there, of fitted ones the estimate."""

    of: Callable[..., float]
    """Takes the case, ms per step of each of the phases, and the rate of `single` where it is over that."""
    phases: tuple[str, ...] = ("timed",)
    over_single: bool = False
    """True of a ratio to `single` with as large a batch that is compiled alike; which itself has none."""
    is_log: bool = True
    """True where its logarithm is estimated: of times, rates and ratios."""
    when: Callable[[CaseResult], bool] = lambda _: True
    """Tells whether it says anything of a case."""
    needs_interval: bool = False
    """True where it says nothing without one: few rounds tell little of a difference of differences."""

    def by_round(self, case: CaseResult, single: CaseResult | None, times: RoundTimes) -> ByRound:
        """Return the value of every round that has all of its steps."""
        found = [times.of_case(case_id).steps(phase) for case_id, phase in self._steps(case, single)]
        rounds = [r for r in found[0] if all(r in by_round for by_round in found)] if found else ()
        return {r: self._value(case, single, [by_round[r] for by_round in found]) for r in rounds}

    def estimate(self, case: CaseResult, single: CaseResult | None, typical: Typical) -> Estimate | None:
        """Return the estimate by the fit of a run; None where it says nothing of the case."""

        def value(log_ms: Iterable[float]) -> float:
            found = self._value(case, single, [math.exp(one) for one in log_ms])
            return math.log(found) if self.is_log else found

        steps = self._steps(case, single)
        found = typical.estimate(value, *steps) if steps else None
        return None if found is None or (self.needs_interval and math.isnan(found.error)) else found

    def interval(self, case: CaseResult, single: CaseResult | None, typical: Typical) -> Interval | None:
        """Return the estimate with its interval."""
        found = self.estimate(case, single, typical)
        known = None if found is None else found.interval()
        return known.exp() if known and self.is_log else known

    def _steps(self, case: CaseResult, single: CaseResult | None) -> list[tuple[str, str]]:
        """Return the case and phase of each step it takes; none where it says nothing of the case."""
        if not self.when(case) or (self.over_single and single is None):
            return []
        steps = [(case.case_id, phase) for phase in self.phases]
        return [*steps, (single.case_id, "timed")] if self.over_single and single else steps

    def _value(self, case: CaseResult, single: CaseResult | None, ms: list[float]) -> float:
        if self.over_single and single:
            return self.of(case, *ms[:-1], single.rate(ms[-1]))
        return self.of(case, *ms)
