"""Makes tables of cases, columns over rows of cases.csv; and what the words of the page mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ..bench.common.numbers import format_integer, format_interval, format_number
from ..bench.findings.wording import (
    DEFAULT_CAP,
    get_hidden_share,
    get_unit,
    label_case,
    label_settings,
    name_mode_short,
)
from ..bench.page.page import Cell, Heading, Table
from ..bench.plan.settings import IMAGES
from ..bench.results.case_columns import CASES, name_unit
from ..bench.results.case_result import CaseResult
from ..bench.results.columns import Column as Entry
from ..bench.results.columns import Metric
from ..bench.results.metrics import SINGLE
from .cases import RATES

ENTRIES = {entry.name: entry for entry in (*CASES, *RATES)}
"""Columns of cases.csv, and rates that follow from them, by name."""

TERMS = {
    **{Heading(one.heading).term: one.explanation for one in ENTRIES.values() if one.explanation},
    "Cap": "DDP closes a bucket when its gradients reach this size, and sends it as one all-reduce. "
    f"{DEFAULT_CAP}",
    "Bound": "the speed-up of equal stages without communication, n m / (m + n - 1) on n devices with m "
    "micro-batches",
}
"""Meanings of the words of figures and the headings of tables: said once, where each first stands."""

RESULTS = (
    *("step_ms", "images_per_s", "speedup", "efficiency", "exposed_comm_ms", "hidden_pct", "vs_ddp_default"),
    *("peak_mem_mib", "num_rounds"),
)

ANATOMY = "Parts by the anatomy pass (backward includes waiting)"
TABLES = {
    "Side by side": (
        "Layers are split by the time that each takes.",
        "images_per_s speedup vs_ddp_default bubble_pct",
    ),
    ANATOMY: (
        "Per step, not the timed one: medians over ranks.",
        "data_ms forward_ms backward_ms optimizer_ms anatomy_slowdown_pct",
    ),
    "Communication": (
        "Per step of every DDP case on several devices: several measures, as each leaves something out.",
        "comm_ms buffers_ms bus_gb_per_s exposed_comm_ms exposed_by hidden_pct "
        "compute_slowdown rank_skew_ms no_sync_step_ms",
    ),
    "torch.compile": (
        "Compiled cases. Seconds are those that the first rank spent in the compiler, backward included: "
        "what its caches held already took less. Under ddp_optimizer the forward is split where DDP's "
        "buckets end, so that their all-reduces overlap with the backward: graphs beside buckets show "
        "whether it could. A graph break is a place where the model could not be one graph.",
        "compile_s num_graphs num_buckets graph_breaks",
    ),
    "Bucket layouts": (
        "DDP's buckets after the rebuild. Caps that make equal sizes are the same layout.",
        "num_buckets",
    ),
    "GPUs under load": (
        "During timed blocks, sampled every 50 ms: the clock of the slowest GPU of a case, the power of all "
        "its GPUs together, without the host's. Slowed: heat or power held clocks down, on the worst GPU.",
        "sm_clock_mhz power_w joules_per_image temperature_c throttled_pct throttle_reasons",
    ),
    "DataParallel's stages": (
        "Per step: DataParallel's own stages, in order.",
        "dp_scatter_ms dp_replicate_ms dp_apply_ms dp_gather_ms dp_backward_ms dp_reduce_ms dp_device0_pct "
        "dp_device0_mem_ratio",
    ),
    "Every column": (
        "All cases, those on shared devices too.",
        "images_per_s images_per_s_sustained vs_ddp_default speedup efficiency step_ms step_ms_p50 "
        "step_ms_p95 step_ms_p99 tflop_per_s mfu_pct peak_mem_mib reserved_mem_mib gradient_error "
        "update_error",
    ),
}
"""Note and names of columns of further tables by title; metrics that none names stand in the last."""

_OTHER_OVERLAPS = "overlap_trace_pct", "overlap_window_pct"
"""Overlap by other definitions: in cases.csv alone, so that one page has one."""

_NAMED = (*RESULTS, *_OTHER_OVERLAPS, *" ".join(names for _, names in TABLES.values()).split())
_OTHERS = [entry.name for entry in CASES if entry.has_interval and entry.name not in _NAMED]


class CaseColumn(NamedTuple):
    """A column of a table of cases, and what stands in it of a case."""

    heading: Heading
    cell: Callable[[CaseResult], Cell]


def make_table(
    title: str, note: str, cases: Iterable[CaseResult], columns: Sequence[CaseColumn], *, best: str = ""
) -> Table | None:
    """Make a table without rows and columns that are blank but for names; None when nothing is left.

    `best` is the id of the case that stands out, by a star.
    """
    values = [i for i, column in enumerate(columns) if column not in (*NAME, *NAME_IN_PARTS)]
    found = [(case, tuple(column.cell(case) for column in columns)) for case in cases]
    found = [(case, row) for case, row in found if any(row[i] for i in values)]
    if not found:
        return None
    kept = [i for i in range(len(columns)) if any(row[i] for _, row in found)]
    return Table(
        title,
        note,
        tuple(columns[i].heading for i in kept),
        tuple((f"{row[0]}{' ★' * (c.case_id == best)}", *(row[i] for i in kept[1:])) for c, row in found),
        names=tuple(label_case(case) for case, _ in found),
        best=next((i for i, (case, _) in enumerate(found) if case.case_id == best), None),
    )


def make_text_column(name: str, cell: Callable[[CaseResult], str], kind: str = "") -> CaseColumn:
    """Make a column of text."""
    return CaseColumn(Heading(name, kind), cell)


def tabulate(
    title: str,
    cases: Sequence[CaseResult],
    *,
    before: Sequence[CaseColumn] | None = None,
    after: Sequence[CaseColumn] = (),
) -> Table | None:
    """Make the table of that title in `TABLES`, with columns before and after its own; first the names."""
    note, names = TABLES[title]
    own = make_columns(names.split() + (_OTHERS if title == "Every column" else []), cases)
    return make_table(title, note, cases, (*(NAME if before is None else before), *own, *after))


def make_columns(names: Iterable[str], cases: Sequence[CaseResult]) -> list[CaseColumn]:
    """Make columns by their names, for cases of one workload."""
    return [make_column(name, get_unit(cases)) for name in names]


def make_column(name: str, unit: str = IMAGES) -> CaseColumn:
    """Make a column of what `ENTRIES` names, with its unit in the heading; rates count `unit`."""
    entry = ENTRIES[name]
    unit = name_unit(entry, unit) if entry.kind == "float" and " (" not in entry.heading else ""
    kind = "" if entry.kind == "text" else "number"
    heading = Heading(f"{entry.heading} ({unit})" if unit else entry.heading, kind)
    return CaseColumn(heading, _CELLS.get(name) or partial(_write_cell, entry))


def _write_cell(entry: Entry, case: CaseResult) -> str:
    """Write a cell: a number with its interval where known."""
    if entry.kind == "text":
        return case.get_text(entry.name)
    if entry.kind == "int":
        return format_integer(case.get_number(entry.name))
    if entry.formula and SINGLE in entry.formula.phases and not case.is_ranked:
        return ""  # it says nothing
    factor = 100.0 if isinstance(entry, Metric) and entry.written.endswith("%}") else 1.0
    found = case.get_interval(entry.name)
    if found is not None and found.low == found.high:  # as of the reference: no interval has no width
        return format_number(found.estimate * factor)
    return format_interval(found, "", factor)


def _format_cost(case: CaseResult) -> str:
    """Write what instruments cost, which cannot be less than nothing."""
    found = case.get_interval("anatomy_slowdown_pct")
    is_noise = found is not None and min(found.estimate, found.low) <= 0
    return "below the noise" if is_noise else format_interval(found)


def _format_overlap(case: CaseResult) -> str:
    """Write the overlap in percent: 0 where communication adds more than it takes by itself."""
    found = get_hidden_share(case)
    return "0" if found and found.estimate < 0 else format_interval(found)


def _format_over_default(case: CaseResult) -> str:
    found = None if case.shares_gpu or case.is_stand_in else case.get_interval("vs_ddp_default")
    is_reference = found is not None and found.low == found.high == 1
    return "1, the default" if is_reference else format_interval(found)


def _format_power_of_ten(name: str, case: CaseResult) -> str:
    """Write an error of the proof, of which the power of ten matters."""
    found = case.get_number(name)
    return "" if found is None else f"{found:.0e}" if found else "0"


_CELLS: dict[str, Callable[[CaseResult], str]] = {
    "anatomy_slowdown_pct": _format_cost,
    "exposed_by": lambda case: case.exposed_by if case.exposed_comm_ms else "",
    "gradient_error": partial(_format_power_of_ten, "gradient_error"),
    "hidden_pct": _format_overlap,
    "update_error": partial(_format_power_of_ten, "update_error"),
    "vs_ddp_default": _format_over_default,
}
"""Cells that are not just the number or the text, by column."""


def _name_mode(case: CaseResult) -> str:
    parts = (name_mode_short(case), label_settings(case, with_cap=False), "shared" * case.oversubscribed)
    return ", ".join(filter(None, parts))


_WORKLOAD = make_text_column("Workload", lambda case: case.get_text("workload"))
NAME = (make_text_column("Case", label_case), _WORKLOAD)
NAME_IN_PARTS = (
    make_text_column("Case", _name_mode, "short"),
    _WORKLOAD,
    make_text_column("Devices", lambda case: f"{case.num_devices}", "number"),
    make_text_column(
        "Cap (MiB)", lambda case: case.get_setting("bucket_cap_mb") * (case.mode == "ddp"), "number"
    ),
)
