"""How findings name things and write numbers: three significant digits, a unit, the interval."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pandas as pd

from bench.plan import DDP_AXES, Case
from bench.stats import Interval

DEFAULTS: dict[str, Any] = {
    **{field.name: field.default for field in fields(Case) if field.name in DDP_AXES},
    "bucket_cap_mb": "default",
}
"""DDP as its constructor makes it without arguments."""

CPU_STAND_IN = "A device here is one CPU core standing in for a GPU: ratios show the mechanism, not GPU speed"
"""Stands beside every number that was measured on CPU cores."""

_MODES = {"single": "single", "dp": "DataParallel", "ddp": "DDP"}
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def number(value: float, largest: float | None = None) -> str:
    """Three significant digits of `largest` or of the value, thousands separated, no powers of ten."""
    size = abs(value if largest is None else largest)
    return f"{value:,.{max(2 - math.floor(math.log10(size)), 0) if size else 0}f}"


def between(value: float, low: float, high: float) -> str:
    """`180 [178, 182]`, or the value alone where no interval is known."""
    if math.isnan(low) or math.isnan(high):
        return number(value)
    largest = max(abs(value), abs(low), abs(high))
    return f"{number(value, largest)} [{number(low, largest)}, {number(high, largest)}]"


def ranged(row: pd.Series, column: str, factor: float = 1.0) -> str:
    """A column of cases.csv with its interval."""
    return between(*(factor * float(row[f"{column}{end}"]) for end in ("", "_low", "_high")))


def times(ratio: Interval) -> str:
    """`1.081x [1.069, 1.092]`."""
    if math.isnan(ratio.low):
        return f"{ratio.estimate:.3f}x (one round gives no interval)"
    return f"{ratio.estimate:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"


def gain(ratio: Interval) -> str:
    """`8.1% [6.9, 9.2] more`, for a ratio above 1."""
    estimate, low, high = (100 * (value - 1) for value in (ratio.estimate, ratio.low, ratio.high))
    return f"{estimate:.1f}% [{low:.1f}, {high:.1f}] more"


def devices(count: int, device_type: str) -> str:
    """`2 GPUs`, `1 CPU core`."""
    noun = "GPU" if device_type == "cuda" else "CPU core"
    return f"{count:,d} {noun}{'' if count == 1 else 's'}"


def place(row: pd.Series) -> str:
    """The devices of a case: `2 GPUs`, `16 GPUs of 2 hosts`, `4 oversubscribed CPU cores`."""
    named = devices(int(row["num_devices"]), str(row["device_type"]))
    num_hosts = 1 if pd.isna(row["num_nodes"]) else int(row["num_nodes"])
    named += f" of {num_hosts:,d} hosts" if num_hosts > 1 else ""
    return named.replace(" ", " oversubscribed ", 1) if truth(row["oversubscribed"]) else named


def mode_name(row: pd.Series) -> str:
    """`DDP`, or `DataParallel (CPU stand-in)`."""
    name = _MODES.get(str(row["mode"]), str(row["mode"]))
    return f"{name} (CPU stand-in)" if str(row["impl"]) == "cpu_standin" else name


def settings(row: pd.Series, reference: pd.Series | None = None) -> dict[str, str]:
    """DDP settings of a case that are not those of `reference`, or not PyTorch's defaults."""
    if row["mode"] != "ddp":
        return {}
    found = {axis: (_value(row, axis), _value(reference, axis)) for axis in DDP_AXES}
    return {axis: mine for axis, (mine, other) in found.items() if mine != other}


def setting_names(changed: dict[str, str]) -> str:
    """`bucket_cap_mb=1, static_graph=True`."""
    return ", ".join(f"{axis}={value}" for axis, value in changed.items())


def case_name(row: pd.Series) -> str:
    """`DDP on 2 GPUs with bucket_cap_mb=1`."""
    changed = setting_names(settings(row))
    return f"{mode_name(row)} on {place(row)}{f' with {changed}' if changed else ''}"


def _value(row: pd.Series | None, axis: str) -> str:
    return str(DEFAULTS[axis] if row is None or pd.isna(row[axis]) else row[axis])


def truth(value: object) -> bool:
    """Whether a boolean cell is known and true."""
    return value is not pd.NA and value is not None and bool(value)


def bits_per_s(link: str) -> float | None:
    """Rate of a lab's link as results write it, such as `1gbit` or `200mbit+5ms`; None for another text."""
    found = re.fullmatch(r"([0-9.]+)([kmg])bit(\+.*)?", link)
    return None if found is None else float(found[1]) * _UNITS[found[2]]


def link_name(link: str) -> str:
    """`1 Gbit/s`, `200 Mbit/s with 5 ms of delay`; another text as it is."""
    rate = re.fullmatch(r"([0-9.]+)([kmg])bit(?:\+([0-9.]+)(\w+))?", link)
    if rate is None:
        return link
    unit = {"k": "kbit/s", "m": "Mbit/s", "g": "Gbit/s"}[rate[2]]
    return f"{rate[1]} {unit}{f' with {rate[3]} {rate[4]} of delay' if rate[3] else ''}"


def about(seconds: float) -> str:
    """A duration to plan with: `40 s`, `25 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
