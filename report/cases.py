"""Selects the rows of cases.csv that belong together, and computes what a row implies: rates, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from ..bench.axes import DDP_DEFAULTS, STEP_DEFAULTS
from ..bench.buckets import BucketLayout
from ..bench.case import wire_share
from ..bench.findings.answers import headline
from ..bench.findings.numbers import plural, with_interval
from ..bench.findings.wording import (
    are_shared,
    case_label,
    compile_label,
    device_noun,
    samples_noun,
    unit_of,
    unit_of_cases,
    units_per_sample,
    workload_parts,
)
from ..bench.manifest import Manifest
from ..bench.plan import equal_layout_reason
from ..bench.results.aggregate import bus_gb
from ..bench.results.case_result import CaseResult, case_results, estimate, finite, text, truth
from ..bench.results.case_result import Cells as Row
from ..bench.results.schema import records
from ..bench.settings import IMAGES
from ..bench.stats.interval import Interval
from .drawing import Mark

_SOURCES = {"device": "synthetic {} on the device", "host": "synthetic {} from the host"}
_WORKLOAD = ("device_type", "arch", "image_size", "scaling", "precision", *STEP_DEFAULTS, "data", "batch")

EPOCH_IMAGES = 1_281_167
"""Training images of ImageNet-1k (Russakovsky et al., 2015)."""

PASSES = 3
"""Forward, gradient of the weights, gradient of the inputs: as much arithmetic each in convolutions."""

_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_HOPPER = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}
DENSE_PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H200": _HOPPER,
}
"""TFLOP/s without sparsity, by `torch.cuda.get_device_name`: the A100's data sheet; table 2 of the H100's
architecture white paper (SXM5), to whose figures the H200's data sheet rounds. Exact names only: cards of
the same chip for PCIe, and MIG slices, have less."""

_RATES = ("tflop_per_s", "bus_gb_per_s", "mfu_pct", "mfu_sheet_pct")


@dataclass(frozen=True)
class WorkloadCases:
    """The cases of one workload: modes, device counts and DDP settings vary, all else is the same."""

    label: str
    name: str
    """The label, or `eager` and `compiled` where nothing else tells the workloads of a run apart."""
    cases: pd.DataFrame
    equal_layouts: Mapping[str, Sequence[str]]
    """By bucket cap, the caps that make the same buckets and were therefore not measured again."""

    @property
    def device(self) -> str:
        """`GPU` or `CPU core`."""
        return device_noun(text(self.cases["device_type"].iloc[0]))

    @property
    def scaling(self) -> str:
        """`weak` or `strong`."""
        return text(self.cases["scaling"].iloc[0])

    @property
    def unit(self) -> str:
        """What its throughput counts."""
        return unit_of_cases(self.cases)

    @property
    def devices_label(self) -> str:
        """Label an axis of device counts."""
        return f"devices ({self.device}s), {self.scaling} scaling"


def workloads(cases: pd.DataFrame) -> list[WorkloadCases]:
    """Return the cases that worked, one entry per workload in order of appearance."""
    ok = cases[cases["status"] == "ok"].copy()
    if ok.empty:
        return []
    per_device = ok["batch_per_device"]
    ok["batch"] = per_device.where(ok["scaling"] != "strong", per_device * ok["num_devices"])
    groups = [group for _, group in ok.groupby(list(_WORKLOAD), sort=False, dropna=False)]
    by_compile = len(groups) > 1 and len(ok.drop_duplicates([c for c in _WORKLOAD if c != "compile"])) == 1
    made = []
    for group in groups:
        label = _workload_label(records(group)[0])
        name = compile_label(CaseResult.of(group.iloc[0]).compile) if by_compile else label
        made.append(WorkloadCases(label, name, group, _equal_layouts(group, cases)))
    return made


def _workload_label(row: Row) -> str:
    data = text(row["data"])
    known = _SOURCES.get(data)
    source = known.format(samples_noun(row)) if known else f"images from {data}" if data else ""
    return " · ".join([*workload_parts(row, finite(row["batch"])), *([source] if source else [])])


def _equal_layouts(ok: pd.DataFrame, cases: pd.DataFrame) -> dict[str, list[str]]:
    cap_of = {equal_layout_reason(text(row["case_id"])): text(row["bucket_cap_mb"]) for row in records(ok)}
    found: dict[str, list[str]] = {}
    for row in records(cases[cases["status"] == "skipped"]):
        measured, cap = cap_of.get(text(row["reason"])), text(row["bucket_cap_mb"])
        if measured is not None and cap not in found.setdefault(measured, []):
            found[measured].append(cap)
    return found


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
    own = cases[~are_shared(cases)]
    return cases if own[own["num_devices"].fillna(0) > 1].empty else own


def headline_count(cases: pd.DataFrame) -> int | None:
    """Return how many devices the run's answers are of, in these cases; None without several."""
    return next((case.num_devices for case in headline(case_results(cases))), None)


def caps_at_headline(cases: pd.DataFrame) -> pd.DataFrame:
    """Keep DDP at its usual settings but for the bucket cap, at the headline count."""
    ddp = cases[cases["mode"] == "ddp"]
    return usual_settings(ddp[ddp["num_devices"] == headline_count(ddp)], free="bucket_cap_mb")


def step_time(row: Row) -> Interval | None:
    """Return ms per optimizer step as global batch / throughput, so that it has throughput's interval."""
    found, batch = estimate(row, "images_per_s"), finite(row["global_batch"])
    if found is None or batch is None or found.estimate <= 0 or found.low <= 0:
        return None
    return found.inverted(1000 * batch * units_per_sample(row))


def mark(x: float, value: Interval, row: Row, unit: str, *, note: str = "") -> Mark:
    """Make a mark at `x`, hollow where devices are shared, over which case, value and rounds are shown."""
    rounds = finite(row.get("num_rounds"))
    name = case_label(row)
    parts = (name, with_interval(value, unit), plural(rounds, "round") if rounds else "")
    return Mark(x, value, truth(row["oversubscribed"]), " · ".join(filter(None, parts)), note)


def with_rates(cases: pd.DataFrame, manifest: Manifest, price: float | None) -> pd.DataFrame:
    """Add rates with intervals, arithmetic being that of a device; `epoch_h` and `epoch_cost` of images.

    Args:
        cases: measured ones.
        manifest: of their run; the forward FLOPs of a sample and the devices' own rates are in it.
        price: of a device for an hour; None leaves the cost empty.
    """
    rows = [_rates(row, manifest, price) for row in records(cases)]
    names = [f"{name}{end}" for name in _RATES for end in ("", "_low", "_high")]
    added = {name: [row.get(name) for row in rows] for name in (*names, "epoch_h", "epoch_cost")}
    return cases.assign(**{name: pd.Series(cells, cases.index, "float64") for name, cells in added.items()})


def _rates(row: Row, manifest: Manifest, price: float | None) -> Mapping[str, float]:
    found: dict[str, float] = {}
    flops = manifest.model.forward_flops_per_image
    rate, num_devices = estimate(row, "images_per_s"), finite(row["num_devices"])
    if rate is not None and flops and num_devices:
        achieved = rate.scaled(PASSES * flops / num_devices / 1e12 / units_per_sample(row))
        found |= achieved.columns("tflop_per_s")
        sheet = DENSE_PEAKS.get(text(row["device_name"]), {}).get(text(row["precision"]))
        for name, peak in (("mfu_pct", _matrix_rate(row, manifest)), ("mfu_sheet_pct", sheet)):
            if peak:
                found |= achieved.scaled(100 / peak).columns(name)
    if (bus := _bus_gb_per_s(row)) is not None:
        found |= bus.columns("bus_gb_per_s")
    with_pauses = finite(row["images_per_s_sustained"])
    if with_pauses and num_devices and unit_of(row) == IMAGES:
        found["epoch_h"] = EPOCH_IMAGES / with_pauses / 3600
        if price is not None:
            found["epoch_cost"] = found["epoch_h"] * num_devices * price
    return found


def _matrix_rate(row: Row, manifest: Manifest) -> float | None:
    """Return what the median of the case's devices reached in large matrix products, TFLOP/s."""
    counts = {one.num_devices for one in manifest.roofline}
    wanted = finite(row["num_devices"])
    if wanted not in counts and row["mode"] == "dp" and not truth(row["oversubscribed"]):
        # One process drives all devices of DataParallel: there may be fewer ranks to measure them.
        wanted = max(counts, default=None)
    rates = [one.matrix_tflop_per_s for one in manifest.roofline if one.num_devices == wanted]
    known = [rate for rate in rates if rate]
    return median(known) if known else None


def _bus_gb_per_s(row: Row) -> Interval | None:
    """Return the bus bandwidth of a case's buckets alone in 10^9 bytes/s, as nccl-tests defines it."""
    alone, ranks = estimate(row, "comm_ms"), finite(row["num_devices"])
    layout, buffers_ms = BucketLayout.of_cell(row["bucket_bytes"]), finite(row["buffers_ms"]) or 0.0
    if alone is None or layout is None or not ranks or not alone.estimate > buffers_ms:
        return None
    of_buckets = Interval(*(ms - buffers_ms for ms in (alone.estimate, alone.low, alone.high)))
    sent = wire_share(text(row["comm_hook"])) * sum(layout.num_bytes)
    return of_buckets.inverted(1000 * bus_gb(sent, int(ranks)))
