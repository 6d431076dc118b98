"""Shows how the rounds drift."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ddp_bench.bench.findings.numbers import finite, plural, quantity
from ddp_bench.bench.findings.stability import pace
from ddp_bench.bench.findings.wording import case_label, text
from ddp_bench.bench.results.aggregate import images_per_s_by_round, units_per_step
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.results.schema import records
from ddp_bench.report.drawings import Chart, Panel, Point, Series, Tick
from ddp_bench.report.select import WorkloadCases, by_mode, headline_count

_FEWEST_ROUNDS = 3
_MOST_TICKS = 8
_HOW_DRIFT = (
    "A level line is good. A slope shows a machine that warms up or throttles; a dip of every mode at once "
    "shows that something else ran. Cases take turns within a round, and ratios are formed inside a round, "
    "so such drift cancels in speed-up, efficiency and comparisons. A difference between modes does not "
    "cancel. A mark is one round, so it has no interval."
)


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
    """Return `single`, then DP and DDP at its usual settings at the headline count."""
    at = headline_count(workload.cases)
    made = []
    for mode in ("single", "dp", "ddp"):
        for row in records(by_mode(workload.cases, mode)):
            own = found.get(text(row["case_id"]))
            if own is not None and finite(row["num_devices"]) == (1 if mode == "single" else at):
                label = case_label(row, workload.device, with_cap=False)
                made.append(Series(label, mode, _points(_percent(pace({label: own}))), joined=False))
    return made


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
