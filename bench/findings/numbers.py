"""Writes numbers with units and intervals, for the terminal and for the page."""

from __future__ import annotations

import math
from typing import Any

from ddp_bench.bench.stats import Interval

MIB = 2**20
TIMES = "\N{MULTIPLICATION SIGN}"

_WHOLE_DIGITS = 4
"""Significant digits of a number with an interval; more are noise, and hard to read."""


def finite(value: Any) -> float | None:
    """Return the number in a cell; None where it is missing, not a number or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def number(value: float | None, digits: int = 3, *, largest: float | None = None) -> str:
    """Write `digits` significant digits, of `largest` if given, and `,` at thousands; empty when missing."""
    if value is None:
        return ""
    size = abs(value if largest is None else largest)
    return f"{value:,.{max(digits - 1 - math.floor(math.log10(size)), 0) if size else 0}f}"


def quantity(value: float | None, unit: str, digits: int = 3) -> str:
    """Write `12.3 ms`; empty when missing."""
    return "" if value is None else _with_unit(number(value, digits), unit)


def short(value: float, digits: int = 4) -> str:
    """Write at most `digits` significant digits, never as a power of ten: `41,090`, `0.5`."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def with_interval(value: Interval | None, unit: str = "", factor: float = 1.0, *, digits: int = 3) -> str:
    """Write `70.1 (69.2\N{EN DASH}70.9) ms` of `value` times `factor`; only the value without an interval.

    `digits` are those of the largest of the three; whole numbers have four, larger ones are rounded to them.
    """
    if value is None:
        return ""
    scaled = value.scaled(factor)
    three = (scaled.estimate, scaled.low, scaled.high)
    known = three if all(map(math.isfinite, three)) else three[:1]
    largest = max(map(abs, known))
    shown, *ends = (_rounded(value, digits, largest) for value in known)
    return _with_unit(f"{shown} {_span(*ends)}" if ends else shown, unit)


def _rounded(value: float, digits: int, largest: float) -> str:
    beyond = math.floor(math.log10(largest)) + 1 - _WHOLE_DIGITS if largest else 0
    return number(round(value, -beyond) if beyond > 0 else value, digits, largest=largest)


def rate(value: Interval | float | None, unit: str, *, digits: int = 3) -> str:
    """Write a rate with its interval: `41,090 (40,180\N{EN DASH}41,990) tokens/s`; empty when missing.

    `unit` is what it counts. See `with_interval` for `digits`.
    """
    found = Interval(value, math.nan, math.nan) if isinstance(value, int | float) else value
    return with_interval(found, per_second(unit), digits=digits)


def per_second(unit: str) -> str:
    """Write the unit of a rate, for a heading or an axis: `tokens/s`."""
    return f"{unit}/s"


def singular(noun: str) -> str:
    """Return a regular plural in the singular: `image`, `query`, `box`."""
    if noun.endswith("ies"):
        return f"{noun[:-3]}y"
    return noun[:-2] if noun.endswith(("xes", "ches", "shes", "sses")) else noun.removesuffix("s")


def times(ratio: float) -> str:
    """Write a ratio: `1.31\N{MULTIPLICATION SIGN}`."""
    return f"{ratio:.2f}{TIMES}"


def between(found: Interval, digits: int = 2) -> str:
    """Write an interval in parentheses, or that there are too few rounds for one."""
    if math.isnan(found.low):
        return "(too few rounds for an interval)"
    return _span(f"{found.low:.{digits}f}", f"{found.high:.{digits}f}")


def _span(low: str, high: str) -> str:
    """Write the ends of an interval; a dash before a minus sign could not be read."""
    joint = " to " if "-" in f"{low}{high}" else "\N{EN DASH}"
    return f"({low}{joint}{high})"


def percent(share: Interval) -> str:
    """Write a fraction in percent with its interval, where that is known."""
    written = f"{100 * share.estimate:.0f}%"
    return written if math.isnan(share.low) else f"{written} {between(share.scaled(100), 0)}"


def count(value: float | None) -> str:
    """Write a whole number with thousands separators; empty when missing."""
    return "" if value is None else f"{value:,.0f}"


def rounded(value: float) -> str:
    """Write a large count in short: `11.7M`, `3.4k`, `250`."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{number(value / factor)}{unit}"
    return count(value)


def plural(how_many: float, noun: str) -> str:
    """Write `1 device`, `2 devices`."""
    return f"{count(how_many)} {noun}{'' if how_many == 1 else 's'}"


def mib(num_bytes: float | None) -> str:
    """Write bytes as MiB; empty when missing."""
    return "" if num_bytes is None else quantity(num_bytes / MIB, "MiB")


def duration(seconds: float | None) -> str:
    """Write a measured duration: `42.0 s` or `3 min 05 s`; empty when missing."""
    if seconds is None:
        return ""
    if seconds < 90:
        return quantity(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,d} min {rest:02d} s"


def about(seconds: float) -> str:
    """Write a duration to plan with: `40 s`, `25.0 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plain(value: Any) -> str:
    """Write any setting as a person would: `yes`, `1, 2`, `a: b`; empty for what is not set."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else ""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    return str(value)


def _with_unit(written: str, unit: str) -> str:
    tight = unit in {"", "%", TIMES}
    return f"{written}{unit}" if tight else f"{written} {unit}"
