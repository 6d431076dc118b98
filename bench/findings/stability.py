"""Says whether a run's rounds can be trusted, and the next command where not, as pyperf's checks do.

No check speaks of differences too small to matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy

from ..common.cli import command, speaker
from ..common.numbers import per_second, plural
from ..results.aggregate import images_per_s_by_round, units_per_step
from ..results.case_result import CaseResult
from ..results.round_times import ByRound, RoundTimes
from ..stats.interval import Interval
from .answers import by_compile_label, headline
from .cautions import Caution
from .wording import case_label

FALSE_ALARMS = 0.01
"""Share of runs with noise only in which drift is told."""

MATTERS = 0.02
"""Change of pace, a share, below which nothing is said."""

FEWEST_ROUNDS = 5

SCATTERED = 0.10
"""Of the rounds of a case about its median; the fit bounds what each of them does."""


def cautions(ok: Sequence[CaseResult], times: RoundTimes) -> Iterator[Caution]:
    """Yield what the rounds say against the measured cases `ok` of a run, one per kind."""
    by_id = {case.case_id: case for case in ok}
    found = {
        by_id[case_id]: rates
        for case_id, by_round in images_per_s_by_round(times, units_per_step(ok)).items()
        if (rates := {r: rate for r, rate in by_round.items() if 0 < rate < math.inf})
    }
    if not found:
        return
    fewest = min(found, key=lambda case: len(found[case]))
    if (num_rounds := len(found[fewest])) < FEWEST_ROUNDS:
        num_few = sum(len(by_round) < FEWEST_ROUNDS for by_round in found.values())
        yield Caution(
            kind="few rounds",
            case_id=fewest.case_id,
            text=f"{plural(num_few, 'case')} of {len(found)} with fewer than {FEWEST_ROUNDS} rounds "
            f"({case_label(fewest)}: {num_rounds}): intervals are wide, and drift could not be seen",
            advice=f"{speaker('run')} --rounds 10, or a longer --max-time",
        )
    paces = pace(found)
    per_round = 0.0
    if (change := _drift(paces)) is not None:
        per_round, first, last = change.estimate, min(paces), max(paces)
        slopes = per_round, change.low, change.high
        percent, low, high = (100 * math.expm1(slope * (last - first)) for slope in slopes)
        yield Caution(
            kind="drift",
            short=f"the machine became {abs(percent):.0f}% {'faster' if percent > 0 else 'slower'} during it",
            text=f"the pace of all cases changed by {percent:+.1f}% [{low:+.1f}, {high:+.1f}] from round "
            f"{first} to {last}; speed-up and efficiency are formed inside rounds and stand, "
            f"{per_second(ok[0].unit)} and ms do not carry over to another run",
            advice=f"{command('doctor')} for the cause; compare versions with {speaker('gate')} --interleave",
        )
    answers = answering(ok)
    beyond = {
        case: _scatter(by_round, per_round)
        for case, by_round in found.items()
        if case.case_id in answers and len(by_round) >= FEWEST_ROUNDS
    }
    worst = max(beyond, key=beyond.__getitem__, default=None)
    if worst is not None and beyond[worst] > SCATTERED:
        num_wide = sum(share > SCATTERED for share in beyond.values())
        size = f"{math.expm1(beyond[worst]):.0%}"
        yield Caution(
            kind="scattered rounds",
            case_id=worst.case_id,
            short=f"rounds that vary by up to {size}",
            text=f"rounds scatter by {size} about the median "
            f"({case_label(worst)}; {plural(num_wide, 'case')} of {len(beyond)} by more than "
            f"{100 * SCATTERED:.0f}%)",
            advice=f"{command('doctor')} for what else runs; more --rounds, medians outvote single blocks",
        )


def answering(ok: Sequence[CaseResult]) -> set[str]:
    """The cases that answers rest on, with `single`; none where nothing is compared."""
    found = {case.case_id for _, group in by_compile_label(ok) for case in headline(group)}
    return found and found | {case.case_id for case in ok if case.mode == "single"}


def pace(found: Mapping[Any, ByRound]) -> ByRound:
    """Return, for every round, the median over its cases of throughput over the case's own median."""
    relative: dict[int, list[float]] = {}
    for by_round in found.values():
        usual = float(np.median(list(by_round.values())))
        for r, value in by_round.items():
            relative.setdefault(r, []).append(value / usual)
    # A round broken off by the time limit holds few cases, and the first of them are no sample.
    whole = max(map(len, relative.values()))
    return {r: float(np.median(v)) for r, v in sorted(relative.items()) if 2 * len(v) >= whole}


def _drift(paces: ByRound) -> Interval | None:
    """Test the log pace for drift (Kendall); its slope per round (Theil-Sen), None without drift."""
    rounds, logs = np.array(list(paces), dtype=float), np.log(list(paces.values()))
    if len(rounds) <= FEWEST_ROUNDS or scipy.stats.kendalltau(rounds, logs).pvalue > FALSE_ALARMS:
        return None
    slope, _, low, high = map(float, scipy.stats.theilslopes(logs, rounds))
    return None if abs(slope) * (rounds[-1] - rounds[0]) < MATTERS else Interval(slope, low, high)


def _scatter(by_round: ByRound, per_round: float) -> float:
    """How far rounds lie from their median without drift, in logs; a twentieth on either side is left out."""
    logs = np.log(list(by_round.values())) - per_round * np.array(list(by_round))
    return float(np.abs(np.quantile(logs, (0.05, 0.95)) - np.median(logs)).max())
