"""A change as the cells of a row, and as a sentence."""

from __future__ import annotations

import math
from functools import partial

from ..common.numbers import DASH, format_number, format_rate_unit
from ..common.text import escape_controls
from ..stats.interval import Interval
from .judge import Change

_MAX_PERCENT = 999
"""Farther ends are written so: a metric that may be anything."""


def format_row(c: Change) -> tuple[str, ...]:
    """One row of the table, of case, metric, baseline, candidate, change and verdict."""
    return (c.label, *format_amounts(c), format_change(c), c.verdict)


def format_amounts(c: Change) -> tuple[str, ...]:
    """Metric, baseline and candidate; the unit of a rate is its name."""
    if c.column is None:
        return "", "", ""
    written = c.column.written.format if c.column.written else partial(format_number, digits=4)
    both = ("" if value is None else written(value) for value in (c.baseline, c.candidate))
    return name_unit(c) if c.column.is_rate else c.column.label.removesuffix(" communication"), *both


def name_unit(c: Change) -> str:
    """Name the unit of both values; of a rate, what each of them counts."""
    if c.column is None:
        return ""
    return format_rate_unit("/".join(dict.fromkeys(c.units))) if c.column.is_rate else c.column.unit


def format_change(c: Change) -> str:
    """Format the candidate against the baseline: `-16% (-20 to -13)`; empty where they were not compared."""
    if c.ratio is None:
        return ""
    estimate, low, high = _format_percents(c.ratio, sign="+")
    if c.ratio.high - c.ratio.low > max(1.0, c.ratio.estimate):
        return f"{low} to {high}%"  # an estimate would say nothing
    return f"{estimate}%" if math.isnan(c.ratio.low) else f"{estimate}% ({low} to {high})"


def describe_size(c: Change) -> str:
    """Describe the change as a clause with its metric: `throughput of DDP on 2 GPUs changed by -1.3% (…)`."""
    if c.column is None or c.ratio is None:
        return describe_change(c)
    label = "steps/s" if c.column.is_rate and c.units[0] == "steps" else c.column.label
    return f"{label} of {c.name} changed by {format_change(c)}{' of the step' * bool(c.column.relative_to)}"


def describe_change(c: Change) -> str:
    """Describe the comparison without a full stop: `DDP on 2 GPUs is 16% slower (13\N{EN DASH}20)`."""
    if c.column is None or c.ratio is None:
        did = f"the candidate did not measure {c.name}" if c.metric is None else f"{c.name} was not compared"
        return f"{did} ({escape_controls(c.reason)})"
    is_rate, share = c.column.is_rate, "% of the step" if c.column.relative_to else "%"
    down, up = ("slower", "faster") if is_rate else ("lower", "higher")
    subject = c.name if is_rate else f"{c.column.label} of {c.name}"
    estimate, low, high = _format_percents(c.ratio)
    if c.ratio.low <= 1 <= c.ratio.high:
        return f"{subject} is between {low}{share} {down} and {high}{share} {up}"
    way, ends = (up, (low, high)) if c.ratio.estimate >= 1 else (down, (high, low))
    between = "" if math.isnan(c.ratio.low) else f" ({ends[0]}{DASH}{ends[1]})"
    return f"{subject} is {estimate}{share} {way}{between}"


def _format_percents(ratio: Interval, *, sign: str = "") -> list[str]:
    """Write how far estimate and ends lie from 1, in percent, with a sign where one is asked for."""
    found = ratio.shift(-1.0).scale(100)
    behind = 0 if found.high - found.low > 10 else 1
    ends = [round(end, behind) + 0.0 for end in (found.estimate, found.low, found.high)]  # never -0
    return [
        f">{_MAX_PERCENT}" if end > _MAX_PERCENT else f"{end if sign else abs(end):{sign}.{behind}f}"
        for end in ends
    ]
