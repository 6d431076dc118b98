"""How numbers become text: three significant digits, a unit, and the interval where there is one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MIB = 2**20
TIMES = "\N{MULTIPLICATION SIGN}"


def finite(value: Any) -> float | None:
    """The number in a cell, or None where it is missing, not a number or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _decimals(magnitude: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(magnitude))) if magnitude > 0 else 0


def number(value: float | None, digits: int = 3) -> str:
    """`value` to `digits` significant digits with thousands separators; empty when missing."""
    return "" if value is None else f"{value:,.{_decimals(abs(value), digits)}f}"


def quantity(value: float | None, unit: str, digits: int = 3) -> str:
    """`12.3 ms`; empty when missing."""
    return "" if value is None else _with_unit(number(value, digits), unit)


def interval(estimate: float | None, low: float | None, high: float | None, unit: str) -> str:
    """`70.1 [69.2, 70.9] images/s`, or without brackets where no interval is known."""
    if estimate is None:
        return ""
    if low is None or high is None:
        return quantity(estimate, unit)
    decimals = _decimals(max(abs(estimate), abs(low), abs(high)), 3)
    shown = (f"{value:,.{decimals}f}" for value in (estimate, low, high))
    return _with_unit("{} [{}, {}]".format(*shown), unit)


@dataclass(frozen=True)
class Estimate:
    """A measured value and its 95% interval, of which both ends are known or neither."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> Estimate:
        """In another unit, or per something; `factor` is positive."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, low, high)

    def shown(self, unit: str) -> str:
        """`70.1 [69.2, 70.9] ms`."""
        return interval(self.value, self.low, self.high, unit)


def count(value: float | None) -> str:
    """A whole number with thousands separators; empty when missing."""
    return "" if value is None else f"{value:,.0f}"


def mib(num_bytes: float | None) -> str:
    """Bytes as MiB."""
    return "" if num_bytes is None else quantity(num_bytes / MIB, "MiB")


def plural(how_many: float, noun: str) -> str:
    """`1 device`, `2 devices`."""
    return f"{count(how_many)} {noun}" if how_many == 1 else f"{count(how_many)} {noun}s"


def duration(seconds: float | None) -> str:
    """`42.0 s` or `3 min 05 s`; empty when missing."""
    if seconds is None:
        return ""
    if seconds < 90:
        return quantity(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,d} min {rest:02d} s"


def plain(value: Any) -> str:
    """Any setting as text a person would write: `yes`, `1, 2`, `a: b`; empty for what is not set."""
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


def _with_unit(text: str, unit: str) -> str:
    tight = unit in {"", "%", TIMES}
    return f"{text}{unit}" if tight else f"{text} {unit}"
