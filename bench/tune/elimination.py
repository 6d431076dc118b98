"""Picks which candidates to measure, and which no further, so that rounds go where the answer is open.

Successive elimination: at even intervals the candidate that looks worst is dropped, and what remains of the
time goes to the default and the best two (after the successive rejects of Audibert, Bubeck and Munos, "Best
Arm Identification in Multi-Armed Bandits", 2010). No test is involved, so no threshold either; what is said
in the end rests on the rounds that two candidates share, with intervals for as many as began. Simulated with
four candidates of 0 to 5% gain and steps that scatter by 5%, the best is found as often as in even turns, and
has 1.4 times as many rounds in common with the default.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.stats import paired_ratio
from ddp_bench.bench.tune.candidates import Candidate

FINALISTS = 2
"""Candidates that stay beside the default: with one alone the best would be lost more often."""

FINAL_SHARE = 0.6
"""Share of the time that the finalists and the default have for themselves."""

LEAST_ROUNDS = 4
"""No candidate is dropped earlier: a single disturbance must not decide."""

STEPS_TO_PREPARE = 10
"""What a case takes before its first block, in its own steps: construction, proof, warm-up."""

LEAST_STEPS = 24
"""Timed steps that the default and each finalist need for an answer."""

LEAST_MEASURED = 2
"""The default and one to compare it with."""


@dataclass(frozen=True)
class Elimination:
    """Cases compared with the default, the worst of them dropped as time passes."""

    default: str
    """Case id; it is never dropped."""
    challengers: tuple[str, ...]
    """The others' ids, in the order that decides between equals."""

    def dropped(self, rates: Mapping[str, ByRound], left_share: float) -> Collection[str]:
        """Name the cases to measure no further.

        Args:
            rates: throughput by round, of every case that is still measured.
            left_share: of the time or the rounds for measuring, from 1 down to 0.
        """
        default = rates.get(self.default, {})
        others = [case_id for case_id in self.challengers if case_id in rates]
        if any(len(rates[c].keys() & default.keys()) < LEAST_ROUNDS for c in others):
            return ()
        gains = {c: paired_ratio(rates[c], default).estimate for c in others}
        return sorted(others, key=lambda c: -gains[c])[num_kept(len(self.challengers), left_share) :]


def num_kept(challengers: int, left_share: float) -> int:
    """Count the challengers that are still measured with `left_share` of the time left."""
    early = max((left_share - FINAL_SHARE) / (1 - FINAL_SHARE), 0.0)
    return min(FINALISTS + math.ceil((challengers - FINALISTS) * early), challengers)


def rounds_of_finalists(challengers: int) -> float:
    """Rounds of the finalists, over those that would fit if two cases alone were measured."""
    dropped = max(challengers - FINALISTS, 0)
    shares = [(FINAL_SHARE if dropped else 1.0, 1 + min(challengers, FINALISTS))]
    shares += [((1 - FINAL_SHARE) / dropped, 1 + FINALISTS + more) for more in range(1, dropped + 1)]
    return 2 * sum(share / cases for share, cases in shares)


def affordable(candidates: Sequence[Candidate], *, seconds: float) -> list[Candidate]:
    """Keep so many candidates that in `seconds` the finalists get `LEAST_STEPS`.

    The default comes first and what the user asked to compare beside the layout stays; of further layouts
    those go that promise least, until the rest fits or two are left.
    """
    default = candidates[0]
    kept = list(candidates)
    layouts = sorted(
        (c for c in candidates[1:] if c.point[1:] == default.point[1:]),
        key=lambda c: c.predicted_ms,
        reverse=True,
    )
    for worst in layouts:
        if len(kept) <= LEAST_MEASURED or _last_steps(kept, seconds) >= LEAST_STEPS:
            break
        kept.remove(worst)
    return kept


def _last_steps(candidates: Sequence[Candidate], seconds: float) -> float:
    """Steps of each finalist if everything, preparation included, takes `seconds`."""
    step_ms = mean(c.predicted_ms for c in candidates)
    left_ms = 1000 * seconds - STEPS_TO_PREPARE * step_ms * len(candidates)
    return left_ms / (2 * step_ms) * rounds_of_finalists(len(candidates) - 1)
