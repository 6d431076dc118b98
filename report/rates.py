"""Adds what a case's throughput comes to: arithmetic, bus bandwidth, the time and cost of an epoch."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ddp_bench.bench.case import wire_share
from ddp_bench.bench.conditions import Manifest, part
from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import Row, estimate, text, unit_of, units_per_sample
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.results.aggregate import bus_gb
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.settings import IMAGES
from ddp_bench.bench.stats import Interval

EPOCH_IMAGES = 1_281_167
"""Training images of ImageNet-1k (Russakovsky et al., 2015)."""

PASSES = 3
"""Forward, gradient of the weights, gradient of the inputs: as much arithmetic each in convolutions."""

COLUMNS = ("tflop_per_s", "bus_gb_per_s")


def with_rates(cases: pd.DataFrame, manifest: Manifest, price: float | None) -> pd.DataFrame:
    """Add `tflop_per_s` per device and `bus_gb_per_s` with intervals, `epoch_h` and `epoch_cost` of images.

    Args:
        cases: measured ones.
        manifest: of their run; the forward FLOPs of a sample are in it.
        price: of a device for an hour; None leaves the cost empty.
    """
    flops = finite(part(manifest, "model").get("forward_flops_per_image"))
    rows = [_rates(row, flops, price) for row in records(cases)]
    names = [f"{name}{end}" for name in COLUMNS for end in ("", "_low", "_high")]
    added = {name: [row.get(name) for row in rows] for name in (*names, "epoch_h", "epoch_cost")}
    return cases.assign(**{name: pd.Series(cells, cases.index, "float64") for name, cells in added.items()})


def _rates(row: Row, flops: float | None, price: float | None) -> Mapping[str, float]:
    found: dict[str, float] = {}
    rate, num_devices = estimate(row, "images_per_s"), finite(row["num_devices"])
    if rate is not None and flops and num_devices:
        samples = rate.scaled(1 / units_per_sample(row))
        found |= samples.scaled(PASSES * flops / num_devices / 1e12).columns("tflop_per_s")
    if (bus := bus_gb_per_s(row)) is not None:
        found |= bus.columns("bus_gb_per_s")
    sustained = finite(row["images_per_s_sustained"])
    if sustained and num_devices and unit_of(row) == IMAGES:
        found["epoch_h"] = EPOCH_IMAGES / sustained / 3600
        if price is not None:
            found["epoch_cost"] = found["epoch_h"] * num_devices * price
    return found


def bus_gb_per_s(row: Row) -> Interval | None:
    """Return the bus bandwidth of a case's buckets alone in 10^9 bytes/s, as nccl-tests defines it."""
    alone, ranks = estimate(row, "comm_ms"), finite(row["num_devices"])
    layout, buffers_ms = BucketLayout.of_cell(row["bucket_bytes"]), finite(row["buffers_ms"]) or 0.0
    if alone is None or layout is None or not ranks or not alone.estimate > buffers_ms:
        return None
    of_buckets = Interval(*(ms - buffers_ms for ms in (alone.estimate, alone.low, alone.high)))
    sent = wire_share(text(row["comm_hook"])) * sum(layout.num_bytes)
    return of_buckets.inverted(1000 * bus_gb(sent, int(ranks)))
