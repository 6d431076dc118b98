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
from .table import NAME, NAME_IN_PARTS, Column, column, columns_of, table, words

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
    return [
        _every_column(ok, traces),
        _anatomy(ok),
        communication([case for case in ddp if case.num_devices > 1]),
        _compiling(ok, comparisons),
        _gpu_load(ok),
        _dp_stages([case for case in ok if case.mode == "dp"]),
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
        for one, order in zip(columns_of("Results", every), _DROPPED, strict=True)
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


def _every_column(ok: Sequence[CaseResult], traces: Mapping[str, tuple[Link, ...]]) -> Table | None:
    columns = (
        *NAME,
        *columns_of("Every column", ok),
        column("num_rounds"),
        Column(Heading("Traces", "links"), lambda case: traces.get(case.case_id, ())),
        column("num_devices"),
        column("case_id"),
    )
    return table("Every column", "All cases, those on shared devices too.", ok, columns)


def _anatomy(ok: Sequence[CaseResult]) -> Table | None:
    return table(
        "Where the step goes",
        "Per step, from the anatomy pass, not the timed one: medians over ranks. Backward includes exposed "
        "communication.",
        ok,
        (*NAME, *columns_of("Where the step goes", ok)),
    )


def _dp_stages(dp: Sequence[CaseResult]) -> Table | None:
    return table(
        "DataParallel's stages",
        "Per step: DataParallel's own stages, in order.",
        dp,
        (*NAME, *columns_of("DataParallel's stages", dp)),
    )


def _gpu_load(ok: Sequence[CaseResult]) -> Table | None:
    return table(
        "GPUs under load",
        "During timed blocks, sampled every 50 ms: the clock of the slowest GPU of a case, the power of all "
        "its GPUs together, without the host's. Slowed: heat or power held clocks down, on the worst GPU.",
        ok,
        (*NAME, *columns_of("GPUs under load", ok)),
    )


def _sizes(case: CaseResult) -> str:
    layout = BucketLayout.of_cell(case.bucket_bytes)
    return f"{' + '.join(number(size / MIB) for size in layout.num_bytes)} MiB" if layout else ""


def layouts(ddp: Sequence[CaseResult]) -> Table | None:
    """Tabulate DDP's buckets."""
    note = "DDP's buckets after the rebuild. Caps that make equal sizes are the same layout."
    sizes = (column("num_buckets"), words("Sizes in all-reduce order", _sizes))
    return table("Bucket layouts", note, ddp, (*NAME, *sizes))


def communication(ddp: Sequence[CaseResult]) -> Table | None:
    """Tabulate what communication costs DDP cases, in several measures."""
    note = "Per step of every DDP case on several devices: several measures, as each leaves something out."
    return table("Communication", note, ddp, (*NAME, *columns_of("Communication", ddp)))


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
    return table(
        "torch.compile",
        "Compiled cases. Seconds are those that the first rank spent in the compiler, backward included: "
        "what its caches held already took less. Under ddp_optimizer the forward is split where DDP's "
        "buckets end, so that their all-reduces overlap with the backward: graphs beside buckets show "
        "whether it could. A graph break is a place where the model could not be one graph.",
        compiled,
        (
            *(NAME if len({case.batch for case in compiled}) > 1 else NAME[:1]),
            words("Mode", lambda case: case.compile),
            words("DDP is optimised by", lambda case: case.text("optimize_ddp") * (case.mode == "ddp")),
            *columns_of("torch.compile", compiled),
            words(f"Against eager ({TIMES})", lambda case: with_interval(ratios.get(case.case_id)), "number"),
        ),
    )


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
