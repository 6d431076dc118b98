"""The section of the forms of parallel training: what each is, how fast, and what memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench.common.numbers import TIMES, format_number, format_ratio, format_short
from ..bench.findings.wording import name_case
from ..bench.page.page import Section, Table
from ..bench.plan.modes import COMPARATORS, COMPOSABLE, STAGED
from ..bench.results.case_result import CaseResult, parse_finite
from .cases import WorkloadCases, add_cells, select_mode
from .table import NAME, TABLES, make_columns, make_table, make_text_column

FORMS = {
    "dp": "data parallel",
    "ddp": "data parallel",
    "replicate": "data parallel",
    "fsdp": "data parallel, sharded",
    "pipeline": "model parallel",
    "partition": "workload partitioning",
}
"""Modes by the form of parallel training that they belong to, in the order of its section."""


def make_forms_section(measured: Sequence[WorkloadCases]) -> Section | None:
    """Show every form of parallel training on several devices; None without a mode beside DP and DDP."""
    with_more = [w for w in measured if any(c.mode in COMPARATORS and c.num_devices > 1 for c in w.cases)]
    several = len(measured) > 1
    cases = [add_cells(c, workload=w.label if several else "") for w in with_more for c in _select_cases(w)]
    made = _make_table(cases)
    if made is None:
        return None
    notes = [
        "Data parallel: every device has the model and a part of the batch (DP, DDP, replicate); sharded, it "
        "holds part of each parameter, gradient and optimizer state, and gathers a block while it computes "
        "(FSDP2). Model parallel: every device has some layers, and micro-batches pass through them "
        "(pipeline). Workload partitioning: the same split and the whole batch at once, so that one device "
        "computes at a time (partition). All cases on as many devices have the same global batch."
    ]
    notes += [
        f"{name_case(case)} is {format_ratio(case.speedup)} as fast as one device, though only one of its "
        "devices computes at a time. Why was not measured: each may keep its own layers in its caches, and "
        "its batch is larger where scaling is weak."
        for case in cases
        if case.mode == "partition" and case.speedup and case.speedup.low > 1
    ]
    return Section("forms", "Forms of parallel training", notes, tables=[made])


def _select_cases(workload: WorkloadCases) -> list[CaseResult]:
    """Keep one case of each mode and device count, all of modes with settings; `single` first."""
    every = workload.cases
    chosen = (
        [c for c in every if c.mode == m] if m in ("pipeline", *COMPOSABLE) else select_mode(every, m)
        for m in ("single", *FORMS)
    )
    return [case for cases in chosen for case in cases]


def _make_table(cases: Sequence[CaseResult]) -> Table | None:
    note, names = TABLES["Side by side"]
    rate, speedup, against, bubble = make_columns(names.split(), cases)
    return make_table(
        "Side by side",
        note,
        cases,
        (
            *NAME,
            make_text_column("Form", lambda case: FORMS.get(case.mode, "")),
            rate,
            speedup,
            make_text_column(f"Bound ({TIMES})", lambda case: format_number(_compute_bound(case)), "number"),
            against,
            make_text_column("Memory of each device (MiB)", _format_memory),
            make_text_column(
                "Layers of each device", lambda case: case.get_text("layers_by_device").replace("/", " + ")
            ),
            bubble,
        ),
    )


def _compute_bound(case: CaseResult) -> float | None:
    """Return the speed-up of equal stages without communication; None for a mode without stages.

    Source: Huang et al. 2019, "GPipe", section 2.3: a bubble of (n - 1) / (m + n - 1).
    """
    n, m = case.num_devices, case.micro_batches or 1.0
    return n * m / (m + n - 1) if case.mode in STAGED else None


def _format_memory(case: CaseResult) -> str:
    found = map(parse_finite, case.get_text("mem_by_device_mib").split("/"))
    return " / ".join(format_short(mib, 3 if mib < 1000 else 4) for mib in found if mib)
