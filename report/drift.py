"""Whether the machine kept its pace: each round against the case's own median. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from bench.results.aggregate import images_per_s_by_round
from report.drawings import Chart, Panel, Point, Series, Tick
from report.numbers import finite, plural, quantity
from report.select import by_mode, case_label, headline_count, records, text

if TYPE_CHECKING:
    import pandas as pd

    from bench.results.round_times import ByRound
    from report.select import Workload

_FEWEST_ROUNDS = 3
_MOST_TICKS = 8
_HOW = (
    "Level is good. A slope is a machine that warms up or throttles, a dip in every mode at once something "
    "else that ran. Cases take turns within a round, and ratios are formed inside a round, so such "
    "drift cancels in speed-up, efficiency and comparisons; what differs between modes does not. A mark is "
    "one round, so it has no interval. The vertical axis does not start at zero."
)


def rounds(workload: Workload, blocks: pd.DataFrame, *, key: str) -> Chart | None:
    """Throughput of each round in percent of the case's median; None before three rounds."""
    batches = {
        text(row["case_id"]): int(batch)
        for row in records(workload.cases)
        if (batch := finite(row["global_batch"])) is not None
    }
    found = images_per_s_by_round(blocks, batches)
    paces = {case_id: _pace(by_round) for case_id, by_round in found.items() if len(by_round) > 1}
    every = sorted({r for pace in paces.values() for r in pace})
    if len(every) < _FEWEST_ROUNDS:
        return None
    # A round broken off by the time limit holds few cases, and the first of them are no sample.
    whole = max(sum(r in pace for pace in paces.values()) for r in every)
    overall = {
        r: median(pace[r] for pace in paces.values() if r in pace)
        for r in every
        if 2 * sum(r in pace for pace in paces.values()) >= whole
    }
    everything = Series(f"median of {plural(len(paces), 'case')}", "other", _points(overall))
    low, high = (end(overall, key=lambda r: overall[r]) for end in (min, max))
    return Chart(
        key=f"{key}-rounds",
        title="Rounds over time",
        x_label="round",
        y_label="throughput (% of the case's median)",
        ticks=_ticks(every),
        panels=(Panel("", (*_headlines(workload, paces), everything)),),
        caption=f"Over {plural(len(every), 'round')} the median case ran between {_shown(overall, low)} and "
        f"{_shown(overall, high)} of its own median.",
        how_to_read=_HOW,
        from_zero=False,
    )


def _headlines(workload: Workload, paces: dict[str, ByRound]) -> list[Series]:
    at = headline_count(workload.cases)
    made = []
    for mode in ("single", "dp", "ddp"):
        for row in records(by_mode(workload.cases, mode)):
            pace = paces.get(text(row["case_id"]))
            if pace and finite(row["num_devices"]) == (1 if mode == "single" else at):
                label = case_label(row, workload.device, with_cap=False)
                made.append(Series(label, mode, _points(pace), joined=False))
    return made


def _pace(by_round: ByRound) -> ByRound:
    usual = median(by_round.values())
    return {r: 100 * value / usual for r, value in by_round.items()}


def _shown(pace: ByRound, round_index: int) -> str:
    return f"{quantity(pace[round_index], '%')} (round {round_index})"


def _points(pace: ByRound) -> tuple[Point, ...]:
    return tuple(Point(float(r), pace[r]) for r in sorted(pace))


def _ticks(every: list[int]) -> tuple[Tick, ...]:
    last = len(every) - 1
    steps = min(last, _MOST_TICKS)
    places = sorted({every[round(i * last / steps)] for i in range(steps + 1)})
    return tuple(Tick(float(r), f"{r}") for r in places)
