"""What a table of the page is, columns over cases; a section of figures and tables; and what words mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..bench.common.numbers import TIMES, count, number, with_interval
from ..bench.findings.wording import DEFAULT_CAP, case_label
from ..bench.results.case_result import CaseResult
from .drawing import Figure

TERMS = {
    "Cap": f"MiB of gradients in a bucket, which DDP sends as one all-reduce. {DEFAULT_CAP}",
    "Throughput": "global batch over the step of the slowest rank",
    "Speed-up": "throughput over that of “single”, the plain module on one device",
    "Efficiency": "speed-up / devices",
    "Against DDP's default": "throughput over that of DDP's default on as many devices; the intervals "
    "hold all at once",
    "Exposed": "time that communication adds to a step: the step minus the same step without "
    "synchronising, in the same round",
    "Hidden": f"100 {TIMES} (1 - exposed / communication alone); none where it adds more than it takes "
    "alone, empty where it is not known to 50 points",
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
    "Bus bandwidth": "bytes of the buckets / their part of communication alone x 2 (n - 1) / n, as nccl- "
    "tests defines it",
    "Overlap, trace": "time in which both compute and communication run, over the time communication "
    "runs, per rank; unlike hidden it counts compute that communication slows, and waiting for other "
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
"""What the words of figures and the headings of tables mean: said once, where each first stands."""


class Link(NamedTuple):
    """A file beside the page, or a place on it; empty where the page cannot lead there."""

    label: str
    href: str


Cell = str | tuple[Link, ...]


class Heading(NamedTuple):
    """The head of a column; `kind` is empty, `number` (to the right), `long` (in lines) or `links`."""

    name: str
    kind: str = ""


class Column(NamedTuple):
    """A column of a table of cases, and what stands in it of a case."""

    heading: Heading
    cell: Callable[[CaseResult], Cell]


@dataclass(frozen=True)
class Table:
    """A titled table; a missing value is an empty string. `below` explains what it holds."""

    title: str
    note: str
    columns: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    below: tuple[str, ...] = ()

    @property
    def terms(self) -> list[str]:
        """The headings without units, and what stands before a colon in them."""
        return [column.name.partition(" (")[0].partition(":")[0] for column in self.columns]


@dataclass(frozen=True)
class Section:
    """Figures and tables under a heading of their own."""

    key: str
    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


def table(
    title: str,
    note: str,
    cases: Iterable[CaseResult],
    columns: Iterable[Column],
    *,
    below: Sequence[str] = (),
) -> Table | None:
    """Make a table without rows and columns that are blank but for names; None when nothing is left."""
    columns = list(columns)
    values = [i for i, column in enumerate(columns) if column not in NAME]
    rows = [tuple(column.cell(case) for column in columns) for case in cases]
    rows = [row for row in rows if any(row[i] for i in values)]
    if not rows:
        return None
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    headings = tuple(columns[i].heading for i in kept)
    return Table(title, note, headings, tuple(tuple(row[i] for i in kept) for row in rows), tuple(below))


def words(name: str, cell: Callable[[CaseResult], str], kind: str = "") -> Column:
    """Make a column of text."""
    return Column(Heading(name, kind), cell)


def figures(name: str, column: str, unit: str = "", factor: float = 1.0) -> Column:
    """Make a column of numbers with their intervals where known, its unit in the heading."""

    def cell(case: CaseResult) -> str:
        found = case.interval(column)
        if found is not None and found.low == found.high:  # as of the reference: no interval has no width
            return number(found.estimate * factor)
        return with_interval(found, "", factor)

    return Column(Heading(f"{name} ({unit})" if unit else name, "number"), cell)


def whole(name: str, column: str) -> Column:
    """Make a column of counts."""
    return words(name, lambda case: count(case.number(column)), "number")


NAME = (words("Case", case_label), words("Workload", lambda case: case.text("workload")))
