"""Reads cells of cases.csv and names cases, for the terminal and for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from ..axes import DDP_AXES, DDP_DEFAULTS, STEP_SETTINGS
from ..buckets import BucketCaps
from ..case import STAND_IN
from ..results.comparisons import compile_mode
from ..settings import IMAGES
from ..stats.interval import Interval
from .numbers import TIMES, count, finite, plural, with_interval

Row = Mapping[Any, Any] | pd.Series
"""A row of a results table, by column."""

CPU_STAND_IN = "A device here is one CPU core standing in for a GPU: ratios show the mechanism, not GPU speed"
"""Stands beside every number that was measured on CPU cores."""

DEFAULT_CAP = "Cap default is PyTorch's: a first bucket of 1 MiB, then 25 MiB"
"""Stands where other caps are shown beside it."""

_DP_STAND_IN = "DP stand-in (CPU): nn.DataParallel's stages, carried out on CPU cores by one process"

_MODES = {"dp": "DP", "ddp": "DDP", "fsdp": "FSDP2"}
_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_LINK = re.compile(r"(?P<rate>[0-9]+(?:\.[0-9]+)?)(?P<unit>[kmg])bit(?:\+(?P<delay>[0-9.]+)(?P<time>\w+))?")
_PER_S = {"k": "kbit/s", "m": "Mbit/s", "g": "Gbit/s"}


def text(value: Any) -> str:
    """Return a cell as text; empty where missing."""
    return "" if pd.isna(value) else str(value)


def truth(value: Any) -> bool:
    """Tell whether a boolean cell is known and true."""
    return not pd.isna(value) and bool(value)


MOST_HIDDEN_WIDTH_PCT = 100.0
"""A wider interval holds both that all is hidden and that none is."""


def estimate(row: Row, column: str) -> Interval | None:
    """Return a measured cell with its interval, NaN where unknown; None where nothing was measured."""
    value, *ends = (finite(row.get(f"{column}{end}")) for end in ("", "_low", "_high"))
    if value is None:
        return None
    low, high = (math.nan if end is None else end for end in ends)
    return Interval(value, low, high)


def hidden_percent(row: Row, written: Callable[[Interval], str]) -> str:
    """Write the hidden share if it is known; `none` where communication adds more than it takes alone."""
    found = hidden_share(row)
    if found is None:
        return ""
    return "none" if hides_none(found) else written(found)


def hides_none(hidden: Interval | None) -> bool:
    """Whether communication is known to add more than it takes alone."""
    return hidden is not None and hidden.high < 0


def hidden_share(row: Row) -> Interval | None:
    """Return which share of communication is hidden, in percent; None where it is not known to 50 points."""
    found = estimate(row, "hidden_pct")
    return None if found is None or found.high - found.low > MOST_HIDDEN_WIDTH_PCT else found


def unit_of(row: Row) -> str:
    """Return what the rates of a case count: `images`, `tokens`."""
    return text(row.get("unit")) or IMAGES


def units_per_sample(row: Row) -> int:
    """Return how many of its unit a row of the batch of a case holds."""
    return int(finite(row.get("units_per_sample")) or 1)


def unit_of_cases(cases: pd.DataFrame) -> str:
    """Return what the rates of a run count; its cases all train the same workload."""
    return unit_of(cases.iloc[0]) if len(cases) else IMAGES


def samples_noun(row: Row) -> str:
    """Name the rows of a batch: by the unit where each is one of it, else `samples`."""
    return unit_of(row) if units_per_sample(row) == 1 else "samples"


def ranged(row: Row, column: str, unit: str = "") -> str:
    """Write a column of cases.csv with its interval."""
    return with_interval(estimate(row, column), unit)


def device_noun(device_type: str) -> str:
    """Return `GPU` or `CPU core`."""
    return "CPU core" if device_type == "cpu" else "GPU"


def devices(how_many: int, device_type: str) -> str:
    """Write `2 GPUs`, `1 CPU core`."""
    return plural(how_many, device_noun(device_type))


def are_shared(cases: pd.DataFrame) -> pd.Series:
    """Whether each case shares devices, as a mask."""
    return cases["oversubscribed"].fillna(value=False).astype(bool)


def own_devices(cases: pd.DataFrame) -> pd.DataFrame:
    """The cases that share no devices; all where every one does."""
    shared = are_shared(cases)
    return cases if shared.all() else cases[~shared]


def place(row: Row) -> str:
    """Name the devices of a case: `2 GPUs`, `16 GPUs of 2 hosts`, `4 shared CPU cores`."""
    shared = "shared " if truth(row["oversubscribed"]) else ""
    named = plural(int(row["num_devices"]), f"{shared}{device_noun(text(row['device_type']))}")
    num_hosts = int(finite(row["num_nodes"]) or 1)
    return f"{named} of {num_hosts:,d} hosts" if num_hosts > 1 else named


def is_stand_in(row: Row) -> bool:
    """Whether DataParallel's stages ran on CPU cores."""
    on_cpu = text(row["impl"]) == STAND_IN or text(row["device_type"]) == "cpu"
    return bool(row["mode"] == "dp") and on_cpu


def stand_ins(cases: pd.DataFrame) -> list[str]:
    """Say what stands in for what in these cases, a sentence each without its full stop."""
    on_cpu = cases["device_type"] == "cpu"
    found = {CPU_STAND_IN: on_cpu, _DP_STAND_IN: on_cpu & (cases["mode"] == "dp")}
    return [said for said, concerned in found.items() if concerned.any()]


def mode_name(row: Row) -> str:
    """Name the mode in a sentence: `DDP`, `DP`, `DP stand-in (CPU)`."""
    return f"{short_mode(row)} (CPU)" if is_stand_in(row) else short_mode(row)


def short_mode(row: Row) -> str:
    """Name the mode in a figure or a table: `DDP`, `DP`, `DP stand-in`, and whether it is not proved."""
    mode, not_proved = text(row["mode"]), " (not proved)" if text(row.get("not_proved")) else ""
    return f"{_MODES.get(mode, mode)}{' stand-in' if is_stand_in(row) else ''}{not_proved}"


def cap_label(cap: str) -> str:
    """Write a bucket cap with its unit."""
    return cap if cap in ("", "default") else f"{cap} MiB"


def settings(row: Row, reference: Row | None = None) -> dict[str, str]:
    """Return DDP settings of a case that are not those of `reference`, or not PyTorch's defaults."""
    if row["mode"] != "ddp":
        return {}
    found = {axis: (_value(row, axis), _value(reference, axis)) for axis in DDP_AXES}
    return {axis: mine for axis, (mine, other) in found.items() if mine != other}


def compile_label(mode: str) -> str:
    """Name cases by their mode of torch.compile: `eager`, `compiled`, `compiled (max-autotune)`."""
    return {"off": "eager", "default": "compiled"}.get(mode, f"compiled ({mode})")


def setting_names(changed: Mapping[str, str]) -> str:
    """Name settings in a sentence: `cap 1`; of others as they are typed, `static_graph=True`."""
    return ", ".join(
        f"cap {value}" if axis == "bucket_cap_mb" else f"{axis}={value}" for axis, value in changed.items()
    )


def ddp_call(changed: Mapping[str, str]) -> str:
    """Write the lines that make DDP so: `model = DDP(model, bucket_cap_mb=25)`."""
    given = [
        BucketCaps.parse(value).code() if axis == "bucket_cap_mb" else f"{axis}={value}"
        for axis, value in changed.items()
        if axis != "optimize_ddp"
    ]
    way = changed.get("optimize_ddp")
    first = f'torch._dynamo.config.optimize_ddp = "{way}"; ' if way else ""
    return f"{first}model = DDP({', '.join(part for part in ('model', *given) if part)})"


def case_name(row: Row) -> str:
    """Name a case in a sentence: `DDP on 2 GPUs with bucket_cap_mb=1`."""
    where, changed = case_parts(row)
    return f"{where}{f' with {changed}' if changed else ''}"


def case_parts(row: Row) -> tuple[str, str]:
    """The two parts of a case's name: `DDP on 2 GPUs`, `bucket_cap_mb=1`; the second may be empty."""
    mode = compile_mode(row)
    changed = setting_names(({} if mode == "off" else {"compile": mode}) | settings(row))
    return f"{mode_name(row)} on {place(row)}", changed


def settings_label(row: Row, *, with_cap: bool = True) -> str:
    """Name settings in a figure or a table: the bucket cap if asked for, then what is no default."""
    if row["mode"] == "pipeline":
        schedule = text(row["pipeline_schedule"])
        return f"{_SCHEDULES.get(schedule, schedule)}, {count(finite(row['micro_batches']))} micro-batches"
    changed = settings(row)
    changed.pop("bucket_cap_mb", None)
    cap = text(row["bucket_cap_mb"]) if with_cap and row["mode"] == "ddp" else ""
    parts = [f"cap {cap_label(cap)}"] if cap else []
    for axis, value in changed.items():
        words = axis.replace("_", " ")
        parts.append({"True": words, "False": f"no {words}"}.get(value, f"{words} {value}"))
    return ", ".join(parts)


def case_label(row: Row, *, with_cap: bool = True) -> str:
    """Name a case in a figure or a table: `DDP, 2 GPUs, cap 25 MiB`, and whether the devices are shared."""
    how_many = finite(row["num_devices"])
    where = "" if how_many is None else plural(how_many, device_noun(text(row["device_type"])))
    shared = " (shared)" if truth(row["oversubscribed"]) else ""
    parts = (short_mode(row), f"{where}{shared}", settings_label(row, with_cap=with_cap))
    return ", ".join(part for part in parts if part)


def step_labels(row: Row) -> list[str]:
    """Name the precision of a case's step and what else of it is not PyTorch's default."""
    found = [text(row["precision"])]
    for setting in STEP_SETTINGS:
        value, label = row.get(setting.name), setting.metadata["label"]
        if not pd.isna(value) and value != setting.default:
            found.append(label if isinstance(setting.default, bool) else f"{label} ({value})")
    return [label for label in found if label]


def workload_parts(row: Row, batch: float | None) -> list[str]:
    """Name what a case trains on `batch` samples: per device, or in all under strong scaling."""
    size, scaling = finite(row["image_size"]), text(row["scaling"])
    where = "in all" if scaling == "strong" else "per device"
    units = units_per_sample(row)
    each = f" of {units:,d} {unit_of(row)}" if units > 1 else ""
    parts = (
        text(row["arch"]),
        f"{size:.0f} {TIMES} {size:.0f} px" if size else "",
        f"{batch:,.0f} {samples_noun(row)}{each} {where}" if batch else "",
        f"{scaling} scaling" if scaling else "",
        *step_labels(row),
    )
    return [part for part in parts if part]


def link_name(link: str) -> str:
    """Write `1 Gbit/s`, `200 Mbit/s with 5 ms of delay`; another text as it is."""
    found = _LINK.fullmatch(link)
    if found is None:
        return link
    delay = f" with {found['delay']} {found['time']} of delay" if found["delay"] else ""
    return f"{found['rate']} {_PER_S[found['unit']]}{delay}"


def _value(row: Row | None, axis: str) -> str:
    return str(DDP_DEFAULTS[axis] if row is None or pd.isna(row[axis]) else row[axis])
