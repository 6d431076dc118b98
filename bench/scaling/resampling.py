"""Intervals from resampled inputs, widened for few rounds and for the model's own error. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy

from bench.scaling.calibration import Calibration, Samples
from bench.stats import Interval


def resampled(samples: Samples, rng: np.random.Generator | None) -> Samples:
    """As many figures drawn with replacement; without `rng` the figures themselves."""
    if rng is None or len(samples) < 2:
        return samples
    return tuple(rng.choice(samples, len(samples)))


def widening(calibration: Calibration) -> float:
    """Hesterberg's factor for few rounds, as in `bench.stats.median_interval`."""
    rounds = min((len(s) for s in (calibration.backward_ms, calibration.forward_ms) if len(s) > 1), default=0)
    if not rounds:
        return 1.0
    factor = scipy.stats.t.ppf(0.975, rounds - 1) / scipy.stats.norm.ppf(0.975)
    return float(factor * math.sqrt(rounds / (rounds - 1)))


def interval(estimate: float, draws: Sequence[float], wider: float, error: float) -> Interval:
    """The 95% interval of `draws` about `estimate`.

    Args:
        estimate: from the figures themselves.
        draws: from resamples of them; none leaves only the error.
        wider: factor for few rounds, on the logarithm.
        error: of the model, as a share, added in quadrature.
    """
    low, high = np.quantile(draws, (0.025, 0.975)) if draws else (estimate, estimate)
    if estimate <= 0:
        return Interval(estimate, min(float(low), estimate), max(float(high), estimate))
    below = math.log(estimate / min(float(low), estimate)) * wider if low > 0 else math.inf
    above = math.log(max(float(high), estimate) / estimate) * wider
    model = math.log1p(error)
    return Interval(
        estimate,
        estimate * math.exp(-math.hypot(below, model)),
        estimate * math.exp(math.hypot(above, model)),
    )
