"""The section of the forms of parallel training: what each is, how fast, and what memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench.common.numbers import TIMES, number, ratio, short
from ..bench.findings.wording import case_name
from ..bench.page.page import Section, Table
from ..bench.plan.modes import COMPARATORS, COMPOSABLE, STAGED
from ..bench.results.case_result import CaseResult, finite
from .cases import WorkloadCases, by_mode, with_cells
from .table import NAME, TABLES, columns_of, table, words

FORMS = {
    "dp": "data parallel",
    "ddp": "data parallel",
    "replicate": "data parallel",
    "fsdp": "data parallel, sharded",
    "pipeline": "model parallel",
    "partition": "workload partitioning",
}
"""Modes by the form of parallel training that they belong to, in the order of its section."""


def forms(measured: Sequence[WorkloadCases]) -> Section | None:
    """Show every form of parallel training that was measured; None without a mode beside DP and DDP."""
    with_more = [w for w in measured if any(case.mode in COMPARATORS for case in w.cases)]
    several = len(measured) > 1
    cases = [with_cells(c, workload=w.label if several else "") for w in with_more for c in _cases(w)]
    made = _table(cases)
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
        f"{case_name(case)} is {ratio(case.speedup)} as fast as one device, though only one of its "
        "devices computes at a time. Why was not measured: each may keep its own layers in its caches, and "
        "its batch is larger where scaling is weak."
        for case in cases
        if case.mode == "partition" and case.speedup and case.speedup.low > 1
    ]
    return Section("forms", "Forms of parallel training", notes, tables=[made])


def _cases(workload: WorkloadCases) -> list[CaseResult]:
    """Keep one case of each mode and device count, all of modes with settings; `single` first."""
    every = workload.cases
    chosen = (
        [c for c in every if c.mode == m] if m in ("pipeline", *COMPOSABLE) else by_mode(every, m)
        for m in ("single", *FORMS)
    )
    return [case for cases in chosen for case in cases]


def _table(cases: Sequence[CaseResult]) -> Table | None:
    note, names = TABLES["Side by side"]
    rate, speedup, against, bubble = columns_of(names.split(), cases)
    return table(
        "Side by side",
        note,
        cases,
        (
            *NAME,
            words("Form", lambda case: FORMS.get(case.mode, "")),
            rate,
            speedup,
            words(f"Bound ({TIMES})", lambda case: number(_bound(case)), "number"),
            against,
            words("Memory of each device (MiB)", _memory_by_device),
            words("Layers of each device", lambda case: case.text("layers_by_device").replace("/", " + ")),
            bubble,
        ),
    )


def _bound(case: CaseResult) -> float | None:
    """Return the speed-up of equal stages without communication; None for a mode without stages.

    Source: Huang et al. 2019, "GPipe", section 2.3: a bubble of (n - 1) / (m + n - 1).
    """
    n, m = case.num_devices, case.micro_batches or 1.0
    return n * m / (m + n - 1) if case.mode in STAGED else None


def _memory_by_device(case: CaseResult) -> str:
    found = map(finite, case.text("mem_by_device_mib").split("/"))
    return " / ".join(short(mib, 3 if mib < 1000 else 4) for mib in found if mib)
