"""Selects the cases that belong together, and computes what a case implies: rates, costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bench.axes import DDP_DEFAULTS, STEP_DEFAULTS
from ..bench.buckets import BucketLayout
from ..bench.case import wire_share
from ..bench.findings.answers import headline
from ..bench.findings.numbers import plural, with_interval
from ..bench.findings.wording import (
    case_label,
    compile_label,
    device_noun,
    samples_noun,
    unit_of_cases,
    workload_parts,
)
from ..bench.manifest import Manifest
from ..bench.plan import equal_layout_reason
from ..bench.results.aggregate import bus_gb
from ..bench.results.case_result import CaseResult
from ..bench.settings import IMAGES
from ..bench.stats.interval import Interval
from .chart import Mark

_SOURCES = {"device": "synthetic {} on the device", "host": "synthetic {} from the host"}
_WORKLOAD = ("device_type", "arch", "image_size", "scaling", "precision", *STEP_DEFAULTS, "data")

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


@dataclass(frozen=True)
class WorkloadCases:
    """The cases of one workload: modes, device counts and DDP settings vary, all else is the same."""

    label: str
    name: str
    """The label, or `eager` and `compiled` where nothing else tells the workloads of a run apart."""
    cases: Sequence[CaseResult]
    equal_layouts: Mapping[str, Sequence[str]]
    """By bucket cap, the caps that make the same buckets and were therefore not measured again."""

    @property
    def device(self) -> str:
        """`GPU` or `CPU core`."""
        return device_noun(self.cases[0].device_type)

    @property
    def scaling(self) -> str:
        """`weak` or `strong`."""
        return self.cases[0].scaling

    @property
    def unit(self) -> str:
        """What its throughput counts."""
        return unit_of_cases(self.cases)

    @property
    def devices_label(self) -> str:
        """Label an axis of device counts."""
        return f"devices ({self.device}s), {self.scaling} scaling"


def workloads(cases: Sequence[CaseResult]) -> list[WorkloadCases]:
    """Return the cases that worked, one entry per workload in order of appearance."""
    groups: dict[tuple[Any, ...], list[CaseResult]] = {}
    for case in cases:
        if case.is_ok:
            named = {name: case.text(name) for name in _WORKLOAD} | {"batch": f"{_batch(case)}"}
            groups.setdefault(tuple(named.items()), []).append(case)
    others = {tuple(pair for pair in key if pair[0] != "compile") for key in groups}
    made = []
    for group in groups.values():
        label = _workload_label(group[0])
        name = compile_label(group[0].compile) if len(groups) > 1 and len(others) == 1 else label
        made.append(WorkloadCases(label, name, group, _equal_layouts(group, cases)))
    return made


def _batch(case: CaseResult) -> float | None:
    """Samples per device and step; under strong scaling in all."""
    batch = case.batch_per_device
    return batch * case.num_devices if batch and case.scaling == "strong" else batch


def _workload_label(case: CaseResult) -> str:
    known = _SOURCES.get(case.data)
    source = known.format(samples_noun(case)) if known else f"images from {case.data}" if case.data else ""
    return " · ".join([*workload_parts(case, _batch(case)), *([source] if source else [])])


def _equal_layouts(ok: Iterable[CaseResult], cases: Iterable[CaseResult]) -> dict[str, list[str]]:
    cap_of = {equal_layout_reason(case.case_id): case.setting("bucket_cap_mb") for case in ok}
    found: dict[str, list[str]] = {}
    for case in cases:
        measured, cap = cap_of.get(case.reason), case.setting("bucket_cap_mb")
        if case.status == "skipped" and measured and cap not in found.setdefault(measured, []):
            found[measured].append(cap)
    return found


def usual_settings(ddp: Iterable[CaseResult], *, free: str = "") -> list[CaseResult]:
    """Keep DDP cases at PyTorch's defaults; where a default was not measured, at the first value that was.

    `free` names the setting that may take any value.
    """
    kept = list(ddp)
    for name, default in DDP_DEFAULTS.items():
        if kept and name != free:
            values = [case.setting(name) for case in kept]
            usual = str(default) if str(default) in values else values[0]
            kept = [case for case in kept if case.setting(name) == usual]
    return kept


def by_mode(cases: Iterable[CaseResult], mode: str) -> list[CaseResult]:
    """Keep one case per device count: plain `single` or `dp` cases, or DDP at its usual settings."""
    found = [case for case in cases if case.mode == mode]
    found = usual_settings(found) if mode == "ddp" else found
    firsts = {case.num_devices: case for case in reversed(found)}
    return [firsts[count] for count in sorted(firsts)]


def unshared(cases: Sequence[CaseResult]) -> Sequence[CaseResult]:
    """Return the cases with devices of their own; all where none on several devices has them."""
    own = [case for case in cases if not case.oversubscribed]
    return own if any(case.num_devices > 1 for case in own) else cases


def headline_count(cases: Sequence[CaseResult]) -> int | None:
    """Return how many devices the run's answers are of, in these cases; None without several."""
    return next((case.num_devices for case in headline(cases)), None)


def caps_at_headline(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Keep DDP at its usual settings but for the bucket cap, at the headline count."""
    ddp = [case for case in cases if case.mode == "ddp"]
    at = headline_count(ddp)
    return usual_settings((case for case in ddp if case.num_devices == at), free="bucket_cap_mb")


def step_time(case: CaseResult) -> Interval | None:
    """Return ms per optimizer step as global batch / throughput, so that it has throughput's interval."""
    found, batch = case.images_per_s, case.global_batch
    if found is None or batch is None or found.estimate <= 0 or found.low <= 0:
        return None
    return found.inverted(1000 * batch * case.units_per_sample)


def mark(x: float, value: Interval, case: CaseResult, unit: str, *, note: str = "") -> Mark:
    """Make a mark at `x`, hollow where devices are shared, over which case, value and rounds are shown."""
    rounds = plural(case.num_rounds, "round") if case.num_rounds else ""
    parts = (case_label(case), with_interval(value, unit), rounds)
    return Mark(x, value, case.oversubscribed, " · ".join(filter(None, parts)), note)


def with_rates(case: CaseResult, manifest: Manifest, price: float | None) -> CaseResult:
    """Add rates with intervals, arithmetic being that of a device; `epoch_h` and `epoch_cost` of images.

    Args:
        case: a measured one.
        manifest: of its run; the forward FLOPs of a sample are in it.
        price: of a device for an hour; None leaves the cost empty.
    """
    found: dict[str, float] = {}
    flops, rate = manifest.model.forward_flops_per_image, case.images_per_s
    if rate is not None and flops and case.num_devices:
        achieved = rate.scaled(PASSES * flops / case.num_devices / 1e12 / case.units_per_sample)
        found |= achieved.columns("tflop_per_s")
        if peak := DENSE_PEAKS.get(case.device_name, {}).get(case.precision):
            found |= achieved.scaled(100 / peak).columns("mfu_pct")
    if (bus := _bus_gb_per_s(case)) is not None:
        found |= bus.columns("bus_gb_per_s")
    with_pauses = case.number("images_per_s_sustained")
    if with_pauses and case.num_devices and case.unit == IMAGES:
        found["epoch_h"] = EPOCH_IMAGES / with_pauses / 3600
        if price is not None:
            found["epoch_cost"] = found["epoch_h"] * case.num_devices * price
    return with_cells(case, **found)


def with_cells(case: CaseResult, **cells: Any) -> CaseResult:
    """Add what a table shows beside the columns of cases.csv."""
    return replace(case, cells={**case.cells, **cells})


def _bus_gb_per_s(case: CaseResult) -> Interval | None:
    """Return the bus bandwidth of a case's buckets alone in 10^9 bytes/s, as nccl-tests defines it."""
    alone, layout = case.comm_ms, BucketLayout.of_cell(case.bucket_bytes)
    buffers_ms = case.buffers_ms.estimate if case.buffers_ms else 0.0
    if alone is None or layout is None or not case.num_devices or not alone.estimate > buffers_ms:
        return None
    sent = wire_share(case.text("comm_hook")) * sum(layout.num_bytes)
    return alone.plus(-buffers_ms).inverted(1000 * bus_gb(sent, case.num_devices))
