"""Ranks that others wait for: DDP's ranks whose own work takes longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import scipy

from ..manifest import Manifest
from ..results.case_result import CaseResult
from ..results.round_times import RoundTimes
from .answers import by_compile_label, ddp_reference, headline
from .numbers import plural, with_interval
from .wording import place

SKEW_SHARE = 0.05
"""Skew over the step below which ranks count as equally fast."""

OFTEN = 0.75
"""Share of the rounds in which a rank has to be the slowest to be named."""

BY_CHANCE = 0.05
"""Nor is a rank named that would be the slowest so often among equal ones with more than this probability."""


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """The rank that others wait for, where ranks differ by a good part of the step."""

    place: str
    rank: int
    host: str
    often: int
    num_rounds: int
    is_chance: bool
    """Whether equal ranks could look so."""
    apart: str
    """How much longer its own work takes, with its interval and its share of the step."""

    @property
    def is_uneven(self) -> bool:
        """Whether it is another rank from round to round."""
        return self.is_chance and self.often < self.num_rounds

    @property
    def sentence(self) -> str:
        """Which rank it is, how often, and by how much."""
        who = f"Rank {self.rank}{f' on {self.host}' if self.host else ''}"
        few = ", too few to say whether it stays so" if self.is_chance else "; the others wait for it"
        rounds = f"{self.often} of {plural(self.num_rounds, 'round')}"
        return f"{who} is the slowest of {self.place} in {rounds}, by {self.apart} of its own work{few}."


def slow_ranks(manifest: Manifest, cases: Sequence[CaseResult], times: RoundTimes) -> list[SlowRank]:
    """The slowest ranks of DDP, by mode of torch.compile, where ranks differ by a good part of the step."""
    hosts = {rank.rank: rank.host for rank in manifest.ranks}
    found = []
    for _, group in by_compile_label(cases):
        case = ddp_reference([one for one in headline(group) if _skew_share(one) > SKEW_SHARE])
        own = times.of_case(case.case_id) if case else None
        if case is None or own is None or (rank := own.slowest_rank()) is None:
            continue
        often, num_rounds = own.slowest[rank], own.slowest.total()
        among_equals = scipy.stats.binom.sf(often - 1, num_rounds, 1 / case.num_devices)
        found.append(
            SlowRank(
                place=place(case),
                rank=rank,
                host=hosts.get(rank, ""),
                often=often,
                num_rounds=num_rounds,
                is_chance=often < OFTEN * num_rounds or case.num_devices * among_equals > BY_CHANCE,
                apart=f"{with_interval(case.rank_skew_ms, 'ms')} per step ({100 * _skew_share(case):.0f}%)",
            )
        )
    return found


def _skew_share(case: CaseResult) -> float:
    skew, step = case.rank_skew_ms, case.step_ms
    return skew.estimate / step.estimate if skew and step else 0.0
