"""The tables of a run: each a list of columns over rows of cases.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..bench.common.numbers import MIB, TIMES, number, per_second, singular, with_interval
from ..bench.findings.late_ranks import LateBucket
from ..bench.findings.wording import hidden_percent, hidden_share, unit_of_cases
from ..bench.page.page import Heading, Link, Table
from ..bench.plan.buckets import BucketLayout
from ..bench.results.case_result import CaseResult
from ..bench.results.columns import EXPOSED_COMM
from ..bench.results.comparisons import Comparison, on_own_devices, over_eager
from ..bench.results.run_folder import failure_file
from .cases import named, workloads
from .table import NAME, NAME_IN_PARTS, Column, figures, table, whole, words

_ID = words("Id", lambda case: case.case_id)
_ROUNDS = whole("Rounds", "num_rounds", drop=8)


def _ranked(column: Column) -> Column:
    """Leave out of a column the cases whose speed-up says nothing."""
    return column._replace(cell=lambda case: column.cell(case) if case.is_ranked else "")


SPEEDUP = _ranked(figures("Speed-up", "speedup", TIMES, drop=1))
_EFFICIENCY = _ranked(figures("Efficiency", "efficiency", "%", 100.0, drop=3))
_EXPOSED = figures("Exposed", EXPOSED_COMM, "ms", drop=2)
_EXPOSED_BY = words("Exposed by", lambda case: case.exposed_by if case.exposed_comm_ms else "")
_OVERLAP = words("Overlap (%)", lambda case: hidden_percent(hidden_share(case), with_interval), "number", 5)
_PEAK = figures("Peak memory", "peak_mem_mib", "MiB", drop=7)
_STEP = words("Step (ms)", lambda case: number(case.number("step_ms")), "number", 4)


def _over_default(case: CaseResult) -> str:
    found = None if case.answers_nothing or case.is_stand_in else case.interval("vs_ddp_default")
    is_reference = found is not None and found.low == found.high == 1
    return "1, the default" if is_reference else with_interval(found)


_AGAINST = words(f"Against DDP's default ({TIMES})", _over_default, "number", 6)


def tables(
    ok: Sequence[CaseResult], traces: Mapping[str, tuple[Link, ...]], comparisons: Sequence[Comparison]
) -> list[Table | None]:
    """Make the tables of the measured cases beside their results; None for one that has nothing to show.

    Args:
        ok: the cases; a column `workload` is blank where there is only one.
        traces: links by case.
        comparisons: what the run answers.
    """
    ddp = [case for case in ok if case.mode == "ddp"]
    return [
        _every_column(ok, traces),
        _anatomy(ok),
        communication([case for case in ddp if case.num_devices > 1]),
        _compiling(ok, comparisons),
        _gpu_load(ok),
        _dp_stages([case for case in ok if case.mode == "dp"]),
        layouts(ddp),
    ]


def results(cases: Sequence[CaseResult], best: str = "") -> list[Table | None]:
    """Tabulate the measured cases that can be compared, then the others; `best` is the id of the fastest."""
    every = named(workloads(cases))
    own = [case for case in on_own_devices(every) if not case.is_stand_in] or every
    own_ids = {case.case_id for case in own}
    others = [case for case in every if case.case_id not in own_ids]
    rate = figures("Throughput", "images_per_s", per_second(unit_of_cases(every)))
    ratios = SPEEDUP, _EFFICIENCY, _EXPOSED, _OVERLAP, _AGAINST
    shown = (*NAME_IN_PARTS, _STEP, rate)
    return [
        table("Results", "", own, (*shown, *ratios, _PEAK, _ROUNDS), best=best),
        table("Also run, not comparable", "", others, (*shown, words("Why", _why_not_comparable, "short"))),
    ]


def _why_not_comparable(case: CaseResult) -> str:
    """Say why a case's speed is not held against that of others."""
    shared = "devices are shared: shows that it runs" if case.oversubscribed else ""
    return shared or "emulated: not DP's speed on GPUs"


def _every_column(ok: Sequence[CaseResult], traces: Mapping[str, tuple[Link, ...]]) -> Table | None:
    per_s = per_second(unit_of_cases(ok))
    columns = (
        *NAME,
        figures("Throughput", "images_per_s", per_s),
        figures("Throughput, pauses included", "images_per_s_sustained", per_s),
        _AGAINST,
        SPEEDUP,
        _EFFICIENCY,
        figures("Step", "step_ms", "ms"),
        figures("Step, median", "step_ms_p50", "ms"),
        figures("Step, p95", "step_ms_p95", "ms"),
        figures("Step, p99", "step_ms_p99", "ms"),
        figures("Arithmetic per device", "tflop_per_s", "TFLOP/s"),
        figures("MFU", "mfu_pct", "% of the data sheet's peak"),
        _PEAK,
        figures("Reserved memory", "reserved_mem_mib", "MiB"),
        words("Proof: gradients off by", lambda case: _power_of_ten(case.number("gradient_error")), "number"),
        words("Proof: two steps off by", lambda case: _power_of_ten(case.number("update_error")), "number"),
        _ROUNDS,
        Column(Heading("Traces", "links"), lambda case: traces.get(case.case_id, ())),
        whole("Devices", "num_devices"),
        _ID,
    )
    return table("Every column", "All cases, those on shared devices too.", ok, columns)


def _power_of_ten(found: float | None) -> str:
    """Write an error of the proof, of which the power of ten matters."""
    return "" if found is None else f"{found:.0e}" if found else "0"


def _anatomy(ok: Sequence[CaseResult]) -> Table | None:
    def cost(case: CaseResult) -> str:
        """Write what instruments cost, which cannot be less than nothing."""
        found = case.interval("anatomy_slowdown_pct")
        is_noise = found is not None and min(found.estimate, found.low) <= 0
        return "below the noise" if is_noise else with_interval(found)

    phases = ("data", "forward", "backward", "optimizer")
    return table(
        "Where the step goes",
        "Per step, from the anatomy pass, not the timed one: medians over ranks. Backward includes exposed "
        "communication.",
        ok,
        (
            *NAME,
            *(figures(name.capitalize(), f"{name}_ms", "ms") for name in phases),
            words("Cost of instruments (%)", cost, "number"),
        ),
    )


def _dp_stages(dp: Sequence[CaseResult]) -> Table | None:
    stages = ("scatter", "replicate", "apply", "gather", "backward", "reduce")
    return table(
        "DataParallel's stages",
        "Per step: DataParallel's own stages, in order.",
        dp,
        (
            *NAME,
            *(figures(name.capitalize(), f"dp_{name}_ms", "ms") for name in stages),
            figures("Only device 0 works", "dp_device0_pct", "%"),
            figures("Memory of device 0 / mean of the others", "dp_device0_mem_ratio", TIMES),
        ),
    )


def _gpu_load(ok: Sequence[CaseResult]) -> Table | None:
    return table(
        "GPUs under load",
        "During timed blocks, sampled every 50 ms: the clock of the slowest GPU of a case, the power of all "
        "its GPUs together, without the host's. Slowed: heat or power held clocks down, on the worst GPU.",
        ok,
        (
            *NAME,
            figures("SM clock", "sm_clock_mhz", "MHz"),
            figures("Power", "power_w", "W"),
            figures("Energy", "joules_per_image", f"J/{singular(unit_of_cases(ok))}"),
            figures("Temperature, highest", "temperature_c", "°C"),
            figures("Slowed", "throttled_pct", "% of samples"),
            words("Slowed by", lambda case: case.throttle_reasons),
        ),
    )


def _sizes(case: CaseResult) -> str:
    layout = BucketLayout.of_cell(case.bucket_bytes)
    return f"{' + '.join(number(size / MIB) for size in layout.num_bytes)} MiB" if layout else ""


def layouts(ddp: Sequence[CaseResult]) -> Table | None:
    """Tabulate DDP's buckets."""
    note = "DDP's buckets after the rebuild. Caps that make equal sizes are the same layout."
    sizes = (whole("Buckets", "num_buckets"), words("Sizes in all-reduce order", _sizes))
    return table("Bucket layouts", note, ddp, (*NAME, *sizes))


def communication(ddp: Sequence[CaseResult]) -> Table | None:
    """Tabulate what communication costs DDP cases, in several measures."""
    columns = (
        *NAME,
        figures("Communication alone", "comm_ms", "ms"),
        figures("Buffers", "buffers_ms", "ms"),
        figures("Bus bandwidth", "bus_gb_per_s", "GB/s"),
        _EXPOSED,
        _EXPOSED_BY,
        _OVERLAP,
        figures("Overlap, trace", "overlap_trace_pct", "%"),
        figures("Overlap, DDP window", "overlap_window_pct", "%"),
        figures("Compute slow-down", "compute_slowdown", TIMES),
        figures("Rank skew", "rank_skew_ms", "ms"),
        figures("Step without synchronising", "no_sync_step_ms", "ms"),
    )
    note = "Per step of every DDP case on several devices: several measures, as each leaves something out."
    return table("Communication", note, ddp, columns)


def late_ranks(found: Sequence[LateBucket]) -> Table | None:
    """Tabulate which rank is last with each bucket, how often and by how much."""
    rows = [
        (
            f"{one.bucket}",
            number(one.num_bytes / MIB),
            f"rank {one.rank}" if one.later_ms.low > 0 else "no rank surely",
            f"{one.num_last} of {one.num_rounds}",
            with_interval(one.later_ms),
        )
        for one in found
    ]
    names = ("Bucket", "Size (MiB)", "Ready last", "Rounds", "Later (ms)")
    columns = tuple(Heading(name, "" if name == "Ready last" else "number") for name in names)
    note = (
        "DDP's default: the rank that is last with the gradients of a bucket, by its own work since the "
        "last collective of the step before; no clocks are compared. Rounds: in which it was the last. "
        "Later: than the rank before it, below 0 where it was not the last. From the anatomy pass."
    )
    return Table("Late ranks", note, columns, tuple(rows)) if rows else None


def _compiling(ok: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> Table | None:
    compiled = [case for case in ok if case.number("num_graphs") is not None]
    ratios = {one.case_id: one.ratio for one in over_eager(comparisons, ok)}
    return table(
        "torch.compile",
        "Compiled cases. Seconds are those that the first rank spent in the compiler, backward included: "
        "what its caches held already took less. Under ddp_optimizer the forward is split where DDP's "
        "buckets end, so that their all-reduces overlap with the backward: graphs beside buckets show "
        "whether it could. A graph break is a place where the model could not be one graph.",
        compiled,
        (
            *(NAME if len({case.batch for case in compiled}) > 1 else NAME[:1]),
            words("Mode", lambda case: case.compile),
            words("DDP is optimised by", lambda case: case.text("optimize_ddp") * (case.mode == "ddp")),
            figures("Compiling", "compile_s", "s"),
            whole("Graphs", "num_graphs"),
            whole("DDP's buckets", "num_buckets"),
            whole("Graph breaks", "graph_breaks"),
            words(f"Against eager ({TIMES})", lambda case: with_interval(ratios.get(case.case_id)), "number"),
        ),
    )


def unmeasured(cases: Sequence[CaseResult], failures: Mapping[str, Link]) -> Table | None:
    """Tabulate every case that was tried and has no number; `failures` are the kept tracebacks by file."""

    def kept(case: CaseResult) -> tuple[Link, ...]:
        found = failures.get(failure_file(case.case_id))
        return () if found is None else (found,)

    return table(
        "Not measured",
        "Cases that were tried and have no numbers, and why.",
        [case for case in cases if case.has_failed],
        (
            NAME[0],
            words("Status", lambda case: case.status),
            words("Reason", lambda case: case.reason, "long"),
            Column(Heading("Tracebacks", "links"), kept),
            _ID,
        ),
    )
