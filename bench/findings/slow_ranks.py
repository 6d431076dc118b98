"""Ranks that others wait for: DDP's ranks whose own work takes longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd
import scipy

from ..manifest import Manifest
from ..results.round_times import RoundTimes
from ..stats.interval import Interval
from .answers import by_compile_label, ddp_at_headline, ddp_reference
from .numbers import plural, with_interval
from .verdicts import Finding
from .wording import estimate, place

SKEW_SHARE = 0.05
"""Skew over the step below which ranks count as equally fast."""

OFTEN = 0.75
"""Share of the rounds in which a rank has to be the slowest to be named."""

BY_CHANCE = 0.05
"""Nor is a rank named that would be the slowest so often among equal ones with more than this probability."""


@dataclass(frozen=True, kw_only=True)
class SlowRank(Finding):
    """The rank that others wait for, where ranks differ by a good part of the step."""

    place: str
    rank: int
    host: str
    often: int
    num_rounds: int
    is_chance: bool
    """Whether equal ranks could look so."""
    skew_ms: Interval
    step_ms: float

    @property
    def is_uneven(self) -> bool:
        """Whether it is another rank from round to round."""
        return self.is_chance and self.often < self.num_rounds

    @property
    def apart(self) -> str:
        share = 100 * self.skew_ms.estimate / self.step_ms
        return f"{with_interval(self.skew_ms, 'ms')} per step ({share:.0f}% of it)"

    @property
    def sentence(self) -> str:
        if self.is_chance:
            rounds = f"in all of {plural(self.num_rounds, 'round')}: too few to say whether it stays so"
            slowest = f"Ranks: on {self.place} the slowest rank's own work takes {self.apart} longer"
            return f"{slowest} than the fastest's, {rounds}."
        who = f"rank {self.rank}{f' on {self.host}' if self.host else ''}"
        slowest = f"{who} was the slowest in {self.often} of {self.num_rounds} rounds"
        longer = f"its own work takes {self.apart} longer than the fastest rank's, and the others wait for it"
        return f"Slow rank: on {self.place} {slowest}; {longer}."


def slow_ranks(manifest: Manifest, cases: pd.DataFrame, times: RoundTimes) -> list[SlowRank]:
    """The slowest ranks of DDP, by mode of torch.compile, where ranks differ by a good part of the step."""
    hosts = {rank.rank: rank.host for rank in manifest.ranks}
    return [
        replace(found, of=label)
        for label, group in by_compile_label(cases)
        if (found := _slow_rank(ddp_at_headline(group), times, hosts)) is not None
    ]


def _slow_rank(ddp: pd.DataFrame, times: RoundTimes, hosts: Mapping[int, str]) -> SlowRank | None:
    measured = ddp[(ddp["rank_skew_ms"] > SKEW_SHARE * ddp["step_ms"]).fillna(value=False)]
    if measured.empty:
        return None
    row = ddp_reference(measured)
    own = times.of_case(str(row["case_id"]))
    rank, skew_ms = own.slowest_rank(), estimate(row, "rank_skew_ms")
    if rank is None or skew_ms is None:
        return None
    often, num_rounds, num_ranks = own.slowest[rank], own.slowest.total(), int(row["num_devices"])
    by_chance = min(num_ranks * scipy.stats.binom.sf(often - 1, num_rounds, 1 / num_ranks), 1.0)
    return SlowRank(
        place=place(row),
        rank=rank,
        host=hosts.get(rank, ""),
        often=often,
        num_rounds=num_rounds,
        is_chance=often < OFTEN * num_rounds or by_chance > BY_CHANCE,
        skew_ms=skew_ms,
        step_ms=float(row["step_ms"]),
    )
