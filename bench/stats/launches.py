"""What each launch of the workers does to the cases of a run: a shift that no number of rounds averages out.

Cases of one group, such as all of DDP on two devices, are shifted alike. docs/measuring.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy

Array = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]

LEAST_VISITS = 5
"""Of a group in every launch: fewer tell nothing of how far launches lie apart."""

LEAST_OF_KNOWN = 0.25
"""Of the variance known beforehand: that the launches of one run agree may be chance."""


@dataclass(frozen=True)
class Launches:
    """Which launch measured a round, and which columns one launch shifts alike."""

    of_round: Sequence[int]
    of_column: Sequence[int]
    """The group of each column, from 0."""
    times_usual: Sequence[float] = ()
    """By group how many times the usual its shifts are; all as usual where it is empty."""
    known: float = 0.0
    """Standard deviation of a usual shift, of logarithms, known beforehand."""
    known_freedom: float = 0.0
    """Degrees of freedom with which it is known; with 0 only several launches of this run tell it."""

    def influence(self, residual: Array, seen: Marks) -> tuple[Array, float]:
        """What the shift of each group in each launch, by its standard deviation, does to a column.

        Args:
            residual: of the fit, rounds x columns, log step times.
            seen: where there was a visit.

        Returns:
            (launches x groups) x columns, and the degrees of freedom of the standard deviation.
        """
        deviation, freedom = self._deviation(residual, seen)
        of_round, of_column = np.array(self.of_round), np.array(self.of_column)
        visits = seen.sum(axis=0)
        share = np.array([seen[of_round == one].sum(axis=0) for one in np.unique(of_round)]) / np.maximum(
            visits, 1
        )
        own = np.array([of_column == one for one in np.unique(of_column)])
        shifted = (share[:, None, :] * own).reshape(-1, len(visits))
        result: Array = deviation * self._times(of_column) * shifted
        return result, freedom

    def _times(self, groups: npt.NDArray[np.int64]) -> Array:
        return np.array(self.times_usual)[groups] if self.times_usual else np.ones(len(groups))

    def _deviation(self, residual: Array, seen: Marks) -> tuple[float, float]:
        """Standard deviation of a usual shift, and its degrees of freedom.

        The medians of the residuals of each group and launch vary by it and by the noise of their rounds (the
        estimate of DerSimonian and Laird, 1986, in a table of two ways). It is pooled with what is known.
        """
        of_round, of_column = np.array(self.of_round), np.array(self.of_column)
        groups, launches = np.unique(of_column), np.unique(of_round)
        cells = [[(of_round == one)[:, None] & (of_column == g) & seen for g in groups] for one in launches]
        enough = [g for g in range(len(groups)) if min(row[g].sum() for row in cells) >= LEAST_VISITS]
        freedom = (len(enough) - 1) * (len(launches) - 1)
        total, weight = self.known_freedom * self.known**2, self.known_freedom
        if freedom > 0:
            each = [[residual[row[g]] for g in enough] for row in cells]
            medians = np.array([[np.median(values) for values in row] for row in each])
            noise = np.array([[_median_variance(values) for values in row] for row in each])
            precision = self._times(groups[enough]) ** -2
            apart = medians - medians.mean(axis=0)
            apart = apart - np.average(apart, axis=1, weights=precision, keepdims=True)
            excess = float((precision * apart**2).sum()) - freedom * float((precision * noise).mean())
            total, weight = total + excess, weight + freedom
        variance = max(total / weight if weight else 0.0, LEAST_OF_KNOWN * self.known**2)
        return math.sqrt(variance), max(weight, 1.0)


def _median_variance(values: Array) -> float:
    """Of the median of normal values, from their median absolute deviation."""
    scale = float(scipy.stats.median_abs_deviation(values, scale="normal"))
    return math.pi / 2 * scale**2 / len(values)
