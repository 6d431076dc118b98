"""The tables of a run: each a title, a note, and names of columns over rows of cases.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..bench.common.numbers import MIB, format_interval, format_number, format_rate_unit
from ..bench.findings.late_ranks import LateBucket
from ..bench.findings.verdicts import Saving
from ..bench.findings.wording import get_unit, label_case
from ..bench.page.page import Heading, Link, Table
from ..bench.results.case_columns import CASES
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import Comparison, select_compile_comparisons, select_unshared
from ..bench.results.run_folder import name_failure_file
from .cases import add_cells, add_workload_names, group_workloads
from .columns import NAMING, make_column

SAVINGS = Heading("Per step"), Heading("Where it goes", "long"), Heading("Try", "long")
"""Columns of what would save time."""

RESULTS, NOT_COMPARABLE, EVERY_COLUMN = "Results", "Also run, not comparable", "Every column"
ANATOMY = "Parts by the anatomy pass (backward includes waiting)"

TABLES = {
    RESULTS: (
        "",
        "name_in_parts workload devices cap step images_per_s speedup efficiency exposed_comm_ms hidden_pct "
        "vs_ddp_default peak_mem_mib num_rounds",
    ),
    NOT_COMPARABLE: ("", "name_in_parts workload devices cap step images_per_s why_apart"),
    "Not measured": (
        "Cases that were tried and have no numbers, and why.",
        "name status reason tracebacks case_id",
    ),
    "Side by side": (
        "Layers are split by the time that each takes.",
        "name workload form images_per_s speedup bound vs_ddp_default memory layers bubble_pct",
    ),
    ANATOMY: (
        "Per step, not the timed one: medians over ranks.",
        "name workload data_ms forward_ms backward_ms optimizer_ms anatomy_slowdown_pct",
    ),
    "Communication": (
        "Per step of every DDP case on several devices: several measures, as each leaves something out.",
        "name workload comm_ms buffers_ms bus_gb_per_s exposed_comm_ms exposed_by hidden_pct "
        "compute_slowdown rank_skew_ms no_sync_step_ms",
    ),
    "torch.compile": (
        "Compiled cases. Seconds are those that the first rank spent in the compiler, backward included: "
        "what its caches held already took less. Under ddp_optimizer the forward is split where DDP's "
        "buckets end, so that their all-reduces overlap with the backward: graphs beside buckets show "
        "whether it could. A graph break is a place where the model could not be one graph.",
        "name workload compiled optimised compile_s num_graphs num_buckets graph_breaks over_eager",
    ),
    "Bucket layouts": (
        "DDP's buckets after the rebuild. Caps that make equal sizes are the same layout.",
        "name workload num_buckets sizes",
    ),
    "GPUs under load": (
        "During timed blocks, sampled every 50 ms: the clock of the slowest GPU of a case, the power of all "
        "its GPUs together, without the host's. Slowed: heat or power held clocks down, on the worst GPU.",
        "name workload sm_clock_mhz power_w joules_per_image temperature_c throttled_pct throttle_reasons",
    ),
    "DataParallel's stages": (
        "Per step: DataParallel's own stages, in order.",
        "name workload dp_scatter_ms dp_replicate_ms dp_apply_ms dp_gather_ms dp_backward_ms dp_reduce_ms "
        "dp_device0_pct dp_device0_mem_ratio",
    ),
}
"""Note and names of columns of the tables of cases, by title."""

_OTHER_OVERLAPS = {"overlap_trace_pct", "overlap_window_pct"}
"""Overlap by other definitions: in cases.csv alone, so that one page has one."""

_FIRST = (
    "name workload images_per_s images_per_s_sustained vs_ddp_default speedup efficiency step_ms step_ms_p50 "
    "step_ms_p95 step_ms_p99 tflop_per_s mfu_pct peak_mem_mib reserved_mem_mib gradient_error update_error"
)
_NAMED = _OTHER_OVERLAPS.union(_FIRST.split(), *(names.split() for _, names in TABLES.values()))
# Metrics that no table names stand in this one.
_OTHERS = [entry.name for entry in CASES if entry.has_interval and entry.name not in _NAMED]
_LAST = "num_rounds traces num_devices case_id"
TABLES[EVERY_COLUMN] = ("All cases, those on shared devices too.", " ".join((_FIRST, *_OTHERS, _LAST)))

_DROPPED = {"speedup": 1, "exposed_comm_ms": 2, "efficiency": 3, "why_apart": 3, "step": 4, "hidden_pct": 5}
_DROPPED |= {"vs_ddp_default": 6, "peak_mem_mib": 7, "num_rounds": 8}
"""Order in which a narrow terminal leaves out columns of the results, the highest first."""


def tabulate(title: str, cases: Sequence[CaseResult], *, best: str = "") -> Table | None:
    """Make the table of that title in `TABLES`, for cases of one workload; None when nothing is left.

    Rows and columns that are blank but for names are left out. `best` is the id of the case that stands out,
    by a star.
    """
    note, listed = TABLES[title]
    dropped = _DROPPED if title in (RESULTS, NOT_COMPARABLE) else {}
    columns = {name: make_column(name, get_unit(cases)) for name in listed.split()}
    every = ((case, {name: column.cell(case) for name, column in columns.items()}) for case in cases)
    found = [(case, row) for case, row in every if any(row[name] for name in row if name not in NAMING)]
    if not found:
        return None
    first, *others = [name for name in columns if any(row[name] for _, row in found)]
    return Table(
        title,
        note,
        tuple(columns[name].heading._replace(drop=dropped.get(name, 0)) for name in (first, *others)),
        tuple(
            (f"{row[first]}{' ★' * (case.case_id == best)}", *(row[name] for name in others))
            for case, row in found
        ),
        names=tuple(label_case(case) for case, _ in found),
        best=next((i for i, (case, _) in enumerate(found) if case.case_id == best), None),
    )


def make_tables(ok: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> list[Table | None]:
    """Make the tables of the measured cases beside their results; None for one that has nothing to show.

    A column `workload` is blank where there is only one; `comparisons` are what the run answers.
    """
    ddp = [case for case in ok if case.mode == "ddp"]
    ratios = {one.case_id: one.ratio for one in select_compile_comparisons(comparisons, ok)}
    compiled = [
        add_cells(case, **ratios[case.case_id].to_columns("over_eager")) if case.case_id in ratios else case
        for case in ok
        if case.get_number("num_graphs") is not None
    ]
    if len({case.batch for case in compiled}) < 2:  # the mode tells their workloads apart
        compiled = [add_cells(case, workload="") for case in compiled]
    return [
        tabulate(EVERY_COLUMN, ok),
        tabulate(ANATOMY, ok),
        tabulate("Communication", [case for case in ddp if case.num_devices > 1]),
        tabulate("torch.compile", compiled),
        tabulate("GPUs under load", ok),
        tabulate("DataParallel's stages", [case for case in ok if case.mode == "dp"]),
        tabulate("Bucket layouts", ddp),
    ]


def tabulate_savings(savings: Sequence[Saving], note: str = "") -> Table | None:
    """Tabulate what changes would save of each step, the largest first; `note` says what it consists of."""
    rows = [(format_interval(one.ms, "ms"), one.label, f"try {one.remedy}") for one in savings]
    return Table("What would save time", note, SAVINGS, tuple(rows)) if rows else None


def tabulate_results(cases: Sequence[CaseResult], best: str = "", why_best: str = "") -> list[Table | None]:
    """Tabulate the measured cases that can be compared, then the others; `best` is the id of a star's."""
    every = add_workload_names(workloads := group_workloads(cases))
    own = [case for case in select_unshared(every) if not (case.is_stand_in or case.shares_gpu)] or every
    own_ids = {case.case_id for case in own}
    results = tabulate(RESULTS, own, best=best)
    can_compare = len(workloads) == 1 and sum(case.is_ranked and case.speedup is not None for case in own) > 1
    per_s = format_rate_unit(get_unit(own))
    advice = f"Compare speed-up, not {per_s}: a slow round changes {per_s}, but not the speed-up."
    below = (*([f"★ {why_best}."] if best else []), *([advice] if can_compare else []))
    return [
        results and replace(results, below=below),
        tabulate(NOT_COMPARABLE, [case for case in every if case.case_id not in own_ids]),
    ]


def tabulate_late_ranks(found: Sequence[LateBucket]) -> Table | None:
    """Tabulate which rank is last with each bucket, how often and by how much."""
    rows = [
        (
            f"{one.bucket}",
            format_number(one.num_bytes / MIB),
            f"rank {one.rank}" if one.later_ms.low > 0 else "no rank surely",
            f"{one.num_last} of {one.num_rounds}",
            format_interval(one.later_ms),
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


def tabulate_unmeasured(cases: Sequence[CaseResult], failures: Mapping[str, Link]) -> Table | None:
    """Tabulate every case that was tried and has no number; `failures` are the kept tracebacks by file."""
    kept = {case.case_id: failures.get(name_failure_file(case.case_id)) for case in cases}
    failed = [
        add_cells(case, tracebacks=tuple(filter(None, [kept[case.case_id]])))
        for case in cases
        if case.has_failed
    ]
    return tabulate("Not measured", failed)
