"""The columns of the page's tables by name, those of cases.csv and others; and what the page's words mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..bench.common.numbers import MIB, TIMES, format_integer, format_interval, format_number, format_short
from ..bench.findings.wording import (
    get_hidden_share,
    label_case,
    label_settings,
    name_mode,
)
from ..bench.page.page import Cell, Heading
from ..bench.plan.buckets import BucketLayout
from ..bench.plan.modes import STAGED
from ..bench.plan.settings import IMAGES
from ..bench.results.case_columns import CASES, name_unit
from ..bench.results.case_result import CaseResult, parse_finite
from ..bench.results.columns import Column, Metric
from ..bench.results.metrics import SINGLE
from .cases import RATES

ENTRIES = {entry.name: entry for entry in (*CASES, *RATES)}
"""Columns of cases.csv, and rates that follow from them, by name."""

TERMS = {
    **{Heading(one.heading).term: one.explanation for one in ENTRIES.values() if one.explanation},
    "Cap": "DDP closes a bucket when its gradients reach this size, and sends it as one all-reduce. "
    "Cap default is PyTorch's: a first bucket of 1 MiB, then 25 MiB",
    "Bound": "the speed-up of equal stages without communication, n m / (m + n - 1) on n devices with m "
    "micro-batches",
}
"""Meanings of the words of figures and the headings of tables: said once, where each first stands."""

FORMS = {
    "dp": "data parallel",
    "ddp": "data parallel",
    "replicate": "data parallel",
    "fsdp": "data parallel, sharded",
    "pipeline": "model parallel",
    "partition": "workload partitioning",
}
"""Modes by the form of parallel training that they belong to, in the order of its section."""


class CaseColumn(NamedTuple):
    """A column of a table of cases, and what stands in it of a case."""

    heading: Heading
    cell: Callable[[CaseResult], Cell]


def make_column(name: str, unit: str = IMAGES) -> CaseColumn:
    """Make the column of that name; of a number with its unit in the heading, and rates count `unit`."""
    if name in _COLUMNS:
        title, kind, cell = _COLUMNS[name]
        return CaseColumn(Heading(title, kind), cell)
    entry = ENTRIES[name]
    unit = name_unit(entry, unit) if entry.kind == "float" and " (" not in entry.heading else ""
    kind = "" if entry.kind == "text" else "number"
    heading = Heading(f"{entry.heading} ({unit})" if unit else entry.heading, kind)
    return CaseColumn(heading, _CELLS.get(name) or partial(_write_cell, entry))


def _write_cell(entry: Column, case: CaseResult) -> str:
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
"""Cells of `ENTRIES` that are not just the number or the text, by column."""


def _name_in_parts(case: CaseResult) -> str:
    parts = (name_mode(case), label_settings(case, with_cap=False), "shared" * case.oversubscribed)
    return ", ".join(filter(None, parts))


def _format_sizes(case: CaseResult) -> str:
    layout = BucketLayout.from_cell(case.bucket_bytes)
    return f"{' + '.join(format_number(size / MIB) for size in layout.num_bytes)} MiB" if layout else ""


def _format_memory(case: CaseResult) -> str:
    found = map(parse_finite, case.get_text("mem_by_device_mib").split("/"))
    return " / ".join(format_short(mib, 3 if mib < 1000 else 4) for mib in found if mib)


def _format_bound(case: CaseResult) -> str:
    """Write the speed-up of equal stages without communication; empty for a mode without stages.

    Source: Huang et al. 2019, "GPipe", section 2.3: a bubble of (n - 1) / (m + n - 1).
    """
    n, m = case.num_devices, case.micro_batches or 1.0
    return format_number(n * m / (m + n - 1)) if case.mode in STAGED else ""


NAMING = ("name", "name_in_parts", "workload", "devices", "cap")
"""Columns that name a case."""

_COLUMNS: dict[str, tuple[str, str, Callable[[CaseResult], Cell]]] = {
    "name": ("Case", "", label_case),
    "name_in_parts": ("Case", "short", _name_in_parts),
    "workload": ("Workload", "", lambda case: case.get_text("workload")),
    "devices": ("Devices", "number", lambda case: f"{case.num_devices}"),
    "cap": ("Cap (MiB)", "number", lambda case: case.get_setting("bucket_cap_mb") * (case.mode == "ddp")),
    "step": ("Step (ms)", "number", lambda case: format_number(case.get_number("step_ms"))),
    "why_apart": (
        *("Why", "short"),
        lambda case: "devices are shared" if case.oversubscribed else "emulated on CPU cores",
    ),
    "reason": ("Reason", "long", lambda case: case.reason),
    "tracebacks": ("Tracebacks", "links", lambda case: case.cells.get("tracebacks", ())),
    "traces": ("Traces", "links", lambda case: case.cells.get("traces", ())),
    "form": ("Form", "", lambda case: FORMS.get(case.mode, "")),
    "bound": (f"Bound ({TIMES})", "number", _format_bound),
    "memory": ("Memory of each device (MiB)", "", _format_memory),
    "layers": (
        *("Layers of each device", ""),
        lambda case: case.get_text("layers_by_device").replace("/", " + "),
    ),
    "compiled": ("Mode", "", lambda case: case.compile),
    "optimised": (
        *("DDP is optimised by", ""),
        lambda case: case.get_text("optimize_ddp") * (case.mode == "ddp"),
    ),
    "over_eager": (
        *(f"Against eager ({TIMES})", "number"),
        lambda case: format_interval(case.get_interval("over_eager")),
    ),
    "sizes": ("Sizes in all-reduce order", "", _format_sizes),
}
"""Columns beside `ENTRIES`: heading, its kind, and cell; `add_cells` gives a case what cases.csv has not."""
