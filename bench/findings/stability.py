"""Says whether a run's rounds can be trusted, and the next command where not, as pyperf's checks do.

Every check has a rate of false alarms that a test simulates, and says nothing of differences too small to
matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy

from ..cli import command, speaker
from ..results.aggregate import images_per_s_by_round, units_per_step
from ..results.case_result import CaseResult
from ..results.round_times import ByRound, RoundTimes
from .answers import by_compile_label, headline
from .cautions import Caution
from .numbers import per_second, plural, rate
from .wording import case_label

FALSE_ALARMS = 0.01
"""Share of runs with noise only in which a check speaks; those that test then alarm in at most 4%."""

MATTERS = 0.02
"""Change of pace, a share, below which nothing is said."""

FEWEST_ROUNDS = 5
FEWEST_FOR_LEVELS = 10

SCATTERED = 0.10
"""Of the rounds of a case about its median; the fit bounds what each of them does."""

SMALLEST_SHARE = 0.2
"""Smallest share of the figures that is a level; fewer that stand apart are outliers."""


def cautions(ok: Sequence[CaseResult], times: RoundTimes, *, target: float | None) -> list[Caution]:
    """Return what speaks against the measured cases `ok` of a run, one per kind.

    `target` is the half interval wanted, a fraction.
    """
    unit = ok[0].unit if ok else ""
    by_id = {case.case_id: case for case in ok}
    found = {
        by_id[case_id]: rates
        for case_id, by_round in images_per_s_by_round(times, units_per_step(ok)).items()
        if (rates := {r: rate for r, rate in by_round.items() if 0 < rate < math.inf})
    }
    if not found:
        return []
    paces = pace(found)
    drift, per_round = _drift(paces, unit)
    steady = {case: _without_drift(by_round, per_round) for case, by_round in found.items()}
    checks = (
        _few_rounds(found),
        _wide(ok, found, math.inf if target is None else target, unit),
        drift,
        _two_levels(steady, unit),
        _scatter({case: steady[case] for case in steady if case.case_id in answering(ok)}),
    )
    return [caution for caution in checks if caution is not None]


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


def _without_drift(by_round: ByRound, per_round: float) -> ByRound:
    middle = float(np.median(list(by_round)))
    return {r: value * math.exp(-per_round * (r - middle)) for r, value in by_round.items()}


def _few_rounds(found: Mapping[CaseResult, ByRound]) -> Caution | None:
    few = [case for case, by_round in found.items() if len(by_round) < FEWEST_ROUNDS]
    if not few:
        return None
    worst = min(few, key=lambda case: len(found[case]))
    return Caution(
        kind="few rounds",
        case_id=worst.case_id,
        text=f"{_of_cases(few, found)} fewer than {FEWEST_ROUNDS} rounds "
        f"({case_label(worst)}: {len(found[worst])}): intervals are wide, and drift or two levels could not "
        "be seen",
        advice=f"{speaker('run')} --rounds 10, or a longer --max-time",
    )


def _wide(
    ok: Sequence[CaseResult], found: Mapping[CaseResult, ByRound], target: float, unit: str
) -> Caution | None:
    known = {case: case.images_per_s.half_width for case in ok if case.images_per_s is not None}
    wide = [case for case, width in known.items() if width > target and case in found]
    if not wide:
        return None
    worst = max(wide, key=lambda case: known[case])
    needed = math.ceil(len(found[worst]) * (known[worst] / target) ** 2)
    return Caution(
        kind="wide intervals",
        case_id=worst.case_id,
        text=f"{_of_cases(wide, found)} {per_second(unit)} known less well than the target of "
        f"±{100 * target:g}% (at worst {case_label(worst)}: ±{100 * known[worst]:.1f}% "
        f"after {len(found[worst])} rounds)",
        advice=f"{speaker('run')} --rounds {needed}, or --max-time {(known[worst] / target) ** 2:.0f} "
        "times as long"
        if needed <= 1000
        else f"{command('doctor')}; at this noise more rounds alone will not do",
    )


def _drift(paces: ByRound, unit: str) -> tuple[Caution | None, float]:
    """Test the log pace for drift (Kendall); the slope (Theil-Sen) is per round, 0 without drift."""
    rounds, logs = np.array(list(paces), dtype=float), np.log(list(paces.values()))
    if len(rounds) <= FEWEST_ROUNDS or scipy.stats.kendalltau(rounds, logs).pvalue > FALSE_ALARMS:
        return None, 0.0
    slope, _, low, high = scipy.stats.theilslopes(logs, rounds)
    span = float(rounds[-1] - rounds[0])
    if abs(slope) * span < MATTERS:
        return None, 0.0
    change, *ends = (100 * math.expm1(s * span) for s in (float(slope), float(low), float(high)))
    return Caution(
        kind="drift",
        text=f"the pace of all cases changed by {change:+.1f}% [{ends[0]:+.1f}, {ends[1]:+.1f}] from round "
        f"{rounds[0]:.0f} to {rounds[-1]:.0f}; speed-up and efficiency are formed inside rounds and stand, "
        f"{per_second(unit)} and ms do not carry over to another run",
        advice=f"{command('doctor')} for the cause; compare versions with {speaker('gate')} --interleave",
    ), float(slope)


def _two_levels(found: Mapping[CaseResult, ByRound], unit: str) -> Caution | None:
    splits = {
        case: levels
        for case, by_round in found.items()
        if len(by_round) >= FEWEST_FOR_LEVELS and (levels := split_levels(list(by_round.values())))
    }
    if not splits:
        return None
    worst = max(splits, key=lambda case: splits[case].high / splits[case].low)
    levels = splits[worst]
    return Caution(
        kind="two levels",
        case_id=worst.case_id,
        text=f"{_of_cases(list(splits), found)} rounds at two speeds (at worst {case_label(worst)}: "
        f"{100 * levels.share_low:.0f}% of {len(found[worst])} rounds near "
        f"{rate(levels.low, unit, digits=4)}, the rest near {rate(levels.high, unit, digits=4)})",
        advice=f"{command('doctor')} names clocks, cores, other load; "
        f"compare with {speaker('gate')} --interleave",
    )


class Levels(NamedTuple):
    """Two groups of figures: the medians of both, and the share of the figures in the lower one."""

    low: float
    high: float
    share_low: float


def split_levels(values: Sequence[float]) -> Levels | None:
    """Split positive figures in two groups that stand apart; None where there is one.

    The best split of normal figures explains 2 / pi of their variance, of a few of them more by chance: not 1
    in 1,000 sets of ten and more goes beyond the limit here (simulated). On a log scale skewed noise splits
    less clearly, with heavy tails because each group must hold a fifth of the figures.
    """
    logs = np.sort(np.log(values))
    size = len(logs)
    fewest = math.ceil(SMALLEST_SHARE * size)
    within = {k: k * logs[:k].var() + (size - k) * logs[k:].var() for k in range(fewest, size - fewest + 1)}
    place = min(within, key=lambda k: within[k])
    low, high = math.exp(np.median(logs[:place])), math.exp(np.median(logs[place:]))
    limit = 2 / math.pi + 1.1 / math.sqrt(size)
    if within[place] >= (1 - limit) * size * logs.var() or high / low <= 1 + MATTERS:
        return None
    return Levels(low, high, place / size)


def _scatter(found: Mapping[CaseResult, ByRound]) -> Caution | None:
    """Say how far the rounds of the worst case lie from its median, a twentieth on either side left out."""
    logs = {c: np.log(list(b.values())) for c, b in found.items() if len(b) >= FEWEST_ROUNDS}
    beyond = {c: np.abs(np.quantile(x, (0.05, 0.95)) - np.median(x)).max() for c, x in logs.items()}
    worst = max(beyond, key=beyond.__getitem__, default=None)
    if worst is None or beyond[worst] <= SCATTERED:
        return None
    wide = [case for case, share in beyond.items() if share > SCATTERED]
    return Caution(
        kind="scattered rounds",
        case_id=worst.case_id,
        text=f"rounds scatter by {100 * math.expm1(beyond[worst]):.0f}% about the median "
        f"({case_label(worst)}; {plural(len(wide), 'case')} of {len(found)} by more than "
        f"{100 * SCATTERED:.0f}%)",
        advice=f"{command('doctor')} for what else runs; more --rounds, medians outvote single blocks",
    )


def _of_cases(some: Sequence[CaseResult], every: Mapping[CaseResult, ByRound]) -> str:
    have = "has" if len(some) == 1 else "have"
    return f"{len(some)} of {len(every)} {'case' if len(every) == 1 else 'cases'} {have}"
