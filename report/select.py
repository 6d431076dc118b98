"""Selects the rows of cases.csv that belong in one figure, and computes what a row implies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from ddp_bench.bench.axes import DDP_DEFAULTS, STEP_DEFAULTS
from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import (
    Row,
    compile_label,
    device_noun,
    estimate,
    own_devices,
    samples_noun,
    text,
    unit_of_cases,
    units_per_sample,
    workload_parts,
)
from ddp_bench.bench.plan import equal_layout_reason
from ddp_bench.bench.results.comparisons import Comparison, compile_mode
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.results.typical import Typical
from ddp_bench.bench.stats import Interval

_SOURCES = {"device": "synthetic {} on the device", "host": "synthetic {} from the host"}
_WORKLOAD = ("device_type", "arch", "image_size", "scaling", "precision", *STEP_DEFAULTS, "data", "batch")


@dataclass(frozen=True)
class WorkloadCases:
    """The cases of one workload: modes, device counts and DDP settings vary, all else is the same."""

    label: str
    name: str
    """The label, or `eager` and `compiled` where nothing else tells the workloads of a run apart."""
    device: str
    scaling: str
    cases: pd.DataFrame
    equal_layouts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By bucket cap, the caps that make the same buckets and were therefore not measured again."""

    @property
    def unit(self) -> str:
        """What its throughput counts."""
        return unit_of_cases(self.cases)

    @property
    def devices_label(self) -> str:
        """Label an axis of device counts."""
        return f"devices ({self.device}s), {self.scaling} scaling"


def step_time(row: Row) -> Interval | None:
    """Return ms per optimizer step as global batch / throughput, so that it has throughput's interval."""
    found, batch = estimate(row, "images_per_s"), finite(row["global_batch"])
    if found is None or batch is None or found.estimate <= 0 or found.low <= 0:
        return None
    return found.inverted(1000 * batch * units_per_sample(row))


def workloads(cases: pd.DataFrame) -> list[WorkloadCases]:
    """Return the cases that worked, one entry per workload in order of appearance."""
    ok = cases[cases["status"] == "ok"].copy()
    if ok.empty:
        return []
    per_device = ok["batch_per_device"]
    ok["batch"] = per_device.where(ok["scaling"] != "strong", per_device * ok["num_devices"])
    groups = [group for _, group in ok.groupby(list(_WORKLOAD), sort=False, dropna=False)]
    several = len(groups) > 1 and len(ok.drop_duplicates([c for c in _WORKLOAD if c != "compile"])) == 1
    return [
        WorkloadCases(
            label=(label := _workload_label(records(group)[0])),
            name=compile_label(compile_mode(group.iloc[0])) if several else label,
            device=device_noun(text(group["device_type"].iloc[0])),
            scaling=text(group["scaling"].iloc[0]),
            cases=group,
            equal_layouts=_equal_layouts(group, cases),
        )
        for group in groups
    ]


def _equal_layouts(ok: pd.DataFrame, cases: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """Return, by cap of a measured case, the caps that were skipped because they make the same buckets."""
    cap_of = {equal_layout_reason(text(row["case_id"])): text(row["bucket_cap_mb"]) for row in records(ok)}
    skipped = cases[cases["status"] == "skipped"]
    found: dict[str, dict[str, None]] = {}
    for row in records(skipped):
        measured = cap_of.get(text(row["reason"]))
        if measured is not None:
            found.setdefault(measured, {})[text(row["bucket_cap_mb"])] = None
    return {cap: tuple(others) for cap, others in found.items()}


def _workload_label(row: Row) -> str:
    data = text(row["data"])
    known = _SOURCES.get(data)
    source = known.format(samples_noun(row)) if known else f"images from {data}" if data else ""
    return " · ".join([*workload_parts(row, finite(row["batch"])), *([source] if source else [])])


def usual_settings(ddp: pd.DataFrame, *, free: str = "") -> pd.DataFrame:
    """Keep DDP cases at PyTorch's defaults; where a default was not measured, at the first value that was.

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
    """Keep one case per device count: plain `single` or `dp` cases, or DDP at its usual settings."""
    rows = cases[cases["mode"] == mode]
    rows = usual_settings(rows) if mode == "ddp" else rows
    return rows.drop_duplicates("num_devices").sort_values("num_devices")


def unshared(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with devices of their own; all where none on several devices has them."""
    own = cases[~cases["oversubscribed"].fillna(value=False).astype(bool)]
    return cases if own[own["num_devices"].fillna(0) > 1].empty else own


def headline_count(cases: pd.DataFrame) -> int | None:
    """Return the largest count of devices that are not shared, else the largest; None without several."""
    counts = own_devices(cases[cases["num_devices"].fillna(0) > 1])["num_devices"]
    return None if counts.empty else int(counts.max())


def at_headline(cases: pd.DataFrame, *, free: str) -> pd.DataFrame:
    """Keep DDP at its usual settings but for one that is free, at the headline count."""
    ddp = cases[cases["mode"] == "ddp"]
    return usual_settings(ddp[ddp["num_devices"] == headline_count(ddp)], free=free)


def answered_ratio(
    row: Row, reference: Row, comparisons: Sequence[Comparison], typical: Typical
) -> Interval | None:
    """Divide throughput as the run's answers do, with the interval of theirs; else by the fit, where it can.

    A page must not have two intervals of one ratio, of which one excludes 1 and the other does not.
    """
    ids = (text(row["case_id"]), text(reference["case_id"]))
    for one in comparisons:
        if (one.case_id, one.reference_id) == ids:
            return one.ratio
        if (one.reference_id, one.case_id) == ids:
            return one.ratio.inverted()
    if not typical.has(*((case_id, "timed") for case_id in ids)):
        return None
    return typical.ratio(ids[1], ids[0]).scaled(row["global_batch"] / reference["global_batch"])
