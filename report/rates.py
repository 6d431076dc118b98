"""Adds what a case's throughput comes to: arithmetic, MFU, bus bandwidth, the time and cost of an epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median

import pandas as pd

from ddp_bench.bench.case import wire_share
from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import Row, estimate, text, truth, unit_of, units_per_sample
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.aggregate import bus_gb
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.settings import IMAGES
from ddp_bench.bench.stats import Interval

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

COLUMNS = ("tflop_per_s", "bus_gb_per_s", "mfu_pct", "mfu_sheet_pct")


def with_rates(cases: pd.DataFrame, manifest: Manifest, price: float | None) -> pd.DataFrame:
    """Add `COLUMNS` with intervals, arithmetic being that of a device; `epoch_h` and `epoch_cost` of images.

    Args:
        cases: measured ones.
        manifest: of their run; the forward FLOPs of a sample and the devices' own rates are in it.
        price: of a device for an hour; None leaves the cost empty.
    """
    rows = [_rates(row, manifest, price) for row in records(cases)]
    names = [f"{name}{end}" for name in COLUMNS for end in ("", "_low", "_high")]
    added = {name: [row.get(name) for row in rows] for name in (*names, "epoch_h", "epoch_cost")}
    return cases.assign(**{name: pd.Series(cells, cases.index, "float64") for name, cells in added.items()})


def _rates(row: Row, manifest: Manifest, price: float | None) -> Mapping[str, float]:
    found: dict[str, float] = {}
    flops = manifest.model.forward_flops_per_image
    rate, num_devices = estimate(row, "images_per_s"), finite(row["num_devices"])
    if rate is not None and flops and num_devices:
        samples = rate.scaled(1 / units_per_sample(row))
        achieved = samples.scaled(PASSES * flops / num_devices / 1e12)
        found |= achieved.columns("tflop_per_s")
        sheet = DENSE_PEAKS.get(text(row["device_name"]), {}).get(text(row["precision"]))
        for name, peak in (("mfu_pct", _matrix_rate(row, manifest)), ("mfu_sheet_pct", sheet)):
            if peak:
                found |= achieved.scaled(100 / peak).columns(name)
    if (bus := bus_gb_per_s(row)) is not None:
        found |= bus.columns("bus_gb_per_s")
    sustained = finite(row["images_per_s_sustained"])
    if sustained and num_devices and unit_of(row) == IMAGES:
        found["epoch_h"] = EPOCH_IMAGES / sustained / 3600
        if price is not None:
            found["epoch_cost"] = found["epoch_h"] * num_devices * price
    return found


def _matrix_rate(row: Row, manifest: Manifest) -> float | None:
    """Return what the median of the case's devices reached in large matrix products, TFLOP/s."""
    wanted = _measured_count(row, {one.num_devices for one in manifest.roofline})
    rates = [one.matrix_tflop_per_s for one in manifest.roofline if one.num_devices == wanted]
    known = [rate for rate in rates if rate]
    return median(known) if known else None


def _measured_count(row: Row, counts: Collection[int]) -> float | None:
    """Return how many devices were measured together for a case."""
    own = finite(row["num_devices"])
    if own in counts or row["mode"] != "dp" or truth(row["oversubscribed"]):
        return own
    # One process drives all devices of DataParallel: there may be fewer ranks to measure them.
    return max(counts, default=None)


def bus_gb_per_s(row: Row) -> Interval | None:
    """Return the bus bandwidth of a case's buckets alone in 10^9 bytes/s, as nccl-tests defines it."""
    alone, ranks = estimate(row, "comm_ms"), finite(row["num_devices"])
    layout, buffers_ms = BucketLayout.of_cell(row["bucket_bytes"]), finite(row["buffers_ms"]) or 0.0
    if alone is None or layout is None or not ranks or not alone.estimate > buffers_ms:
        return None
    of_buckets = Interval(*(ms - buffers_ms for ms in (alone.estimate, alone.low, alone.high)))
    sent = wire_share(text(row["comm_hook"])) * sum(layout.num_bytes)
    return of_buckets.inverted(1000 * bus_gb(sent, int(ranks)))
