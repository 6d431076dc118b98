"""Figures of two runs, or of the two sides of a gate, compared: see docs/gate.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from .interval import ONE_SIGMA, Estimate, Figures, Interval, median_interval
from .one_run import fit

QUARTERS = 4
"""Parts of a run whose medians tell how it changes by itself; fewer would miss a change there and back."""

LEAST_OF_QUARTER = 3
"""Rounds from which the error of their median can be told."""


def in_pairs(differences: Sequence[float] | Figures) -> Estimate:
    """What differences formed within rounds typically are, robustly, by the fit of a run.

    Of two columns that share their rounds, nothing but the differences counts.

    Args:
        differences: one per round, in the order of time, such as logarithms of ratios.
    """
    values = np.asarray(differences, dtype=float)
    found = fit(np.exp(np.column_stack([values, np.zeros(len(values))])))
    return found.estimate(lambda log_ms: log_ms[0] - log_ms[1], 0, 1)


def over_launches(found: Sequence[Estimate]) -> Estimate:
    """The mean of what each launch gave; what launches differ by is in its error, by Student's t.

    Of one launch its own estimate: its rounds cannot tell what another launch would add.
    """
    if len(found) == 1:
        return found[0]
    values = [one.value for one in found]
    return Estimate(
        statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1
    )


def with_change_of_runs(difference: Estimate, *rounds: Sequence[float] | Figures) -> Estimate:
    """Widen the difference of runs that did not take turns by how much each run changed within itself.

    A machine whose pace changes during a run is likely to have another between two. So the variance between
    the quarters of each run, beyond that of its rounds, counts once more, as that of where the whole run lay.
    Runs of fewer than three rounds in every quarter tell nothing of that, and widen nothing.

    Args:
        difference: with the error that the rounds give.
        rounds: of each run one figure per round, in their order and in the unit of the difference.
    """
    changed = [Estimate(0.0, math.sqrt(_change_within(np.asarray(one))), QUARTERS - 1) for one in rounds]
    return difference.minus(*changed)


def _change_within(rounds: Figures) -> float:
    """Variance between the quarters of a run beyond that of its rounds; 0 where it has too few.

    The estimate of DerSimonian and Laird, "Meta-analysis in clinical trials" (1986), with equal weights.
    """
    if rounds.size < LEAST_OF_QUARTER * QUARTERS:
        return 0.0
    quarters = np.array_split(rounds, QUARTERS)
    each = [median_interval(quarter.tolist(), confidence=ONE_SIGMA) for quarter in quarters]
    noise = statistics.fmean(((one.high - one.low) / 2) ** 2 for one in each)
    return max(statistics.variance([one.estimate for one in each]) - noise, 0.0)


def common_value(values: Sequence[Interval]) -> float:
    """The value that repeated measurements have in common: the mean of their logarithms, by their precision.

    Each counts by one over its variance, as in a meta-analysis of a fixed effect. Needs known intervals of
    positive values.
    """
    logs = [value.log() for value in values]
    weights = [(one.high - one.low) ** -2 for one in logs]
    return math.exp(sum(w * one.estimate for w, one in zip(weights, logs, strict=True)) / sum(weights))
