"""Holds each case against what its devices reach by themselves: MFU, and the roofline of its step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import pandas as pd

from ddp_bench.bench.conditions import Manifest, part
from ddp_bench.bench.findings.numbers import TIMES, finite, per_second
from ddp_bench.bench.findings.wording import Row, estimate, text, truth, unit_of_cases
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.stats import Interval
from ddp_bench.report.fields import NAME, Field, interval, table, value
from ddp_bench.report.model import Table
from ddp_bench.report.rates import PASSES
from ddp_bench.report.select import step_time

MOVES = 2.5
"""Bytes of forward and backward over those of the forward: a backward reads the gradient and the saved
input and writes the input's gradient, three tensors where the forward moved two."""

OPTIMIZER_MOVES = 5
"""SGD with momentum reads parameter, gradient and momentum, and writes parameter and momentum."""

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

COLUMNS = ("matrix_tflop_per_s", "copy_gb_per_s", "mfu_pct", "mfu_sheet_pct", "over_roofline")
_PLAIN = ("roofline_ms", "bandwidth_pct")
_NOTE = (
    "What a case reaches of what its devices do by themselves. Before the first case, as many devices at "
    "once multiplied large matrices in the run's precision and copied memory (bytes read + written): the "
    "median device, with the least and the most of all. MFU is the arithmetic per device over the matrix "
    "rate, or over the data sheet's dense peak. Roofline step: for each operator the longer of its "
    "arithmetic at the matrix rate and its memory traffic at the copy's bandwidth, each tensor read or "
    "written once in the run's precision. The backward counts as "
    f"{PASSES - 1} times the forward's arithmetic and {MOVES - 1:g} times its traffic, the optimizer as SGD "
    "with momentum; communication is left out, and operators that a compiler would fuse are not."
)
_BELOW_ROOFLINE = (
    "A step below its roofline: caches held what the roofline takes from memory, an algorithm (such as "
    "Winograd's convolution) needed less arithmetic, or the devices were slower while their rates were "
    "measured."
)
_FIELDS: tuple[Field, ...] = (
    interval("Arithmetic per device", "tflop_per_s", "TFLOP/s"),
    interval("Matrix rate", "matrix_tflop_per_s", "TFLOP/s"),
    interval("MFU", "mfu_pct", "% of the measured matrix rate"),
    interval("MFU", "mfu_sheet_pct", "% of the data sheet's peak"),
    interval("Copy", "copy_gb_per_s", "GB/s"),
    value("Roofline step", "roofline_ms", "ms"),
    interval("Step / roofline", "over_roofline", TIMES),
)


@dataclass(frozen=True)
class _Bound:
    """The least time of a step by the roofline, and the share of it in which bandwidth is the limit."""

    ms: float
    bandwidth_share: float


def with_roofline(cases: pd.DataFrame, manifest: Manifest) -> pd.DataFrame:
    """Add `COLUMNS` with intervals, `roofline_ms` and `bandwidth_pct` to cases that have `tflop_per_s`."""
    rows = [_found(row, manifest) for row in records(cases)]
    names = [*(f"{name}{end}" for name in COLUMNS for end in ("", "_low", "_high")), *_PLAIN]
    cells = {name: [row.get(name) for row in rows] for name in names}
    return cases.assign(**{name: pd.Series(c, cases.index, "float64") for name, c in cells.items()})


def roofline(ok: pd.DataFrame) -> Table | None:
    """Make the table, with what binds below it; None for a run whose devices were not measured."""
    own = ok[ok["matrix_tflop_per_s"].notna()]
    throughput = interval("Throughput", "images_per_s", per_second(unit_of_cases(ok)))
    made = table("Against the devices' own rates", _NOTE, own, NAME, (throughput, *_FIELDS))
    return None if made is None else replace(made, below=tuple(_notes(records(own))))


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    shares = [share for row in rows if (share := finite(row["bandwidth_pct"])) is not None]
    if shares:
        ends = dict.fromkeys(f"{share:.0f}" for share in (min(shares), max(shares)))
        yield (
            f"What binds: memory bandwidth for {' to '.join(ends)}% of the roofline step, arithmetic for the "
            "rest."
        )
    over = [found for row in rows if (found := estimate(row, "over_roofline")) is not None]
    if any(found.estimate < 1 for found in over):
        yield _BELOW_ROOFLINE


def _found(row: Row, manifest: Manifest) -> dict[str, float]:
    """Return the cells of a case, as far as its manifest tells them."""
    found: dict[str, float] = {}
    matrix, copy = (_rate(row, manifest, name) for name in COLUMNS[:2])
    achieved, step = estimate(row, "tflop_per_s"), step_time(row)
    peak = DENSE_PEAKS.get(text(row["device_name"]), {}).get(text(row["precision"]))
    for name, rate in (("mfu_pct", matrix.estimate if matrix else None), ("mfu_sheet_pct", peak)):
        if achieved is not None and rate:
            found |= achieved.scaled(100 / rate).columns(name)
    if matrix is None or copy is None:
        return found
    found |= matrix.columns(COLUMNS[0]) | copy.columns(COLUMNS[1])
    bound = _bound(row, part(manifest, "model"), matrix.estimate, copy.estimate)
    if bound is not None:
        found |= {"roofline_ms": bound.ms, "bandwidth_pct": 100 * bound.bandwidth_share}
        if step is not None:
            found |= step.scaled(1 / bound.ms).columns("over_roofline")
    return found


def _rate(row: Row, manifest: Manifest, name: str) -> Interval | None:
    """Return a rate of the median of the case's devices, with the least and the most of all."""
    listed = manifest.get("roofline")
    measured = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    wanted = _measured_count(row, {finite(one.get("num_devices")) for one in measured} - {None})
    rates = [estimate(one, name) for one in measured if finite(one.get("num_devices")) == wanted]
    known = [rate for rate in rates if rate is not None and rate.estimate > 0]
    if not known or wanted is None:
        return None
    return Interval(
        median(rate.estimate for rate in known),
        min(rate.low for rate in known),
        max(rate.high for rate in known),
    )


def _measured_count(row: Row, counts: Collection[float | None]) -> float | None:
    """Return how many devices were measured together for a case."""
    own = finite(row["num_devices"])
    if own in counts or row["mode"] != "dp" or truth(row["oversubscribed"]):
        return own
    # One process drives all devices of DataParallel: there may be fewer ranks to measure them.
    return max((count for count in counts if count is not None), default=None)


def _bound(row: Row, model: Manifest, tflop_per_s: float, gb_per_s: float) -> _Bound | None:
    """Return the roofline of a case's step; None where its operators are not known."""
    batch, micro_batches = finite(row["batch_per_device"]), finite(row["accumulate"]) or 1.0
    gradient_bytes = finite(model.get("gradient_bytes"))
    operators = _operators(model, batch)
    if not operators or gradient_bytes is None:
        return None
    costs = [(PASSES * micro_batches * flops, MOVES * micro_batches * moved) for flops, moved in operators]
    costs.append((0.0, OPTIMIZER_MOVES * gradient_bytes))
    times = [(flops / tflop_per_s / 1e9, moved / gb_per_s / 1e6) for flops, moved in costs]
    total = sum(max(pair) for pair in times)
    moving = sum(copied for calculated, copied in times if copied > calculated)
    return _Bound(total, moving / total) if 0 < total < math.inf else None


def _operators(model: Manifest, batch: float | None) -> list[tuple[float, float]]:
    """Return FLOPs and bytes of a forward's operators, those of equal cost together; none if any is odd."""
    listed = part(model, "operators").get("" if batch is None else f"{batch:.0f}")
    found = []
    for one in listed if isinstance(listed, list) else []:
        if not isinstance(one, dict):
            return []
        count, flops, moved = (finite(one.get(name)) for name in ("count", "flops", "num_bytes"))
        if count is None or flops is None or moved is None or min(count, flops, moved) < 0:
            return []
        found.append((count * flops, count * moved))
    return found
