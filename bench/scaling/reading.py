"""One figure from a calibration's samples, as a simulated step takes them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from bench.scaling.calibration import Calibration, Samples
from bench.scaling.timeline import Compute, Slowdown

Value = Callable[[Samples], float]
"""What stands for the rounds: their median, or that of a resample."""


def compute(calibration: Calibration, value: Value = median) -> Compute:
    """What a typical rank does by itself in a step of one micro-batch."""
    return Compute(
        before_ms=value(calibration.forward_ms) + value(calibration.data_ms),
        backward_ms=value(calibration.backward_ms),
        after_ms=value(calibration.optimizer_ms),
    )


def slowdown(calibration: Calibration, value: Value = median) -> Slowdown:
    """How many times as long compute and communication take beside each other."""
    return Slowdown(compute=value(calibration.compute_slowdown), comm=value(calibration.comm_slowdown))
