"""Shows how rounds vary: drift of the machine, blocks of each case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from ddp_bench.bench.findings.numbers import finite, number, plural, quantity
from ddp_bench.bench.findings.stability import pace
from ddp_bench.bench.findings.wording import Row, case_label, text
from ddp_bench.bench.results.aggregate import images_per_s_by_round, units_per_step
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.results.schema import records
from ddp_bench.report.drawings import Chart, Panel, Point, Series, Tick
from ddp_bench.report.fields import Links
from ddp_bench.report.model import CaseRounds, Hyperlink
from ddp_bench.report.select import WorkloadCases, by_mode, headline_count

_FEWEST_ROUNDS = 3
_MOST_TICKS = 8
_HOW_DRIFT = (
    "A level line is good. A slope shows a machine that warms up or throttles; a dip of every mode at once "
    "shows that something else ran. Cases take turns within a round, and ratios are formed inside a round, "
    "so such drift cancels in speed-up, efficiency and comparisons. A difference between modes does not "
    "cancel. A mark is one round, so it has no interval."
)
MOST_CELLS = 20_000
"""Above this many rounds x ranks over all cases, only the longest rank of a round is shown."""


def drift(workload: WorkloadCases, blocks: pd.DataFrame, *, key: str) -> Chart | None:
    """Show throughput of each round in percent of the case's median; None before three rounds."""
    found = images_per_s_by_round(blocks, units_per_step(workload.cases))
    several = {case_id: by_round for case_id, by_round in found.items() if len(by_round) > 1}
    every = sorted({r for by_round in several.values() for r in by_round})
    if len(every) < _FEWEST_ROUNDS:
        return None
    overall = _percent(pace(several))
    everything = Series(f"median of {plural(len(several), 'case')}", "other", _points(overall))
    low, high = (end(overall, key=lambda r: overall[r]) for end in (min, max))
    return Chart(
        key=f"{key}-rounds",
        title="Rounds over time",
        x_label="round",
        y_label="throughput (% of the case's median)",
        ticks=_ticks(every),
        panels=(Panel("", (*_of_headline_cases(workload, several), everything)),),
        caption=f"Over {plural(len(every), 'round')} the median case ran between {_shown(overall, low)} and "
        f"{_shown(overall, high)} of its own median.",
        how_to_read=_HOW_DRIFT,
        from_zero=False,
    )


def _of_headline_cases(workload: WorkloadCases, found: Mapping[str, ByRound]) -> list[Series]:
    made = []
    for row in _headline_cases(workload):
        if (own := found.get(text(row["case_id"]))) is not None:
            label = case_label(row, workload.device, with_cap=False)
            points = _points(_percent(pace({label: own})))
            made.append(Series(label, text(row["mode"]), points, joined=False))
    return made


def _headline_cases(workload: WorkloadCases) -> list[Row]:
    """Return `single`, then DP and DDP at its usual settings at the headline count."""
    at = headline_count(workload.cases)
    return [
        row
        for mode in ("single", "dp", "ddp")
        for row in records(by_mode(workload.cases, mode))
        if finite(row["num_devices"]) == (1 if mode == "single" else at)
    ]


def _percent(by_round: ByRound) -> ByRound:
    return {r: 100 * value for r, value in by_round.items()}


def _shown(by_round: ByRound, round_index: int) -> str:
    return f"{quantity(by_round[round_index], '%')} (round {round_index})"


def _points(by_round: ByRound) -> tuple[Point, ...]:
    return tuple(Point(float(r), by_round[r]) for r in sorted(by_round))


def _ticks(every: list[int]) -> tuple[Tick, ...]:
    last = len(every) - 1
    steps = min(last, _MOST_TICKS)
    places = sorted({every[round(i * last / steps)] for i in range(steps + 1)})
    return tuple(Tick(float(r), f"{r}") for r in places)


def by_case(
    workloads: Sequence[WorkloadCases],
    blocks: pd.DataFrame,
    traces: Mapping[str, tuple[Hyperlink, ...]],
    *,
    key: str,
) -> tuple[CaseRounds, ...]:
    """Return every measured case with its timed blocks, in the order of cases.csv within a workload."""
    timed = blocks[blocks["phase"] == "timed"]
    per_step = timed.assign(ms=timed["block_ms"] / timed["num_steps"].astype("float64")).dropna(subset="ms")
    long = len(per_step) > MOST_CELLS
    groups = {str(case_id): rows for case_id, rows in per_step.groupby("case_id", sort=False)}
    every = [(row, workload) for workload in workloads for row in records(workload.cases)]
    made = []
    for i, (row, workload) in enumerate(every, start=1):
        case_id = text(row["case_id"])
        rows, linked = groups.get(case_id), traces.get(case_id, ())
        if rows is None and not linked:
            continue
        columns, cells, line = ((), (), "") if rows is None else _line(rows) if long else _cells(rows)
        apart = "" if workload.name == workload.label else f", {workload.name}"
        label = case_label(row, workload.device) + apart
        num_rounds = 0 if rows is None else rows["round"].nunique()
        place = f"{key}-case-{i}"
        made.append(CaseRounds(place, label, case_id, num_rounds, columns, cells, line, linked))
    return tuple(made)


def links(cases: Sequence[CaseRounds]) -> Links:
    """Return the links of a case's row: to its rounds, and to the first of its traces."""
    found = {case.case_id: _links(case) for case in cases}
    return lambda row: found.get(text(row["case_id"]), ())


def _links(case: CaseRounds) -> tuple[Hyperlink, ...]:
    rounds = (Hyperlink(plural(case.num_rounds, "round"), f"#{case.key}"),)
    return (*rounds, Hyperlink("trace", case.traces[0].href)) if case.traces else rounds


def _cells(rows: pd.DataFrame) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """Make a row per round and a column per rank."""
    wide = rows.pivot_table(index="round", columns="rank", values="ms", aggfunc="last")
    columns = ("round", *(f"rank {rank}" for rank in wide.columns))
    cells = tuple(
        (f"{round_index}", *(_ms(value) for value in values))
        for round_index, values in zip(wide.index, wide.to_numpy(), strict=True)
    )
    return columns, cells, ""


def _line(rows: pd.DataFrame) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """Write the longest rank of every round on one line."""
    longest = rows.groupby("round")["ms"].max()
    return (), (), f"{longest.index[0]} to {longest.index[-1]}: {' '.join(_ms(ms) for ms in longest)} ms"


def _ms(value: float) -> str:
    # A number that is not itself is one that a rank did not deliver.
    return number(value, 4) if value == value else ""  # noqa: PLR0124 - NaN alone differs from itself
