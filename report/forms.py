"""The section of the forms of parallel training: what each is, how fast, and what memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..bench.common.numbers import format_ratio
from ..bench.findings.wording import name_case
from ..bench.page.page import Section
from ..bench.plan.modes import COMPARATORS, COMPOSABLE
from ..bench.results.case_result import CaseResult
from .cases import WorkloadCases, add_workload_names, select_mode
from .columns import FORMS
from .tables import tabulate


def make_forms_section(measured: Sequence[WorkloadCases]) -> Section | None:
    """Show every form of parallel training on several devices; None without a mode beside DP and DDP."""
    with_more = [w for w in measured if any(c.mode in COMPARATORS and c.num_devices > 1 for c in w.cases)]
    names = {w.name for w in with_more}
    named = add_workload_names([replace(w, cases=_select_cases(w.cases)) for w in measured])
    cases = [case for case in named if case.get_text("workload") in names]
    made = tabulate("Side by side", cases)
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


def _select_cases(every: Sequence[CaseResult]) -> list[CaseResult]:
    """Keep one case of each mode and device count, all of modes with settings; `single` first."""
    chosen = (
        [c for c in every if c.mode == m] if m in ("pipeline", *COMPOSABLE) else select_mode(every, m)
        for m in ("single", *FORMS)
    )
    return [case for cases in chosen for case in cases]
