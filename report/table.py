"""Makes tables of cases, columns over rows of cases.csv; and what the words of the page mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..bench.common.numbers import TIMES, count, number, with_interval
from ..bench.findings.wording import DEFAULT_CAP, case_label, settings_label, short_mode
from ..bench.page.page import Cell, Heading, Table
from ..bench.results.case_result import CaseResult

TERMS = {
    "Cap": f"MiB of gradients in a bucket, which DDP sends as one all-reduce. {DEFAULT_CAP}",
    "Throughput": "global batch over the step of the slowest rank",
    "Speed-up": "throughput over that of “single”, the plain module on one device",
    "Efficiency": "speed-up / devices",
    "Against DDP's default": "throughput over that of DDP's default on as many devices; the intervals "
    "hold all at once",
    "Exposed": "time that communication adds to a step: the step minus the same step without "
    "synchronising, in the same round",
    "Exposed by": "how it was estimated. no_sync: the step without synchronising is one under no_sync; "
    "probes: it is one whose buckets were held back until the last was ready, less what they then took",
    "Overlap": f"100 {TIMES} (1 - exposed / communication alone); none where it adds more than it takes "
    "alone, all where it adds nothing, empty where it is not known to 50 points",
    "Rounds": "how often a case was measured, in turns with the others",
    "Peak memory": "in tensors, on the device that needs most, without what libraries take (CUDA, NCCL, "
    "oneDNN)",
    "Reserved memory": "what torch's allocator held for the tensors",
    "Arithmetic per device": "three times the forward's matrix products and convolutions",
    "MFU": "that arithmetic over the data sheet's peak",
    "Proof": "how far, relatively, gradients and what two steps add to the parameters were off the plain "
    "module's, before the case was timed",
    "Id": "the case in cases.csv",
    "Cost of instruments": "how much slower they make the step",
    "Communication alone": "what a step sends, DDP's buffers and then its buckets, back to back with no "
    "compute beside it",
    "Buffers": "the part of it that broadcasts DDP's buffers",
    "Bus bandwidth": "bytes of the buckets / their part of communication alone x 2 (n - 1) / n, as "
    "nccl-tests defines it",
    "Overlap, trace": "time in which both compute and communication run, over the time communication "
    "runs, per rank; unlike “Overlap” it counts compute that communication slows, and waiting for other "
    "ranks",
    "Overlap, DDP window": "DDP's own logger: the part of its communication window that lies inside the "
    "backward",
    "Compute slow-down": "time to the last gradient beside communication, over the same time without it",
    "Rank skew": "slowest minus fastest rank's own work; the others wait for the slowest",
    "Only device 0 works": "under DataParallel, outside apply and backward",
    "Bound": "the speed-up of equal stages without communication, n m / (m + n - 1) on n devices with m "
    "micro-batches",
    "Bubble": "the share of the stages' time in which they wait for each other",
    "Step without synchronising": "the step under no_sync: compute, optimizer and batch",
}
"""Meanings of the words of figures and the headings of tables: said once, where each first stands."""


class Column(NamedTuple):
    """A column of a table of cases, and what stands in it of a case."""

    heading: Heading
    cell: Callable[[CaseResult], Cell]


def table(
    title: str,
    note: str,
    cases: Iterable[CaseResult],
    columns: Sequence[Column],
    *,
    best: str = "",
) -> Table | None:
    """Make a table without rows and columns that are blank but for names; None when nothing is left.

    `best` is the id of the case that stands out.
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
        tuple(tuple(row[i] for i in kept) for _, row in found),
        names=tuple(case_label(case) for case, _ in found),
        best=next((i for i, (case, _) in enumerate(found) if case.case_id == best), None),
    )


def words(name: str, cell: Callable[[CaseResult], str], kind: str = "", drop: int = 0) -> Column:
    """Make a column of text."""
    return Column(Heading(name, kind, drop), cell)


def figures(name: str, column: str, unit: str = "", factor: float = 1.0, drop: int = 0) -> Column:
    """Make a column of numbers with their intervals where known, its unit in the heading."""

    def cell(case: CaseResult) -> str:
        found = case.interval(column)
        if found is not None and found.low == found.high:  # as of the reference: no interval has no width
            return number(found.estimate * factor)
        return with_interval(found, "", factor)

    return words(f"{name} ({unit})" if unit else name, cell, "number", drop)


def whole(name: str, column: str, drop: int = 0) -> Column:
    """Make a column of counts."""
    return words(name, lambda case: count(case.number(column)), "number", drop)


def _mode(case: CaseResult) -> str:
    parts = (short_mode(case), settings_label(case, with_cap=False), "shared" * case.oversubscribed)
    return ", ".join(filter(None, parts))


_WORKLOAD = words("Workload", lambda case: case.text("workload"))
NAME = (words("Case", case_label), _WORKLOAD)
NAME_IN_PARTS = (
    words("Case", _mode, "short"),
    _WORKLOAD,
    words("Devices", lambda case: f"{case.num_devices}", "number"),
    words("Cap (MiB)", lambda case: case.setting("bucket_cap_mb") * (case.mode == "ddp"), "number"),
)
