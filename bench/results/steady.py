"""What a case did while it trained without a pause: its steady rate, and how it came to it."""

from __future__ import annotations

import math
from statistics import fmean

from ddp_bench.bench.estimate import SeriesNoise
from ddp_bench.bench.results.round_times import CaseTimes
from ddp_bench.bench.stats import Interval

EARLY, LATE = 0.1, 0.5
"""A case is fresh up to the one share of its time, steady from the other on: 2 and 10 of 20 blocks."""


def steady(times: CaseTimes, units: int) -> dict[str, Interval]:
    """The columns that `sustained` blocks give; none before they have a second half; `units` per step.

    Blocks in a row resemble each other, which widens the intervals. Those of the first tenth are few: they
    are taken to scatter as the later ones do.
    """
    early, late = _parts(times)
    if not late:
        return {}
    noise, level = SeriesNoise.of(late), fmean(late)
    step_ms = noise.interval(level, len(late)).exp()
    gain = noise.interval(fmean(early) - level, len(early), len(late)).exp()
    low, change, high = (100 * (end - 1) for end in (gain.low, gain.estimate, gain.high))
    return {
        "steady_images_per_s": step_ms.inverted(units * 1000),
        "steady_change_pct": Interval(change, low, high),
    }


def _parts(times: CaseTimes) -> tuple[list[float], list[float]]:
    """Log ms per step of the blocks of the first tenth of the time, at least one, and of the last half."""
    total_ms, passed_ms = sum(times.sustained_ms.values()), 0.0
    early: list[float] = []
    late: list[float] = []
    for number, block_ms in sorted(times.sustained_ms.items()):
        middle = (passed_ms + block_ms / 2) / total_ms
        passed_ms += block_ms
        log_ms = math.log(times.step_ms["sustained"][number])
        if not early or middle < EARLY:
            early.append(log_ms)
        if middle > LATE:
            late.append(log_ms)
    return early, late
