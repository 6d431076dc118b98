"""Writes numbers with units and intervals, for the terminal and for the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # scipy takes a second
    from ..stats.interval import Interval

MIB = 2**20

TIMES = "\N{MULTIPLICATION SIGN}"

DASH = "\N{EN DASH}"

_UNSPACED_UNITS = ("", "%", TIMES)
"""Units that stand at the number, without a space."""

MAX_DIGITS = 4
"""Significant digits of a number with an interval, and of a large one; more are noise, and hard to read."""

MAX_EXTRA_PLACES = 4
"""Decimal places that a narrow interval is tried with."""


def format_number(value: float | None, digits: int = 3) -> str:
    """Write `digits` significant digits, and `,` at thousands; empty when missing."""
    if value is None:
        return ""
    return f"{value:,.{max(digits - 1 - _compute_magnitude(abs(value)), 0) if value else 0}f}"


def format_quantity(value: float | None, unit: str, digits: int = 3) -> str:
    """Write `12.3 ms`; empty when missing."""
    space = "" if value is None or unit in _UNSPACED_UNITS else " "
    return "" if value is None else f"{format_number(value, digits)}{space}{unit}"


def format_short(value: float, digits: int = 4) -> str:
    """Write at most `digits` significant digits, never as a power of ten: `41,090`, `0.5`."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def format_interval(value: Interval | None, unit: str = "", factor: float = 1.0, *, digits: int = 3) -> str:
    """Write `73 (65\N{EN DASH}81) ms` of `value` times `factor`; only the value without an interval.

    At most `digits`, and as few as the interval allows; whole numbers have four, larger ones are rounded to
    them.
    """
    if value is None:
        return ""
    scaled = value.scale(factor)
    return format_to_places(scaled, choose_places(scaled, digits), unit)


def format_to_places(found: Interval, behind: int, unit: str = "") -> str:
    """Format the same with so many decimal places, or with as many more as tell the ends from the estimate.

    Of a ratio as `format_ratio` has it; without an interval that no place tells.
    """
    written, span = _format_rounded(found.estimate, behind), ""
    for places in range(behind, behind + MAX_EXTRA_PLACES):
        middle, low, high = (_format_rounded(one, places) for one in (found.estimate, found.low, found.high))
        ends = ((low, found.low), (high, found.high))
        if all(text != middle or end == found.estimate for text, end in ends):
            written = middle
            # A dash before a minus sign could not be read.
            span = f" ({low}{' to ' if '-' in low + high else DASH}{high})" if _is_known(found) else ""
            break
    return f"{written}{unit}{span}" if unit in _UNSPACED_UNITS else f"{written}{span} {unit}"


def choose_places(found: Interval, digits: int = 3) -> int:
    """Decimal places for `digits`, fewer where half the interval is 2 to 19 in the last of them."""
    size = _compute_magnitude(
        max(abs(end) for end in (found.estimate, found.low, found.high) if math.isfinite(end))
    )
    most = max(digits - 1 - size, min(MAX_DIGITS - 1 - size, 0))
    return min(most, max(-_compute_magnitude((found.high - found.low) / 4), 0)) if _is_known(found) else most


def _is_known(found: Interval) -> bool:
    return math.isfinite(found.low) and math.isfinite(found.high) and found.high > found.low


def _compute_magnitude(size: float) -> int:
    return math.floor(math.log10(size)) if size else 0


def _format_rounded(value: float, behind: int) -> str:
    return f"{round(value, behind) + 0.0:,.{max(behind, 0)}f}"  # never -0


def format_rate_unit(unit: str) -> str:
    """Write the unit of a rate, for a heading or an axis: `tokens/s`."""
    return f"{unit}/s"


def make_singular(noun: str) -> str:
    """Return a regular plural in the singular: `image`, `query`, `box`."""
    if noun.endswith("ies"):
        return f"{noun[:-3]}y"
    return noun[:-2] if noun.endswith(("xes", "ches", "shes", "sses")) else noun.removesuffix("s")


def format_ratio(found: Interval) -> str:
    """Write a ratio with its interval: `1.16\N{MULTIPLICATION SIGN} (1.09\N{EN DASH}1.24)`.

    It has three decimal places where the ends of its interval would else be alike.
    """
    return format_to_places(found, 3 if _is_known(found) and found.high - found.low < 0.01 else 2, TIMES)


def format_percent(share: float) -> str:
    """Write a fraction in percent with two digits: `4.5%`."""
    return f"{format_short(100 * share, 2)}%"


def format_integer(value: float | None) -> str:
    """Write a whole number with thousands separators; empty when missing."""
    return "" if value is None else f"{value:,.0f}"


def format_count(how_many: float, noun: str) -> str:
    """Write `1 device`, `2 devices`, `2 launches`."""
    ending = "" if how_many == 1 else "es" if noun.endswith("ch") else "s"
    return f"{format_integer(how_many)} {noun}{ending}"


def format_mib(num_bytes: float | None) -> str:
    """Write bytes as MiB; empty when missing."""
    return "" if num_bytes is None else format_quantity(num_bytes / MIB, "MiB")


def format_duration(seconds: float | None) -> str:
    """Write a measured duration: `42.0 s` or `3 min 05 s`; empty when missing."""
    if seconds is None:
        return ""
    if seconds < 90:
        return format_quantity(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,d} min {rest:02d} s"


def format_rough_duration(seconds: float) -> str:
    """Write a duration to plan with: `40 s`, `25 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return (
        f"{format_short(seconds / 60, 2)} min" if seconds < 5400 else f"{format_short(seconds / 3600, 2)} h"
    )


def format_setting(value: Any) -> str:
    """Write any setting as a person would: `yes`, `1, 2`, `a: b`; empty for what is not set."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else ""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {format_setting(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(format_setting(item) for item in value)
    return str(value)
