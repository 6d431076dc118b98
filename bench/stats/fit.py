"""One estimate for every number of a run: log(step time) = case + round, fitted robustly, with intervals.

The fit is Huber's. A round's effect is common to the cases visited in it; every column (a case, or a phase of
a case) has one location. Every rate, speed-up, efficiency and comparison is formed of the same fitted
numbers, so quotients agree exactly. Errors come from each round's influence on the fit. Neighbouring rounds
resemble each other: their lag-1 correlation is estimated, taken a little larger than found, and widens the
error and lowers Student's degrees of freedom as an AR(1) series does. What another launch of the workers
would add is not in it. `docs/measuring.md` has the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .interval import SIGMA_OF_MAD, Estimate, Figures, Interval

Array = npt.NDArray[np.float64]
Function = Callable[[Array], float]
"""Something smooth of some columns' log step times, such as `lambda log_ms: log_ms[0] - log_ms[1]`."""

MIN_ROUNDS = 5
"""Fewer visits of a column give it no interval."""
_TUNING = 1.345
"""Huber's: 95% of the mean's efficiency under normal noise."""
_SCALE_PRIOR = 10
"""A column's own noise scale counts as its visits, that of all columns as so many."""
_MIN_SCALE = 0.01
"""Least noise of a column, in mean absolute residuals: no column is taken to be exact."""
_CAUTION = 1.0
"""Standard errors by which a correlation is taken larger than estimated."""
_ROUND_PRIOR, _ROUND_PRIOR_WEIGHT = 0.5, 10
"""Lag-1 correlation of round effects in recorded runs (0.1 to 0.7), and how many rounds it counts as."""


@dataclass(frozen=True)
class TwoWayFit:
    """Fitted columns, and each round's influence on them (rounds x columns; their sum over rounds is 0)."""

    log_ms: Array
    """Per column: the typical log step time, averaged over the rounds' effects. NaN without a visit."""
    case_influence: Array
    """Part of the influence that comes of single visits; what a quotient has."""
    round_influence: Array
    """Per round: the same shift for every column; only a column's own rate has it."""
    visits: npt.NDArray[np.int64]
    case_correlation: float
    round_correlation: float

    def estimate(self, function: Function, *columns: int) -> Estimate:
        """Estimate `function` of the log ms of these columns, with its gradient by central differences."""
        at, step = self.log_ms[[*columns]], 1e-5
        distinct, places = np.unique(columns, return_inverse=True)
        gradient = np.zeros(len(distinct))
        for shift, place in zip(step * np.eye(len(columns)), places, strict=True):
            gradient[place] += np.nan_to_num((function(at + shift) - function(at - shift)) / (2 * step))
        gradient[np.abs(gradient) < 1e-9 * np.abs(gradient).max()] = 0
        return Estimate(float(function(at)), *self._compute_error(distinct, gradient))

    def _compute_error(self, columns: npt.NDArray[np.int64], gradient: Array) -> tuple[float, float]:
        """Compute standard error and degrees of freedom of a function with this gradient by `columns`."""
        rounds, level = len(self.round_influence), float(gradient.sum())
        visits = int(self.visits[columns[gradient != 0]].min(initial=rounds))
        case_factor, case_freedom = _compute_ar1_variance(self.case_correlation, visits)
        round_factor, round_freedom = _compute_ar1_variance(self.round_correlation, rounds)
        if abs(level) < 1e-6:  # a quotient: the rounds cancel
            level = 0.0
        of_case = math.sqrt(case_factor) * (self.case_influence[:, columns] @ gradient)
        of_round = math.sqrt(round_factor) * level * self.round_influence
        variance = ((of_case + of_round) ** 2).sum() * visits / max(visits - 1, 1)
        shares = (of_case**2).sum(), (of_round**2).sum()
        spread = shares[0] ** 2 / case_freedom + shares[1] ** 2 / round_freedom
        freedom = sum(shares) ** 2 / spread if spread > 0 else case_freedom
        error = math.sqrt(variance) if visits >= MIN_ROUNDS else math.nan
        return error, max(float(freedom), 1.0)


def fit_two_way(step_ms: Array) -> TwoWayFit:
    """Fit rounds x columns of step times in ms, in the order of time; NaN where a round has no visit.

    Columns that share no round, also through others, cannot be compared: the largest group that is connected
    is fitted, and others are as without a visit.
    """
    from scipy.sparse import coo_array  # takes half a second, and not all who load a run fit
    from scipy.sparse.csgraph import connected_components

    x, num_columns = np.log(step_ms), step_ms.shape[1]
    seen = np.isfinite(x)
    rounds, columns = np.nonzero(seen)
    visited = coo_array((np.ones(len(rounds)), (columns, num_columns + rounds)), shape=(sum(x.shape),) * 2)
    group = connected_components(visited, directed=False)[1]
    used = np.flatnonzero(seen.any(axis=0))
    used = used[group[used] == np.bincount(group[used]).argmax()]
    x = x[seen[:, used].any(axis=1)][:, used]
    seen = np.isfinite(x)
    visits = seen.sum(axis=0)
    location, effect, scale = _start(x, seen)
    for _ in range(100):
        effect = _compute_weighted_mean(x - location, effect[:, None], scale, axis=1)
        before, location = location, _compute_weighted_mean(x - effect[:, None], location, scale, axis=0)
        if np.abs(location - before).max() < 1e-9:
            break
    residual = np.where(seen, x - location - effect[:, None], 0.0)
    # Steepness of Huber's function per column, not per visit: an outlier must not make a round weightless.
    inside = (seen & (np.abs(residual) <= _TUNING * scale)).sum(axis=0) / visits
    steep = np.maximum(inside, 0.1) / scale**2
    local = np.where(seen, steep, 0.0)
    share = local.sum(axis=1) / steep.sum()  # a round with few visits counts less
    level = float((share * effect).sum() / share.sum())
    score = np.clip(residual / scale, -_TUNING, _TUNING) / scale
    score = score - local / local.sum(axis=1, keepdims=True) * score.sum(axis=1, keepdims=True)
    of_case = _solve(local, steep, score)
    of_round = share * (effect - level) / share.sum()
    of_rounds = of_round[:, None]
    case_influence = np.zeros((len(x), num_columns))
    case_influence[:, used] = of_case
    log_ms, all_visits = np.full(num_columns, math.nan), np.zeros(num_columns, dtype=np.int64)
    log_ms[used], all_visits[used] = location + level, visits
    return TwoWayFit(
        log_ms=log_ms,
        case_influence=case_influence,
        round_influence=of_round,
        visits=all_visits,
        case_correlation=_estimate_correlation(of_case, seen, pooled=max(len(used) - 1, 1)),
        round_correlation=_estimate_correlation(
            of_rounds, np.isfinite(of_rounds), prior=_ROUND_PRIOR, prior_weight=_ROUND_PRIOR_WEIGHT
        ),
    )


def _solve(local: Array, steep: Array, score: Array) -> Array:
    """Solve the columns' normal equations, without the effects of rounds, for each row of `score`.

    The matrix is a diagonal and a part of the rank of the rounds: its smaller side is solved (Woodbury).
    """
    own: Array = local.sum(axis=0)
    left = np.vstack([-local / local.sum(axis=1, keepdims=True), np.full_like(own, np.mean(steep))])
    right = np.vstack([local, own / steep.sum()])
    if len(right) >= len(own):
        whole: Array = np.linalg.solve(np.diag(own) + left.T @ right, score.T)
        return whole.T
    scaled = score / own
    part: Array = np.linalg.solve(np.eye(len(right)) + (right / own) @ left.T, right @ scaled.T).T @ left
    return scaled - part / own


def _start(x: Array, seen: npt.NDArray[np.bool_]) -> tuple[Array, Array, Array]:
    location, effect = _compute_median(x, axis=0), np.zeros(len(x))
    for _ in range(3):
        effect = _compute_median(x - location, axis=1)
        location = _compute_median(x - effect[:, None], axis=0)
    absolute = np.abs(x - location - effect[:, None])
    rows, columns = x.shape
    loss = math.sqrt(rows * columns / (max(rows - 1, 1) * max(columns - 1, 1)))
    own = SIGMA_OF_MAD * loss * _compute_median(absolute, axis=0)
    common = SIGMA_OF_MAD * loss * float(_compute_median(absolute.ravel(), axis=0))
    visits = seen.sum(axis=0)
    scale = np.sqrt((visits * own**2 + _SCALE_PRIOR * common**2) / (visits + _SCALE_PRIOR))
    # In a table of three rounds most residuals may be 0, and so their median.
    return location, effect, np.maximum(scale, max(_MIN_SCALE * float(np.nanmean(absolute)), 1e-6))


def _compute_median(values: Array, *, axis: int) -> Array:
    """Compute the median of the values that are seen, ten times as fast as np.nanmedian on few rounds."""
    ordered = np.sort(values, axis=axis)  # NaN comes last
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    low, high = (np.take_along_axis(ordered, place, axis) for place in ((count - 1) // 2, count // 2))
    middle: Array = ((low + high) / 2).squeeze(axis)
    return middle


def _compute_weighted_mean(values: Array, centre: Array, scale: Array, *, axis: int) -> Array:
    """Compute the mean of the values that are seen, by Huber's weights of their distances from `centre`."""
    seen = np.isfinite(values)
    size = np.abs(np.where(seen, values - centre, 0.0)) / scale
    weight = np.where(seen, np.minimum(1.0, _TUNING / np.maximum(size, 1e-12)) / scale**2, 0.0)
    result: Array = (weight * np.where(seen, values, 0.0)).sum(axis=axis) / weight.sum(axis=axis)
    return result


def _estimate_correlation(
    series: Array,
    seen: npt.NDArray[np.bool_],
    *,
    pooled: int = 1,
    prior: float = 0.0,
    prior_weight: float = 0.0,
) -> float:
    """Lag-1 correlation, mean over columns, corrected for bias on short series, plus some standard errors."""
    num_rounds = len(series)
    if num_rounds <= 3:
        return prior
    centred = np.where(seen, series - series.sum(axis=0) / seen.sum(axis=0), 0.0)
    power = (centred**2).sum(axis=0) / seen.sum(axis=0)
    pairs = (seen[1:] & seen[:-1]).sum(axis=0)
    known = (power > 0) & (pairs >= 3)
    if not known.any():
        return prior
    products = (centred[1:] * centred[:-1]).sum(axis=0)[known] / power[known]
    # Divided by the visits, not by the pairs: the correction is for that.
    lag = products / (pairs[known] + 1)
    # A column that is seldom visited says little.
    found = float((lag * pairs[known]).sum() / pairs[known].sum())
    found = (num_rounds * found + 1) / (num_rounds - 3)
    found = (num_rounds * found + prior_weight * prior) / (num_rounds + prior_weight)
    found = min(max(found, 0.0), 0.95)
    error = math.sqrt((1 - found**2) / (num_rounds + prior_weight) / pooled)
    return min(found + _CAUTION * error, 0.95)


def _compute_ar1_variance(correlation: float, n: int) -> tuple[float, float]:
    """For n values of an AR(1) series: variance of their mean over the usual estimate of it, and freedom."""
    if n < 2:
        return 1.0, 1.0
    rows = _sum_rows(correlation, n)
    total, squares = float(rows.sum()), float(_sum_rows(correlation**2, n).sum())
    expected = n - total / n  # of the sum of squares about the mean
    spread = squares - 2 / n * float((rows**2).sum()) + (total / n) ** 2
    return total / n / (expected / (n - 1)), expected**2 / spread


def _sum_rows(ratio: float, n: int) -> Array:
    """Return sums of the rows of the n x n matrix of `ratio` to the power of |i - j|."""
    place = np.arange(n)
    sums: Array = (1 + ratio - ratio ** (place + 1.0) - ratio ** (n - place + 0.0)) / (1 - ratio)
    return sums


Column = tuple[str, str]
"""A case id and a phase."""

FITTED_PHASES = ("timed", "no_sync", "comm")
"""Phases whose step times are compared with each other."""

UNKNOWN_ESTIMATE = Estimate(math.nan, math.nan, 1.0)


class FittedSteps:
    """Fitted step times, in ms, of cases and phases that were visited in common rounds."""

    def __init__(self, step_ms: Mapping[Column, Mapping[int, float]]) -> None:
        rounds = sorted({r for by_round in step_ms.values() for r in by_round})
        table = [[by_round.get(r, math.nan) for by_round in step_ms.values()] for r in rounds]
        self._fit = fit_two_way(np.array(table)) if rounds else None
        self._rounds = {
            case_id: len(found) for (case_id, phase), found in step_ms.items() if phase == "timed"
        }
        self._places = {column: place for place, column in enumerate(step_ms)}

    def has(self, *columns: Column) -> bool:
        """Tell whether all of these were measured, in rounds that connect them."""
        visits = () if self._fit is None else self._fit.visits
        return all(column in self._places and visits[self._places[column]] for column in columns)

    def count_rounds(self, case_id: str) -> int:
        """Count timed rounds of a case."""
        return self._rounds.get(case_id, 0)

    def estimate_ratios(self, pairs: Sequence[tuple[str, str]]) -> list[Interval]:
        """Step time of each pair's first case over the second's; all hold at once with 95% (Bonferroni)."""
        steps = ([(case_id, "timed") for case_id in pair] for pair in pairs)
        found = (self.estimate(lambda log_step: log_step[0] - log_step[1], *columns) for columns in steps)
        return [one.compute_interval(1 - 0.05 / len(pairs)).exponentiate() for one in found]

    def estimate_total(self, weights: Mapping[Column, float]) -> Estimate:
        """Add up steps by their weights, in ms; what rounds have in common cancels."""
        factors = np.array([*weights.values()])
        return self.estimate(lambda log_ms: float(factors @ np.exp(log_ms)), *weights)

    def estimate(self, function: Function, *columns: Column) -> Estimate:
        """Estimate a function of the log ms of some columns; unknown if none is given or one lacks values."""
        if self._fit is None or not columns or not self.has(*columns):
            return UNKNOWN_ESTIMATE
        return self._fit.estimate(function, *(self._places[column] for column in columns))


def estimate_difference(differences: Sequence[float] | Figures) -> Estimate:
    """Estimate the typical of differences, one per round in the order of time, robustly, by a run's fit.

    They are such as logarithms of ratios. Of columns that share their rounds nothing else counts.
    """
    values = np.asarray(differences, dtype=float)
    found = fit_two_way(np.exp(np.column_stack([values, np.zeros(len(values))])))
    return found.estimate(lambda log_ms: log_ms[0] - log_ms[1], 0, 1)
