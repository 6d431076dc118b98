"""The section of the forms of parallel training: what each is, how fast, and what memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..bench.findings.numbers import TIMES, number, per_second, times
from ..bench.findings.wording import case_name, unit_of_cases
from ..bench.results.case_result import Cells as Row
from ..bench.results.case_result import estimate, finite, text
from ..bench.results.schema import records
from ..bench.settings import COMPARATORS, COMPOSABLE, STAGED
from .cases import WorkloadCases, by_mode
from .table import NAME, Section, Table, figures, table, words
from .tables import SPEEDUP

FORMS = {
    "dp": "data parallel",
    "ddp": "data parallel",
    "replicate": "data parallel",
    "fsdp": "data parallel, sharded",
    "pipeline": "model parallel",
    "partition": "workload partitioning",
}
"""Modes by the form of parallel training that they belong to, in the order of its section."""


ALL_OF = ("pipeline", *COMPOSABLE)
"""Modes of which every case is shown; of others that without settings."""


def forms(measured: Sequence[WorkloadCases]) -> Section | None:
    """Show every form of parallel training that was measured; None without a mode beside DP and DDP."""
    with_more = [w for w in measured if w.cases["mode"].isin(COMPARATORS).any()]
    if not with_more:
        return None
    several = len(measured) > 1
    rows = [_cases(w).assign(workload=w.label if several else "") for w in with_more]
    made = _table(pd.concat(rows))
    notes = [
        "Data parallel: every device has the model and a part of the batch (DP, DDP, replicate); sharded, it "
        "holds part of each parameter, gradient and optimizer state, and gathers a block while it computes "
        "(FSDP2). Model parallel: every device has some layers, and micro-batches pass through them "
        "(pipeline). Workload partitioning: the same split and the whole batch at once, so that one device "
        "computes at a time (partition). All cases on as many devices have the same global batch."
    ]
    for row in (row for w in with_more for row in records(w.cases[w.cases["mode"] == "partition"])):
        speedup = estimate(row, "speedup")
        if speedup is not None and speedup.low > 1:
            notes.append(
                f"{case_name(row)} is {times(speedup.estimate)} as fast as one device, though only one of "
                "its devices computes at a time. Why was not measured: each may keep its own layers in its "
                "caches, and its batch is larger where scaling is weak."
            )
    return Section(
        "Forms of parallel training",
        notes,
        [],
        list(filter(None, [made])),
    )


def _cases(workload: WorkloadCases) -> pd.DataFrame:
    """Keep one case of each mode and device count, all of `ALL_OF`; `single` first, then by `FORMS`."""
    cases = workload.cases
    chosen = [cases[cases["mode"] == m] if m in ALL_OF else by_mode(cases, m) for m in ("single", *FORMS)]
    found: pd.DataFrame = pd.concat(chosen)
    return found


def _table(rows: pd.DataFrame) -> Table | None:
    return table(
        "Side by side",
        "Layers are split by the time that each takes. The bubble is the share of the stages' time in which "
        "they wait for each other; beside it that of the schedule alone, from the measured time of a "
        "micro-batch in each stage. The bound is the speed-up of equal stages without communication, "
        "n m / (m + n - 1) on n devices with m micro-batches.",
        rows,
        (
            *NAME,
            words("Form", lambda row: FORMS.get(text(row["mode"]), "")),
            figures("Throughput", "images_per_s", per_second(unit_of_cases(rows))),
            SPEEDUP,
            words(f"Bound ({TIMES})", lambda row: number(_bound(row)), "number"),
            figures("Against DDP's default", "vs_ddp_default", TIMES),
            words("Memory of each device (MiB)", _memory_by_device),
            words("Layers of each device", lambda row: text(row["layers_by_device"]).replace("/", " + ")),
            figures("Bubble", "bubble_pct", "%"),
            figures("Bubble of the stages", "bubble_of_stages_pct", "%"),
        ),
    )


def _bound(row: Row) -> float | None:
    """Return the speed-up of equal stages without communication; None for a mode without stages.

    Source: Huang et al. 2019, "GPipe", section 2.3: a bubble of (n - 1) / (m + n - 1).
    """
    n, m = finite(row["num_devices"]), finite(row["micro_batches"]) or 1.0
    return n * m / (m + n - 1) if row["mode"] in STAGED and n is not None else None


def _memory_by_device(row: Row) -> str:
    return " / ".join(number(finite(mib)) for mib in text(row["mem_by_device_mib"]).split("/") if mib)
