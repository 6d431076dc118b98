"""How single steps scatter on each rank: what a median hides. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from report.drawings import Spread, Spreads
from report.numbers import finite, plural, quantity
from report.select import by_mode, case_label, headline_count, records, text

if TYPE_CHECKING:
    from report.select import Row, Workload

_MOST_RANKS = 8
_FEWEST_STEPS = 5
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_HOW = (
    "Every timed step of every round. The box holds the middle half of the steps, the line in it is the "
    "median; whiskers reach from the 5th to the 95th percentile, and the dot is the longest step. Wide boxes "
    "are noise in every step; a dot far to the right is a rare pause, which every rank of DDP waits for. "
    "The axis does not start at zero."
)
_OF_MANY = " Of many ranks those with the longest medians are drawn."


def step_times(workload: Workload, blocks: pd.DataFrame, *, key: str) -> Spreads | None:
    """A box per rank of `single`, DP and default DDP at the headline count; None without step times."""
    at = headline_count(workload.cases)
    chosen = [(mode, row) for mode in ("single", "dp", "ddp") for row in _headline(workload, mode, at)]
    rows, of_many = [], False
    for mode, row in chosen:
        ranks = _by_rank(row, mode, workload.device, blocks)
        of_many |= len(ranks) > _MOST_RANKS
        rows += sorted(ranks, key=lambda spread: -spread.median_ms)[:_MOST_RANKS] if of_many else ranks
    if not rows:
        return None
    last = rows[-1]
    return Spreads(
        key=f"{key}-steps",
        title="Step times of each rank",
        caption=f"{last.label}: half of {plural(last.num_steps, 'step')} took "
        f"{quantity(last.quarter_ms, 'ms')} to {quantity(last.three_quarters_ms, 'ms')}, "
        f"95% at most {quantity(last.high_ms, 'ms')}, the longest {quantity(last.longest_ms, 'ms')}.",
        how_to_read=_HOW + (_OF_MANY if of_many else ""),
        rows=tuple(rows),
    )


def _headline(workload: Workload, mode: str, at: int | None) -> list[Row]:
    rows = records(by_mode(workload.cases, mode))
    return [row for row in rows if finite(row["num_devices"]) == (1 if mode == "single" else at)]


def _by_rank(row: Row, mode: str, device: str, blocks: pd.DataFrame) -> list[Spread]:
    own = blocks[(blocks["case_id"] == text(row["case_id"])) & (blocks["phase"] == "timed")]
    steps = (
        own.dropna(subset=["steps_ms", "rank"]).assign(ms=lambda b: b["steps_ms"].str.split()).explode("ms")
    )
    ms = pd.to_numeric(steps["ms"], errors="coerce").astype("float64")
    label = case_label(row, device, with_cap=mode == "ddp")
    found = []
    for rank, times in ms.groupby(steps["rank"]):
        if times.count() >= _FEWEST_STEPS:
            name = f"{label}, rank {rank}" if mode == "ddp" else label
            found.append(Spread(name, mode, times.count(), *map(float, times.quantile(list(_QUANTILES)))))
    return found
