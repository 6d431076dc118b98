"""The tables of a run: each a list of columns over rows of cases.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..bench.common.numbers import MIB, TIMES, number, with_interval
from ..bench.findings.late_ranks import LateBucket
from ..bench.page.page import Heading, Link, Table
from ..bench.plan.buckets import BucketLayout
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import Comparison, on_own_devices, over_eager
from ..bench.results.run_folder import failure_file
from .cases import named, workloads
from .table import NAME, NAME_IN_PARTS, RESULTS, Column, column, columns_of, table, tabulate, words

_DROPPED = 4, 0, 1, 3, 2, 5, 6, 7, 8
"""Order in which a narrow terminal leaves out columns of the results, the highest first, 0 never."""


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
    dp = [case for case in ok if case.mode == "dp"]
    links = Column(Heading("Traces", "links"), lambda case: traces.get(case.case_id, ()))
    last = column("num_rounds"), links, column("num_devices"), column("case_id")
    return [
        tabulate("Every column", ok, after=last),
        tabulate("Where the step goes", ok),
        tabulate("Communication", [case for case in ddp if case.num_devices > 1]),
        _compiling(ok, comparisons),
        tabulate("GPUs under load", ok),
        tabulate("DataParallel's stages", dp),
        layouts(ddp),
    ]


def results(cases: Sequence[CaseResult], best: str = "") -> list[Table | None]:
    """Tabulate the measured cases that can be compared, then the others; `best` is the id of the fastest."""
    every = named(workloads(cases))
    own = [case for case in on_own_devices(every) if not case.is_stand_in] or every
    own_ids = {case.case_id for case in own}
    others = [case for case in every if case.case_id not in own_ids]
    step, rate, *ratios = (
        one._replace(heading=one.heading._replace(drop=order))
        for one, order in zip(columns_of(RESULTS, every), _DROPPED, strict=True)
    )
    step = step._replace(cell=lambda case: number(case.number("step_ms")))
    why = words("Why", _why_not_comparable, "short")
    return [
        table("Results", "", own, (*NAME_IN_PARTS, step, rate, *ratios), best=best),
        table("Also run, not comparable", "", others, (*NAME_IN_PARTS, step, rate, why)),
    ]


def _why_not_comparable(case: CaseResult) -> str:
    """Say why a case's speed is not held against that of others."""
    shared = "devices are shared: shows that it runs" if case.oversubscribed else ""
    return shared or "emulated: not DP's speed on GPUs"


def _sizes(case: CaseResult) -> str:
    layout = BucketLayout.of_cell(case.bucket_bytes)
    return f"{' + '.join(number(size / MIB) for size in layout.num_bytes)} MiB" if layout else ""


def layouts(ddp: Sequence[CaseResult]) -> Table | None:
    """Tabulate DDP's buckets."""
    return tabulate("Bucket layouts", ddp, after=[words("Sizes in all-reduce order", _sizes)])


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
    before = (
        *(NAME if len({case.batch for case in compiled}) > 1 else NAME[:1]),
        words("Mode", lambda case: case.compile),
        words("DDP is optimised by", lambda case: case.text("optimize_ddp") * (case.mode == "ddp")),
    )
    against = words(
        f"Against eager ({TIMES})", lambda case: with_interval(ratios.get(case.case_id)), "number"
    )
    return tabulate("torch.compile", compiled, before=before, after=[against])


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
            column("case_id"),
        ),
    )
