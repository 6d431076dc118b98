"""Says which tables of its cases a run has, and what stands in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from ddp_bench.bench.findings.numbers import (
    MIB,
    TIMES,
    finite,
    number,
    per_second,
    plural,
    singular,
    with_interval,
)
from ddp_bench.bench.findings.wording import Row, estimate, settings_label, short_mode, text, unit_of_cases
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.results.store import failure_file
from ddp_bench.report.communication import communication
from ddp_bench.report.compiling import compiling
from ddp_bench.report.fields import (
    APART,
    CASE_ID,
    NAME,
    SHARED,
    Field,
    interval,
    table,
    value,
    whole,
)
from ddp_bench.report.model import Hyperlink, Table, TableColumn
from ddp_bench.report.rates import EPOCH_IMAGES
from ddp_bench.report.select import unshared


def _against_default(row: Row) -> str:
    found = estimate(row, "vs_ddp_default")
    is_reference = found is not None and found.low == found.high == 1
    return "1, the default" if is_reference else with_interval(found)


MOST_UNKNOWN_COST_PCT = 25.0
"""Of the step: a cost that may be larger is no noise."""


def _cost(row: Row) -> str:
    """Write what instruments cost, which cannot be less than nothing."""
    found = estimate(row, "anatomy_slowdown_pct")
    if found is None:
        return ""
    least, most = (found.estimate if math.isnan(end) else end for end in (found.low, found.high))
    if least > 0:
        return with_interval(found)
    return "below the noise" if most <= MOST_UNKNOWN_COST_PCT else "not known"


def _off_by(column: str) -> Callable[[Row], str]:
    """Write an error of the proof, of which the power of ten matters."""

    def show(row: Row) -> str:
        found = finite(row[column])
        return "" if found is None else f"{found:.0e}" if found else "0"

    return show


AGAINST: Field = (TableColumn(f"Against DDP's default ({TIMES})", "number"), _against_default)
RESULTS: tuple[Field, ...] = (
    AGAINST,
    interval("Efficiency", "efficiency", "%", 100.0),
    value("Cost of an epoch", "epoch_cost", ""),
)
EVERY: tuple[Field, ...] = (
    interval("Steady state against the start", "steady_change_pct", "%"),
    AGAINST,
    interval("Speed-up", "speedup", TIMES),
    interval("Efficiency", "efficiency", "%", 100.0),
    interval("Step", "step_ms", "ms"),
    value("Step, median", "step_ms_p50", "ms"),
    value("Step, p95", "step_ms_p95", "ms"),
    interval("Arithmetic per device", "tflop_per_s", "TFLOP/s"),
    interval("MFU", "mfu_pct", "% of the measured matrix rate"),
    interval("MFU", "mfu_sheet_pct", "% of the data sheet's peak"),
    value("Peak memory", "peak_mem_mib", "MiB"),
    value("Reserved memory", "reserved_mem_mib", "MiB"),
    value("Epoch", "epoch_h", "h"),
    value("Cost of an epoch", "epoch_cost", ""),
    (TableColumn("Proof: gradients off by", "number"), _off_by("gradient_error")),
    (TableColumn("Proof: two steps off by", "number"), _off_by("update_error")),
)
ANATOMY: tuple[Field, ...] = (
    interval("Data", "data_ms", "ms"),
    interval("Forward", "forward_ms", "ms"),
    interval("Backward", "backward_ms", "ms"),
    interval("Optimizer", "optimizer_ms", "ms"),
    (TableColumn("Cost of instruments (%)", "number"), _cost),
)
DP_STAGES: tuple[Field, ...] = (
    interval("Scatter", "dp_scatter_ms", "ms"),
    interval("Replicate", "dp_replicate_ms", "ms"),
    interval("Apply", "dp_apply_ms", "ms"),
    interval("Gather", "dp_gather_ms", "ms"),
    interval("Backward", "dp_backward_ms", "ms"),
    interval("Reduce", "dp_reduce_ms", "ms"),
    interval("Only device 0 works", "dp_device0_pct", "%"),
    value("Memory of device 0 / mean of the others", "dp_device0_mem_ratio", TIMES),
)


CLOCK_AND_POWER: tuple[Field, ...] = (
    interval("SM clock", "sm_clock_mhz", "MHz"),
    interval("Power", "power_w", "W"),
)
HEAT: tuple[Field, ...] = (
    value("Temperature, highest", "temperature_c", "°C"),
    value("Slowed", "throttled_pct", "% of samples"),
    (TableColumn("Slowed by"), lambda row: text(row["throttle_reasons"])),
)


def _sizes(row: Row) -> str:
    layout = BucketLayout.of_cell(row["bucket_bytes"])
    return f"{' + '.join(number(size / MIB) for size in layout.num_bytes)} MiB" if layout else ""


BUCKETS: tuple[Field, ...] = (
    whole("Buckets", "num_buckets"),
    (TableColumn("Sizes in all-reduce order"), _sizes),
)
UNMEASURED: tuple[Field, ...] = (
    (TableColumn("Status"), lambda row: text(row["status"])),
    (TableColumn("Mode"), short_mode),
    whole("Devices", "num_devices"),
    SHARED,
    (TableColumn("DDP settings"), settings_label),
    (TableColumn("Reason", "long"), lambda row: text(row["reason"])),
)

_RESULTS_NOTE = (
    "Estimate (95% interval over rounds); the ratios to DDP's default at the same number of devices hold all "
    "at once. Efficiency is throughput over that of “single”, divided by devices."
)
_EVERY_NOTE = (
    "All cases, those on shared devices too. Speed-up is throughput over that of “single”. Arithmetic counts "
    "three times the forward's matrix products and convolutions. Steady state is the last half of --sustain, "
    "the start its first tenth. The proofs say how far, relatively, a case was off the plain "
    "module before it was timed: its gradients, and what two steps add to the parameters. cases.csv holds "
    "the measured numbers under the name in column “Id”."
)
_EPOCH_NOTE = (
    f" An epoch has the {EPOCH_IMAGES:,d} images of ImageNet-1k, of the size measured, at the throughput "
    "with pauses."
)
_MFU_NOTE = (
    " MFU is that arithmetic over what the devices do by themselves: the rate at which as many of them at "
    "once multiplied large matrices before the first case, or the data sheet's dense peak."
)
_PEAK_NOTE = (
    " Memory is that of the worst device: peak is in tensors; what libraries take beside them (CUDA, NCCL, "
    "oneDNN) is not counted."
)
_RESERVED_NOTE = " Reserved is what torch's allocator held for them."
_ANATOMY_NOTE = (
    "Per step, from the anatomy pass, which is not the timed one: the last column says how much slower its "
    "instruments make the step. Backward includes exposed communication."
)
_DP_NOTE = "Per step: DataParallel's own stages, in order. Outside apply and backward only device 0 works."
_GPU_LOAD_NOTE = (
    "During timed blocks, sampled every 50 ms: the clock of the slowest GPU of a case, the power of all its "
    "GPUs together, without the host's. Slowed: heat or power held the clocks down, on the worst GPU."
)
_STAND_IN = " “CPU stand-in”: the same stages, carried out on CPU cores and host memory."
_BUCKETS_NOTE = "DDP's buckets after the rebuild. Caps that make equal sizes are the same layout."


def tables(
    ok: pd.DataFrame,
    traces: Mapping[str, tuple[Hyperlink, ...]],
    comparisons: Sequence[Comparison] = (),
) -> tuple[Table, ...]:
    """Make the tables of the measured cases; `ok` has a column `workload`, blank where there is only one.

    `traces` are links by case; `comparisons` are what the run answers.
    """
    dp = ok[ok["mode"] == "dp"]
    dp_note = _DP_NOTE + (_STAND_IN if (dp["device_type"] == "cpu").any() else "")
    rounds = whole("Rounds", "num_rounds")

    def of_case(row: Row) -> tuple[Hyperlink, ...]:
        return traces.get(text(row["case_id"]), ())

    traced: Field = (
        TableColumn("Traces", "links"),
        lambda row: " ".join(one.label for one in of_case(row)),
    )
    unit = unit_of_cases(ok)
    per_s = per_second(unit)
    throughput = interval("Throughput", "images_per_s", per_s)
    other_rates = (
        interval("Throughput, pauses included", "images_per_s_sustained", per_s),
        interval("Throughput, steady state", "steady_images_per_s", per_s),
    )
    energy = interval("Energy", "joules_per_image", f"J/{singular(unit)}")
    own = unshared(ok)
    results = table(
        "Results",
        _RESULTS_NOTE,
        own,
        NAME,
        (throughput, *RESULTS, rounds),
    )
    folded = len(ok) - len(own)
    if results is not None and folded:
        left_out = f"{plural(folded, 'case')} on shared devices: see “Every column”."
        results = replace(results, below=(left_out,))
    every = (throughput, *other_rates, *EVERY, rounds, traced, *APART, CASE_ID)
    notes = {
        "mfu_pct": _MFU_NOTE,
        "epoch_h": _EPOCH_NOTE,
        "peak_mem_mib": _PEAK_NOTE,
        "reserved_mem_mib": _RESERVED_NOTE,
    }
    every_note = _EVERY_NOTE + "".join(note for name, note in notes.items() if ok[name].notna().any())
    made = (
        results,
        table("Every column", every_note, ok, NAME, every, links=of_case),
        table("Where the step goes", _ANATOMY_NOTE, ok, NAME, ANATOMY),
        communication(ok),
        compiling(ok, comparisons),
        table("GPUs under load", _GPU_LOAD_NOTE, ok, NAME, (*CLOCK_AND_POWER, energy, *HEAT)),
        table("DataParallel's stages", dp_note, dp, NAME, DP_STAGES),
        table("Bucket layouts", _BUCKETS_NOTE, ok[ok["mode"] == "ddp"], NAME, BUCKETS),
    )
    return tuple(made_table for made_table in made if made_table is not None)


def unmeasured(cases: pd.DataFrame, failures: Mapping[str, Hyperlink]) -> Table | None:
    """Tabulate every case without a measurement, and why; `failures` are the kept tracebacks by file."""

    def kept(row: Row) -> tuple[Hyperlink, ...]:
        found = failures.get(failure_file(text(row["case_id"]))) if row["status"] != "skipped" else None
        return () if found is None else (found,)

    rows = cases[cases["status"] != "ok"]
    tracebacks = (
        TableColumn("Tracebacks", "links"),
        lambda row: " ".join(one.label for one in kept(row)),
    )
    return table(
        "Not measured",
        "Planned cases that have no numbers, and why.",
        rows,
        (),
        (*UNMEASURED, tracebacks, CASE_ID),
        links=lambda row: tuple(one for one in kept(row) if one.href),
    )
