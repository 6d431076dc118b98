"""The tables of a run: each a list of columns over rows of cases.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..bench.common.numbers import MIB, TIMES, format_interval, format_number, format_rate_unit
from ..bench.findings.late_ranks import LateBucket
from ..bench.findings.verdicts import Saving
from ..bench.page.page import Heading, Link, Table
from ..bench.plan.buckets import BucketLayout
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import Comparison, select_compile_comparisons, select_unshared
from ..bench.results.run_folder import name_failure_file
from .cases import add_workload_names, group_workloads
from .table import (
    ANATOMY,
    NAME,
    NAME_IN_PARTS,
    RESULTS,
    CaseColumn,
    make_column,
    make_columns,
    make_table,
    make_text_column,
    tabulate,
)

SAVINGS = Heading("Per step"), Heading("Where it goes", "long"), Heading("Try", "long")
"""Columns of what would save time."""

_DROPPED = 4, 0, 1, 3, 2, 5, 6, 7, 8
"""Order in which a narrow terminal leaves out columns of the results, the highest first, 0 never."""


def make_tables(
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
    links = CaseColumn(Heading("Traces", "links"), lambda case: traces.get(case.case_id, ()))
    last = make_column("num_rounds"), links, make_column("num_devices"), make_column("case_id")
    return [
        tabulate("Every column", ok, after=last),
        tabulate(ANATOMY, ok),
        tabulate("Communication", [case for case in ddp if case.num_devices > 1]),
        _tabulate_compiling(ok, comparisons),
        tabulate("GPUs under load", ok),
        tabulate("DataParallel's stages", dp),
        tabulate_layouts(ddp),
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
    others = [case for case in every if case.case_id not in own_ids]
    step, rate, *ratios = (
        one._replace(heading=one.heading._replace(drop=order))
        for one, order in zip(make_columns(RESULTS, every), _DROPPED, strict=True)
    )
    step = step._replace(cell=lambda case: format_number(case.get_number("step_ms")))
    why = make_text_column(
        "Why", lambda case: "devices are shared" if case.oversubscribed else "emulated on CPU cores", "short"
    )
    why = why._replace(heading=why.heading._replace(drop=3))
    results = make_table("Results", "", own, (*NAME_IN_PARTS, step, rate, *ratios), best=best)
    can_compare = len(workloads) == 1 and sum(case.is_ranked and case.speedup is not None for case in own) > 1
    per_s = format_rate_unit(own[0].unit) if own else ""
    advice = f"Compare speed-up, not {per_s}: a slow round changes {per_s}, but not the speed-up."
    below = (*([f"★ {why_best}."] if best else []), *([advice] if can_compare else []))
    return [
        results and replace(results, below=below),
        make_table("Also run, not comparable", "", others, (*NAME_IN_PARTS, step, rate, why)),
    ]


def _format_sizes(case: CaseResult) -> str:
    layout = BucketLayout.from_cell(case.bucket_bytes)
    return f"{' + '.join(format_number(size / MIB) for size in layout.num_bytes)} MiB" if layout else ""


def tabulate_layouts(ddp: Sequence[CaseResult]) -> Table | None:
    """Tabulate DDP's buckets."""
    return tabulate(
        "Bucket layouts", ddp, after=[make_text_column("Sizes in all-reduce order", _format_sizes)]
    )


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


def _tabulate_compiling(ok: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> Table | None:
    compiled = [case for case in ok if case.get_number("num_graphs") is not None]
    ratios = {one.case_id: one.ratio for one in select_compile_comparisons(comparisons, ok)}
    before = (
        *(NAME if len({case.batch for case in compiled}) > 1 else NAME[:1]),
        make_text_column("Mode", lambda case: case.compile),
        make_text_column(
            "DDP is optimised by", lambda case: case.get_text("optimize_ddp") * (case.mode == "ddp")
        ),
    )
    against = make_text_column(
        f"Against eager ({TIMES})", lambda case: format_interval(ratios.get(case.case_id)), "number"
    )
    return tabulate("torch.compile", compiled, before=before, after=[against])


def tabulate_unmeasured(cases: Sequence[CaseResult], failures: Mapping[str, Link]) -> Table | None:
    """Tabulate every case that was tried and has no number; `failures` are the kept tracebacks by file."""

    def find_failure_link(case: CaseResult) -> tuple[Link, ...]:
        found = failures.get(name_failure_file(case.case_id))
        return () if found is None else (found,)

    return make_table(
        "Not measured",
        "Cases that were tried and have no numbers, and why.",
        [case for case in cases if case.has_failed],
        (
            NAME[0],
            make_text_column("Status", lambda case: case.status),
            make_text_column("Reason", lambda case: case.reason, "long"),
            CaseColumn(Heading("Tracebacks", "links"), find_failure_link),
            make_column("case_id"),
        ),
    )
