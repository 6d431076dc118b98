"""The blocks behind each case's row: milliseconds per step of every timed round and rank. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from report.model import CaseRounds, Link
from report.numbers import number, plural
from report.select import case_label, records, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from report.fields import Links
    from report.select import Workload

MOST_CELLS = 20_000
"""Above this many rounds x ranks over all cases, only the longest rank of a round is shown."""


def by_case(
    workloads: Sequence[Workload], blocks: pd.DataFrame, traces: Mapping[str, tuple[Link, ...]], *, key: str
) -> tuple[CaseRounds, ...]:
    """Every measured case with its timed blocks, in the order of cases.csv within a workload."""
    timed = blocks[blocks["phase"] == "timed"]
    per_step = timed.assign(ms=timed["block_ms"] / timed["num_steps"].astype("float64")).dropna(subset="ms")
    long = len(per_step) > MOST_CELLS
    groups = {str(case_id): rows for case_id, rows in per_step.groupby("case_id", sort=False)}
    every = [(row, workload.device) for workload in workloads for row in records(workload.cases)]
    made = []
    for i, (row, device) in enumerate(every, start=1):
        case_id = text(row["case_id"])
        rows, linked = groups.get(case_id), traces.get(case_id, ())
        if rows is None and not linked:
            continue
        columns, cells, line = ((), (), "") if rows is None else _line(rows) if long else _cells(rows)
        label = case_label(row, device)
        num_rounds = 0 if rows is None else rows["round"].nunique()
        place = f"{key}-case-{i}"
        made.append(CaseRounds(place, label, case_id, num_rounds, columns, cells, line, linked))
    return tuple(made)


def links(cases: Sequence[CaseRounds]) -> Links:
    """What leads on from a case's row: to its rounds, and to the first of its traces."""
    found = {case.case_id: _links(case) for case in cases}
    return lambda row: found.get(text(row["case_id"]), ())


def _links(case: CaseRounds) -> tuple[Link, ...]:
    rounds = (Link(plural(case.num_rounds, "round"), f"#{case.key}"),)
    return (*rounds, Link("trace", case.traces[0].href)) if case.traces else rounds


def _cells(rows: pd.DataFrame) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """A row per round, a column per rank."""
    wide = rows.pivot_table(index="round", columns="rank", values="ms", aggfunc="last")
    columns = ("round", *(f"rank {rank}" for rank in wide.columns))
    cells = tuple(
        (f"{round_index}", *(_ms(value) for value in values))
        for round_index, values in zip(wide.index, wide.to_numpy(), strict=True)
    )
    return columns, cells, ""


def _line(rows: pd.DataFrame) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """The longest rank of every round, in the order of the rounds."""
    longest = rows.groupby("round")["ms"].max()
    return (), (), f"{longest.index[0]} to {longest.index[-1]}: {' '.join(_ms(ms) for ms in longest)} ms"


def _ms(value: float) -> str:
    # A number that is not itself is one that a rank did not deliver.
    return number(value, 4) if value == value else ""  # noqa: PLR0124 - NaN alone differs from itself
