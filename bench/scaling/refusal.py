"""Refuses predictions that are too wide to be shown, and says why and what would help."""

from __future__ import annotations

import math

from ddp_bench.bench.cli import command, speaker
from ddp_bench.bench.stats import Interval

MOST_HALF_WIDTH = 0.5
"""A figure whose 95% half-width is a larger share of its value says its order of magnitude at most."""

MUCH_OF_STEP = 0.2
"""Share of a predicted step from which on what is extrapolated in it is pointed out."""

LITTLE_OF_STEP = 0.05
"""An exposed communication that is known to this share of the step is known well enough, however small."""

MOST_TIMES = 30.0
"""Calibrating that many times as long is not proposed: a quieter machine helps more."""


def is_refused(*figures: Interval) -> bool:
    """Whether one of the figures is too wide to be shown."""
    return width_of(*figures) > MOST_HALF_WIDTH


def width_of(*figures: Interval) -> float:
    """The widest half interval over its value; infinite where one is unbounded or its value 0."""
    return max(_half_width(figure) for figure in figures)


def is_exposed_refused(exposed_ms: Interval, step_ms: Interval) -> bool:
    """Whether exposed communication is known neither to half its value nor to a small share of the step."""
    half_ms = (exposed_ms.high - exposed_ms.low) / 2
    return is_refused(exposed_ms) and not half_ms <= LITTLE_OF_STEP * step_ms.estimate


def refusal(width: float, *more: str) -> str:
    """Say why a prediction is not shown, of this half-width over its value; `more` adds to it."""
    size = f"±{100 * width:,.0f}%" if width < 100 else "unbounded"
    return "; ".join([f"not predicted: the interval would be {size}", *filter(None, more)])


def extrapolation(extrapolated_ms: float, step_ms: float) -> str:
    """Say what of a step is rank spread beyond the ranks that were calibrated; empty below a fifth of it."""
    if extrapolated_ms <= MUCH_OF_STEP * step_ms:
        return ""
    return f"{extrapolated_ms:,.0f} ms of {step_ms:,.0f} ms are extrapolated rank spread"


def remedy(width: float, *, error_pct: float) -> str:
    """Say what would narrow an interval of this half-width, which goes as 1 / sqrt(rounds).

    `error_pct` is the model's error that the interval holds.
    """
    if error_pct / 100 > MOST_HALF_WIDTH:
        off = f"the simulation was off by up to {error_pct:.0f}% on held-out cases"
        return f"{off}; calibrate on a quieter machine"
    times = (min(width, 1e9) / MOST_HALF_WIDTH) ** 2
    if times > MOST_TIMES:
        return f"calibrate on a quieter machine; {command('doctor')} says what disturbs it"
    return f"calibrate longer with {speaker('run')} --calibrate, {times:.1f} times the --max-time or --rounds"


def _half_width(figure: Interval) -> float:
    if not (math.isfinite(figure.low) and math.isfinite(figure.high)):
        return math.inf
    if figure.estimate <= 0:
        return math.inf if figure.high > 0 else 0.0
    return figure.half_width
