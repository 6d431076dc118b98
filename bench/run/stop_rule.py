"""When a run has measured enough, and how much it knows by then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.special import stdtrit

from ..console import format_s
from ..expected_time import timed_block_s
from ..plan import Planned
from ..results.comparisons import Comparison
from ..results.recorder import Recorder
from ..settings import ResolvedSettings
from ..stats.interval import SIGMA_OF_MAD
from ..stats.one_run import MIN_ROUNDS
from .reopen import Completion

FIRST_LOOK = 10
"""Rounds before the first look at the widths; each later look comes after twice as many."""

TIMED_SHARE = 0.55
"""Share of the measuring time that timed steps took where all kinds of blocks were due; for a forecast."""


def is_look(num_rounds: int) -> bool:
    """Whether widths are looked at after so many rounds: 10, 20, 40, 80, ..."""
    factor, rest = divmod(num_rounds, FIRST_LOOK)
    return rest == 0 and factor > 0 and factor & (factor - 1) == 0


def resting_cases(comparisons: Sequence[Comparison], half_widths: Mapping[str, float]) -> frozenset[str]:
    """Case ids that need no more rounds: all that they are compared in is narrow enough for the margin.

    Args:
        comparisons: that the run answers.
        half_widths: of the rates of cases in no comparison, as fractions; `single` is to be left out.
    """
    if not comparisons:
        return frozenset()
    margin = comparisons[0].margin
    compared = {case_id for one in comparisons for case_id in (one.case_id, one.reference_id)}
    wide = {
        case_id for one in comparisons if not one.is_narrow for case_id in (one.case_id, one.reference_id)
    }
    alone = {c for c, width in half_widths.items() if c not in compared and width <= margin / 2}
    return frozenset((compared - wide) | alone)


class StopRule:
    """Decides when a run has measured enough."""

    def __init__(
        self, settings: ResolvedSettings, recorder: Recorder, elapsed_s: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._elapsed_s = elapsed_s
        self._left_at_first_s: float | None = None

    def reason(self, num_rounds: int) -> str:
        """Why the run ends after so many rounds; empty while it goes on."""
        if not num_rounds:
            return ""
        wanted, target = self._settings.rounds, self._settings.precision_target
        if wanted is not None:
            if num_rounds >= wanted:
                return Completion.ROUNDS
        elif target is not None:
            # Fewer rounds can agree by chance.
            if num_rounds >= MIN_ROUNDS and self._recorder.half_width() <= target:
                return Completion.TARGET
        elif is_look(num_rounds) and self._is_narrow():
            return Completion.NARROW
        return Completion.TIME if self.out_of_time() else ""

    def _is_narrow(self) -> bool:
        """Whether every comparison is narrow enough for the margin; without any, every rate.

        By width, never by significance: who stops once 1 is excluded finds winners that are not there.
        """
        if comparisons := self._recorder.comparisons:
            return all(one.is_narrow for one in comparisons)
        return self._recorder.half_width() <= self._settings.margin / 2

    def left_s(self) -> float | None:
        """Seconds until the time limit; None without one."""
        limit = self._settings.max_time
        return None if limit is None else limit - self._elapsed_s()

    def progress(self, num_rounds: float) -> tuple[float, str]:
        """The share of the run that is done after so many rounds, at most, and the same in words."""
        spent_s, wanted, limit_s = self._elapsed_s(), self._settings.rounds, self._settings.max_time
        shares = [num_rounds / wanted] if wanted else []
        said = format_s(spent_s) + (f" of at most {format_s(limit_s)}" if limit_s else "")
        shares += [spent_s / limit_s] if limit_s else []
        return min(max(shares, default=0.0), 1.0), f"{said}, {wanted} rounds" if wanted else said

    def left_share(self, num_rounds: int) -> float:
        """Share of the rounds, or of the time since this was first asked, that is left after `num_rounds`."""
        if self._settings.rounds is not None:
            return 1 - num_rounds / self._settings.rounds
        left_s = self.left_s()
        if left_s is None:
            return 1.0
        if self._left_at_first_s is None:
            self._left_at_first_s = left_s
        return left_s / self._left_at_first_s if self._left_at_first_s > 0 else 0.0

    def out_of_time(self) -> bool:
        left = self.left_s()
        return left is not None and left <= 0


def expected_half_width(
    plan: Sequence[Planned], settings: ResolvedSettings, probe_ms: Sequence[float], *, expected_s: float
) -> float | None:
    """Half the interval of a ratio of two cases, as a fraction; None where nothing is known or compared.

    Every case is taken to scatter as the steps of a probe do, from round to round by chance alone.

    Args:
        plan: the cases.
        settings: of the run.
        probe_ms: steps of `single`.
        expected_s: seconds of measuring.
    """
    own = [p for p in plan if not p.skip_reason and not p.oversubscribed]
    logs = np.log(probe_ms)
    if len(own) < 2 or len(logs) < FIRST_LOOK:
        return None
    scatter = SIGMA_OF_MAD * float(np.median(np.abs(logs - np.median(logs))))
    batch, step_s = own[0].case.global_batch, math.exp(float(np.median(logs))) / 1000
    round_s = sum(timed_block_s(p, settings, step_s=step_s, single_batch=batch) for p in own)
    rounds = settings.rounds or int(TIMED_SHARE * expected_s / round_s)
    if rounds < MIN_ROUNDS:
        return None
    return float(stdtrit(rounds - 1, 0.975)) * scatter * math.sqrt(2 / rounds)
