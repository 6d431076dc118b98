"""Which rows of cases.csv belong in one figure, and what is computed from a row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from bench.results.aggregate import images_per_s_by_round
from bench.stats import paired_ratio
from report.numbers import TIMES, Estimate, finite, plural

if TYPE_CHECKING:
    Row = Mapping[Any, Any]

DDP_DEFAULTS: dict[str, Any] = {
    "bucket_cap_mb": "default",
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "find_unused_parameters": False,
    "sync_buffers": True,
    "sync_batchnorm": False,
    "comm_hook": "none",
    "accumulate": 1,
}
_WORKLOAD = ("device_type", "arch", "image_size", "scaling", "precision", "data", "batch")
_NO_UNIT_CAPS = {"", "default"}
_SAME_LAYOUT = re.compile(r"same bucket layout as (\S+);")


@dataclass(frozen=True)
class Workload:
    """What stays the same while modes, device counts and DDP settings vary."""

    label: str
    device: str
    scaling: str
    cases: pd.DataFrame
    twins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By bucket cap, the caps that make the same buckets and were therefore not measured again."""


def records(cases: pd.DataFrame) -> list[Row]:
    """The rows as mappings from column to cell; a missing cell that is no number is None.

    Not `DataFrame.to_dict`, which looks every column up by itself: a third of a page's time.
    """
    names = list(cases.columns)
    return [
        {name: None if cell is pd.NA else cell for name, cell in zip(names, row, strict=True)}
        for row in cases.astype(object).to_numpy().tolist()
    ]


def text(value: Any) -> str:
    """A cell as text; empty where missing."""
    return "" if pd.isna(value) else str(value)


def truth(value: Any) -> bool:
    """Whether a boolean cell is known and true."""
    return not pd.isna(value) and bool(value)


def estimate(row: Row, column: str) -> Estimate | None:
    """A measured cell, with its interval if it has one; None where missing."""
    value = finite(row[column])
    if value is None:
        return None
    low, high = finite(row.get(f"{column}_low")), finite(row.get(f"{column}_high"))
    return Estimate(value) if low is None or high is None else Estimate(value, low, high)


def step_time(row: Row) -> Estimate | None:
    """Milliseconds per optimizer step as global batch / throughput, so that it has throughput's interval."""
    rate, batch = estimate(row, "images_per_s"), finite(row["global_batch"])
    if rate is None or batch is None or min(rate.value, rate.low or rate.value) <= 0:
        return None
    low, high = (None if end is None else 1000 * batch / end for end in (rate.high, rate.low))
    return Estimate(1000 * batch / rate.value, low, high)


def mode_label(row: Row) -> str:
    """`single`, `DP`, `DDP`; DP on CPU cores says that it is a stand-in."""
    mode = text(row["mode"])
    if mode == "dp" and (text(row["impl"]) == "cpu_standin" or text(row["device_type"]) == "cpu"):
        return "DP (CPU stand-in)"
    return mode.upper() if mode in {"dp", "ddp"} else mode


def cap_label(cap: str) -> str:
    """A bucket cap with its unit."""
    return cap if cap in _NO_UNIT_CAPS else f"{cap} MiB"


def settings_label(row: Row, *, with_cap: bool = True) -> str:
    """The DDP settings of a case that are not PyTorch's defaults, and its bucket cap if asked for."""
    if text(row["mode"]) != "ddp":
        return ""
    parts = (
        [f"cap {cap_label(text(row['bucket_cap_mb']))}"] if with_cap and text(row["bucket_cap_mb"]) else []
    )
    for name, default in DDP_DEFAULTS.items():
        value = row[name]
        if name == "bucket_cap_mb" or pd.isna(value) or value == default:
            continue
        words = name.replace("_", " ")
        switch = isinstance(default, bool)
        parts.append((words if truth(value) else f"no {words}") if switch else f"{words} {value}")
    return ", ".join(parts)


def case_label(row: Row, device: str, *, with_cap: bool = True) -> str:
    """`DDP, 2 GPUs, cap 25 MiB`, and whether the devices are shared."""
    devices = finite(row["num_devices"])
    where = "" if devices is None else plural(devices, device)
    shared = " (shared)" if truth(row["oversubscribed"]) else ""
    parts = (mode_label(row), f"{where}{shared}", settings_label(row, with_cap=with_cap))
    return ", ".join(part for part in parts if part)


def workloads(cases: pd.DataFrame) -> list[Workload]:
    """The cases that worked, one entry per workload in order of appearance."""
    ok = cases[cases["status"] == "ok"].copy()
    if ok.empty:
        return []
    per_step = ok["batch_per_device"].where(
        ok["scaling"] != "strong", ok["batch_per_device"] * ok["num_devices"]
    )
    ok["batch"] = per_step
    return [
        Workload(
            label=_workload_label(records(group)[0]),
            device="CPU core" if text(group["device_type"].iloc[0]) == "cpu" else "GPU",
            scaling=text(group["scaling"].iloc[0]),
            cases=group,
            twins=_twins(group, cases),
        )
        for _, group in ok.groupby(list(_WORKLOAD), sort=False, dropna=False)
    ]


def _twins(ok: pd.DataFrame, cases: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """Equal layouts, from the reasons of cases that were skipped for them."""
    cap_of = {text(row["case_id"]): text(row["bucket_cap_mb"]) for row in records(ok)}
    skipped = cases[cases["status"] == "skipped"]
    found: dict[str, dict[str, None]] = {}
    for row in records(skipped):
        same = _SAME_LAYOUT.match(text(row["reason"]))
        if same is not None and same[1] in cap_of:
            found.setdefault(cap_of[same[1]], {})[text(row["bucket_cap_mb"])] = None
    return {cap: tuple(others) for cap, others in found.items()}


def _workload_label(row: Row) -> str:
    size, batch, scaling = finite(row["image_size"]), finite(row["batch"]), text(row["scaling"])
    where = "in all" if scaling == "strong" else "per device"
    parts = [
        text(row["arch"]),
        f"{size:.0f} {TIMES} {size:.0f} px" if size else "",
        f"{batch:,.0f} images {where}" if batch else "",
        f"{scaling} scaling" if scaling else "",
        text(row["precision"]),
        f"batches from {text(row['data'])}" if text(row["data"]) else "",
    ]
    return " · ".join(part for part in parts if part)


def usual_settings(ddp: pd.DataFrame, *, free: str = "") -> pd.DataFrame:
    """DDP cases at PyTorch's defaults; where a default was not measured, at the first value that was.

    `free` names the setting that may take any value.
    """
    for name, default in DDP_DEFAULTS.items():
        if ddp.empty or name == free:
            continue
        column = ddp[name]
        usual = (column == default).fillna(value=False).astype(bool) | column.isna()
        ddp = ddp[usual] if usual.any() else ddp[column == column.iloc[0]]
    return ddp


def by_mode(cases: pd.DataFrame, mode: str) -> pd.DataFrame:
    """One case per device count: plain `single` or `dp` cases, or DDP at its usual settings."""
    rows = cases[cases["mode"] == mode]
    rows = usual_settings(rows) if mode == "ddp" else rows
    return rows.drop_duplicates("num_devices").sort_values("num_devices")


def headline_count(cases: pd.DataFrame) -> int | None:
    """The largest device count whose devices are not shared, else the largest; None without several."""
    several = cases[cases["num_devices"].fillna(0) > 1]
    shared = several["oversubscribed"].fillna(value=False).astype(bool)
    counts = several.loc[~shared if (~shared).any() else shared, "num_devices"]
    return None if counts.empty else int(counts.max())


def at_headline(cases: pd.DataFrame, *, free: str) -> pd.DataFrame:
    """DDP at its usual settings but for one that is free, at the headline count."""
    ddp = cases[cases["mode"] == "ddp"]
    return usual_settings(ddp[ddp["num_devices"] == headline_count(ddp)], free=free)


def throughput_ratio(row: Row, reference: Row, blocks: pd.DataFrame) -> Estimate | None:
    """Throughput of a case over that of another, paired within rounds; None without common rounds."""
    batches = {text(r["case_id"]): int(r["global_batch"]) for r in (row, reference)}
    by_round = images_per_s_by_round(blocks[blocks["case_id"].isin(list(batches))], batches)
    if by_round.keys() != batches.keys():
        return None
    ratio = paired_ratio(*(by_round[text(r["case_id"])] for r in (row, reference)))
    if math.isnan(ratio.estimate):
        return None
    return (
        Estimate(ratio.estimate) if math.isnan(ratio.low) else Estimate(ratio.estimate, ratio.low, ratio.high)
    )
