"""Length of a run: when it has measured enough, and which cases leave it earlier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..common.console import format_s
from ..plan.settings import ResolvedSettings
from ..plan.sweep import Planned
from ..results.comparisons import Comparison
from ..results.disk import MAX_CSV_BYTES
from ..results.journal import Completion
from ..results.recorder import Recorder
from ..results.round_times import ByRound
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import compute_median_ratio

MIN_WARMUP_S = 2.0
"""Seconds that a case on a GPU warms up, where there is time: clocks rise with load, allocators settle."""

WARMUP_SHARE = 0.1
"""Share of the time limit that all of these together take at most."""


def compute_min_warmup_s(plan: Sequence[Planned], settings: ResolvedSettings) -> float:
    """Least seconds that each case of a plan warms up; 0 on CPU cores, where a few steps are enough."""
    if settings.device != "cuda":
        return 0.0
    runnable = sum(p.skip_reason is None for p in plan)
    limit = math.inf if settings.max_time is None else settings.max_time
    return min(MIN_WARMUP_S, WARMUP_SHARE * limit / max(runnable, 1))


PREPARING_STEPS = 10
"""Steps that proving a case and warming it up take about as long as: both its proofs and their references."""

PREPARING_S = {"cpu": 0.5, "cuda": 5.0}
"""Seconds a case beside them: 0.5 on two CPU cores, 5 on an H200 (docs/gpu.md)."""

COMPILING_S = {"cpu": 15.0, "cuda": 25.0}
"""Seconds a compiled case beside those: an inductor graph of a ResNet, forward and backward."""


def estimate_duration_s(
    plan: Sequence[Planned], *, step_s: float, single_batch: int, settings: ResolvedSettings
) -> tuple[float, float, int]:
    """Expect seconds of preparing the cases and of rounds, and the number of rounds, at most.

    Source is one measured step of `single_batch` samples.

    The step is of one device. Ranks that share a device are taken to run one after the other, and
    communication is not counted: lower bounds. Rounds are cut off at the time limit.
    """
    run = [p for p in plan if not p.skip_reason]
    per_sample_s, least_s = step_s / single_batch, compute_min_warmup_s(plan, settings)
    steps_s = [
        per_sample_s
        * p.case.batch_per_device
        * p.case.accumulate
        * (p.case.num_devices if p.oversubscribed else 1)
        for p in run
    ]
    prepared = sum(max(PREPARING_STEPS * own_s, least_s) + PREPARING_S[settings.device] for own_s in steps_s)
    prepared += COMPILING_S[settings.device] * sum(p.case.compile != "off" for p in run)
    per_round = sum(settings.count_steps_per_block(own_s) * own_s for own_s in steps_s)
    limit = math.inf if settings.max_time is None else settings.max_time
    wanted = math.inf if settings.rounds is None else settings.rounds * per_round
    rounds_s = max(per_round, min(wanted, limit))  # the first round is always finished
    return prepared, rounds_s, int(rounds_s / per_round + 1e-9)


FIRST_LOOK_ROUND = 10
"""Rounds before the first look at the widths; each later look comes after twice as many."""


def is_interim_look(num_rounds: int) -> bool:
    """Tell whether widths are looked at after so many rounds: 10, 20, 40, 80, ..."""
    factor, rest = divmod(num_rounds, FIRST_LOOK_ROUND)
    return rest == 0 and factor > 0 and factor & (factor - 1) == 0


def find_converged(comparisons: Sequence[Comparison], half_widths: Mapping[str, float]) -> frozenset[str]:
    """Case ids that need no more rounds: all that they are compared in is narrow enough for the margin.

    Those in no comparison go by the half-width of their rate, a fraction; `single` is to be left out.
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


MAX_SHARE = 0.9
"""Share of the blocks that can be read again: traces may come after the last round."""


class StopRule:
    """Decides when a run has measured enough."""

    def __init__(
        self, settings: ResolvedSettings, recorder: Recorder, elapsed_s: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._elapsed_s = elapsed_s
        self._left_at_first_s: float | None = None

    def explain_end(self, num_rounds: int) -> str:
        """Why the run ends after so many rounds; empty while it goes on."""
        if not num_rounds:
            return ""
        wanted, target = self._settings.rounds, self._settings.precision_target
        if wanted is not None:
            if num_rounds >= wanted:
                return Completion.ROUNDS
        elif target is not None:
            # Fewer rounds can agree by chance.
            if num_rounds >= MIN_ROUNDS and self._recorder.compute_half_width() <= target:
                return Completion.TARGET
        elif is_interim_look(num_rounds) and self._is_narrow():
            return Completion.NARROW
        num_bytes = self._recorder.journal.state.table_bytes
        if num_bytes * (num_rounds + 1) > MAX_SHARE * MAX_CSV_BYTES * num_rounds:
            return Completion.FULL  # after a round more it might not be read again
        return Completion.TIME if self.is_out_of_time() else ""

    def _is_narrow(self) -> bool:
        """Tell whether every comparison is narrow enough for the margin; without any, every rate.

        Width decides, never significance: who stops once 1 is excluded finds winners that are not there.
        """
        if comparisons := self._recorder.tables.comparisons:
            return all(one.is_narrow for one in comparisons)
        return self._recorder.compute_half_width() <= self._settings.margin / 2

    def compute_left_s(self) -> float | None:
        """Seconds until the time limit; None without one."""
        limit = self._settings.max_time
        return None if limit is None else limit - self._elapsed_s()

    def describe_progress(self, num_rounds: float) -> tuple[float, str]:
        """Return the share of the run that is done after so many rounds, at most, and the same in words."""
        spent_s, wanted, limit_s = self._elapsed_s(), self._settings.rounds, self._settings.max_time
        shares = [num_rounds / wanted] if wanted else []
        said = format_s(spent_s) + (f" of at most {format_s(limit_s)}" if limit_s else "")
        shares += [spent_s / limit_s] if limit_s else []
        return min(max(shares, default=0.0), 1.0), f"{said}, {wanted} rounds" if wanted else said

    def compute_left_share(self, num_rounds: int) -> float:
        """Share of the rounds, or of the time since this was first asked, that is left after `num_rounds`."""
        if self._settings.rounds is not None:
            return 1 - num_rounds / self._settings.rounds
        left_s = self.compute_left_s()
        if left_s is None:
            return 1.0
        if self._left_at_first_s is None:
            self._left_at_first_s = left_s
        return left_s / self._left_at_first_s if self._left_at_first_s > 0 else 0.0

    def is_out_of_time(self) -> bool:
        left = self.compute_left_s()
        return left is not None and left <= 0


FINALISTS = 2
"""Cases that stay beside their reference: with one alone the best would be lost more often."""

FINAL_SHARE = 0.6
"""Share of the time that they and the reference have for themselves."""

MIN_RACE_ROUNDS = 4
"""No case is dropped earlier: a single disturbance must not decide."""


def select_slowest(
    pairs: Sequence[tuple[str, str]], rates: Mapping[str, ByRound], left_share: float
) -> frozenset[str]:
    """Name the cases that a race (`--race`) measures no further.

    Successive elimination: at even intervals the case that looks worst against its reference is dropped, and
    what remains of the time goes to the reference and the best two (after the successive rejects of Audibert,
    Bubeck and Munos, "Best Arm Identification in Multi-Armed Bandits", 2010). No test is involved, so no
    threshold either; what is said in the end rests on the run's intervals, for as many cases as began.

    `pairs` are the run's, (case, reference), `rates` by round of each case that is still measured,
    `left_share` of the time or the rounds from 1 down to 0. A reference is never dropped.
    """
    found: set[str] = set()
    early = max((left_share - FINAL_SHARE) / (1 - FINAL_SHARE), 0.0)
    for reference in dict.fromkeys(reference for _, reference in pairs):
        challengers = [case_id for case_id, its_reference in pairs if its_reference == reference]
        others = [case_id for case_id in challengers if case_id in rates]
        own = rates.get(reference, {})
        if all(len(rates[case_id].keys() & own.keys()) >= MIN_RACE_ROUNDS for case_id in others):
            gains = {case_id: compute_median_ratio(rates[case_id], own).estimate for case_id in others}
            num_kept = FINALISTS + math.ceil((len(challengers) - FINALISTS) * early)
            found |= set(sorted(others, key=lambda c: -gains[c])[num_kept:])
    return frozenset(found - {reference for _, reference in pairs})
