"""Selects the cases that belong together, and computes the rates that a case implies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bench.findings.answers import label_variants, select_headline
from ..bench.findings.wording import get_unit, name_device
from ..bench.machine.manifest import Manifest
from ..bench.plan.buckets import BucketLayout
from ..bench.plan.case import get_wire_share
from ..bench.plan.case_settings import DDP_DEFAULTS
from ..bench.results.aggregate import compute_bus_gb
from ..bench.results.case_result import CaseResult
from ..bench.results.columns import declare_number_column

RATES = (
    declare_number_column(
        "tflop_per_s",
        "three times the forward's matrix products and convolutions",
        shown="Arithmetic per device =",
    ),
    declare_number_column(
        "mfu_pct",
        "that arithmetic over the data sheet's peak",
        shown="MFU (% of the data sheet's peak) =",
    ),
    declare_number_column(
        "bus_gb_per_s",
        "bytes of the buckets / their part of communication alone x 2 (n - 1) / n, as nccl-tests defines it",
        shown="Bus bandwidth =",
    ),
)
"""Rates that `add_rates` adds to the columns of a case."""

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

    name: str
    """`batch 32, eager`, as far as it tells the workloads of a run apart; empty where there is one."""
    cases: Sequence[CaseResult]

    @property
    def device(self) -> str:
        """`GPU` or `CPU core`."""
        return name_device(self.cases[0].device_type)

    @property
    def unit(self) -> str:
        """Unit that its throughput counts."""
        return get_unit(self.cases)


def group_workloads(cases: Sequence[CaseResult]) -> list[WorkloadCases]:
    """Return the cases that worked, one entry per workload in order of appearance."""
    return [WorkloadCases(*one) for one in label_variants(case for case in cases if case.is_ok)]


def add_workload_names(measured: Sequence[WorkloadCases]) -> list[CaseResult]:
    """Return the cases of all workloads; where there are several, a column `workload` names theirs."""
    if len(measured) < 2:
        return [case for w in measured for case in w.cases]
    return [add_cells(replace(case, batch_name=""), workload=w.name) for w in measured for case in w.cases]


def select_mode(cases: Iterable[CaseResult], mode: str) -> list[CaseResult]:
    """Keep one case per device count; of DDP at its usual settings.

    Those are PyTorch's defaults; where a default was not measured, the first value that was.
    """
    found = [case for case in cases if case.mode == mode]
    for name, default in DDP_DEFAULTS.items() if mode == "ddp" else ():
        values = [case.get_setting(name) for case in found]
        usual = str(default) if str(default) in values else next(iter(values), "")
        found = [case for case in found if case.get_setting(name) == usual]
    firsts = {case.num_devices: case for case in reversed(found)}
    return [firsts[count] for count in sorted(firsts)]


def find_headline_count(cases: Sequence[CaseResult]) -> int | None:
    """Return how many devices the run's answers are of, in these cases; None without several."""
    return next((case.num_devices for case in select_headline(cases)), None)


def add_rates(case: CaseResult, manifest: Manifest) -> CaseResult:
    """Add rates with intervals: arithmetic of a device, and bus bandwidth of the buckets in 10^9 bytes/s.

    The manifest has the forward FLOPs of a sample. The bandwidth is as nccl-tests defines it.
    """
    found: dict[str, float] = {}
    flops, rate = manifest.model.forward_flops_per_image, case.images_per_s
    if rate is not None and flops and case.num_devices:
        achieved = rate.scale(PASSES * flops / case.num_devices / 1e12 / case.units_per_sample)
        found |= achieved.to_columns("tflop_per_s")
        if peak := DENSE_PEAKS.get(case.device_name, {}).get(case.precision):
            found |= achieved.scale(100 / peak).to_columns("mfu_pct")
    alone, layout = case.comm_ms, BucketLayout.from_cell(case.bucket_bytes)
    buffers_ms = case.buffers_ms.estimate if case.buffers_ms else 0.0
    if alone and layout and case.num_devices and alone.estimate > buffers_ms:
        sent_gb = compute_bus_gb(
            get_wire_share(case.get_text("comm_hook")) * sum(layout.num_bytes), case.num_devices
        )
        found |= alone.shift(-buffers_ms).invert(1000 * sent_gb).to_columns("bus_gb_per_s")
    return add_cells(case, **found)


def add_cells(case: CaseResult, **cells: Any) -> CaseResult:
    """Add what a table shows beside the columns of cases.csv."""
    return replace(case, cells={**case.cells, **cells})
