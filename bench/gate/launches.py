"""Several launches of an interleaved comparison as one: every launch starts both sides anew.

The memory that a process happens to get makes it a percent or so faster or slower for as long as it lives,
and several percent without huge pages (bench/cluster/process.py; Kalibera and Jones, "Rigorous benchmarking
in reasonable time", 2013, measure the same for other programs), so rounds of one launch agree with each other
better than with those of the next. A comparison of two processes would call that a change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import scipy

from ddp_bench.bench.gate.runs import GateCase, GateRun
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.stats import Interval, median_interval, variance_between

LAUNCH = 1_000_000
"""Added to the rounds of every further launch, so that no two launches share a round."""


def merged(runs: Sequence[GateRun]) -> GateRun:
    """One side's launches as one run: their rounds side by side, the first manifest.

    A case that failed in any launch is a failed case; peak memory is the highest.
    """
    by_id: dict[str, list[GateCase]] = {}
    for run in runs:
        for case in run.cases:
            by_id.setdefault(case.case_id, []).append(case)
    return GateRun(runs[0].path, runs[0].manifest, tuple(_merged_case(cases) for cases in by_id.values()))


def _merged_case(cases: Sequence[GateCase]) -> GateCase:
    failed = [case for case in cases if not case.ok]
    if failed:
        return failed[0]
    memory = [case.peak_mem_mib for case in cases if case.peak_mem_mib is not None]
    return replace(
        cases[0],
        images_per_s=side_by_side([case.images_per_s for case in cases]),
        speedup=side_by_side([case.speedup for case in cases]),
        exposed_comm_ms=side_by_side([case.exposed_comm_ms for case in cases]),
        peak_mem_mib=max(memory, default=None),
    )


def side_by_side(launches: Sequence[ByRound]) -> ByRound:
    """The rounds of all launches as those of one, none of them alike in number."""
    return {i * LAUNCH + r: value for i, rounds in enumerate(launches) for r, value in rounds.items()}


def launch_ratio(
    numerator: Mapping[int, float], denominator: Mapping[int, float], *, confidence: float
) -> Interval:
    """Median of the within-round ratios of all launches."""
    rounds = numerator.keys() & denominator.keys()
    return launch_median({r: numerator[r] / denominator[r] for r in rounds}, confidence=confidence)


def launch_median(by_round: Mapping[int, float], *, confidence: float) -> Interval:
    """Median over the rounds of all launches; its interval holds the spread between launches too.

    The normal interval of that spread (`variance_between`) is added in quadrature to that of the rounds. Few
    launches know it roughly: where they differ by more than their rounds do, a 95% interval of three covers
    87%, of five 89% (simulated); `tests/benchmarks/gate_power.py` tests the gate as a whole.
    """
    pooled = median_interval([*by_round.values()], confidence=confidence)
    launches: dict[int, list[float]] = {}
    for r in sorted(by_round):
        launches.setdefault(r // LAUNCH, []).append(by_round[r])
    if len(launches) < 2 or math.isnan(pooled.low):
        return pooled
    between = variance_between([*launches.values()])
    beyond = float(scipy.stats.norm.ppf((1 + confidence) / 2)) ** 2 * between / len(launches)
    low = pooled.estimate - math.hypot(pooled.estimate - pooled.low, math.sqrt(beyond))
    high = pooled.estimate + math.hypot(pooled.high - pooled.estimate, math.sqrt(beyond))
    return Interval(pooled.estimate, low, high)


def typical_sides(numerator: ByRound, denominator: ByRound, ratio: float) -> tuple[float, float]:
    """Numerator and denominator of a typical round, whose quotient is `ratio`.

    Medians of the sides by themselves can contradict the median of the ratios within rounds. So the level
    that both share is estimated, the median of their geometric means, and divided by the ratio. Positive
    figures.
    """
    common = numerator.keys() & denominator.keys()
    level = statistics.median(math.sqrt(numerator[r]) * math.sqrt(denominator[r]) for r in common)
    return level * math.sqrt(ratio), level / math.sqrt(ratio)
