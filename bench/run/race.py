"""A race (`--race`): which cases are measured no further, so that the best have the time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..results.round_times import ByRound
from ..stats.interval import median_of_ratios

FINALISTS = 2
"""Cases that stay beside their reference: with one alone the best would be lost more often."""

FINAL_SHARE = 0.6
"""Share of the time that they and the reference have for themselves."""

LEAST_ROUNDS = 4
"""No case is dropped earlier: a single disturbance must not decide."""


def dropped(
    pairs: Sequence[tuple[str, str]], rates: Mapping[str, ByRound], left_share: float
) -> frozenset[str]:
    """Name the cases that a race (`--race`) measures no further.

    Successive elimination: at even intervals the case that looks worst against its reference is dropped, and
    what remains of the time goes to the reference and the best two (after the successive rejects of Audibert,
    Bubeck and Munos, "Best Arm Identification in Multi-Armed Bandits", 2010). No test is involved, so no
    threshold either; what is said in the end rests on the run's intervals, for as many cases as began.

    Args:
        pairs: that the run compares, (case, reference); a reference is never dropped.
        rates: throughput by round, of every case that is still measured.
        left_share: of the time or the rounds for measuring, from 1 down to 0.
    """
    found: set[str] = set()
    for reference in dict.fromkeys(reference for _, reference in pairs):
        challengers = [case_id for case_id, its_reference in pairs if its_reference == reference]
        others = [case_id for case_id in challengers if case_id in rates]
        own = rates.get(reference, {})
        if all(len(rates[case_id].keys() & own.keys()) >= LEAST_ROUNDS for case_id in others):
            gains = {case_id: median_of_ratios(rates[case_id], own).estimate for case_id in others}
            found |= set(sorted(others, key=lambda c: -gains[c])[num_kept(len(challengers), left_share) :])
    return frozenset(found - {reference for _, reference in pairs})


def num_kept(challengers: int, left_share: float) -> int:
    """Count the challengers that are still measured with `left_share` of the time left."""
    early = max((left_share - FINAL_SHARE) / (1 - FINAL_SHARE), 0.0)
    return min(FINALISTS + math.ceil((challengers - FINALISTS) * early), challengers)
