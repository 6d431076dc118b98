"""Estimates the wait for the slowest rank: the expected maximum over n ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RankSpread:
    """Steps of ranks over the median step of all ranks in the round.

    Args:
        of_ranks: one figure per rank and step.
        of_slowest: the longest of the `num_ranks` that stepped together; the mean of a round's steps, one
            figure per round, as throughput is measured.
        num_ranks: ranks that stepped together.
    """

    of_ranks: tuple[float, ...] = ()
    of_slowest: tuple[float, ...] = ()
    num_ranks: int = 1

    @classmethod
    def of(cls, steps_ms: Mapping[int, Mapping[int, Sequence[float]]]) -> RankSpread:
        """Compare steps by round and rank, each with the other ranks' of the same place."""
        ranks: list[float] = []
        slowest: list[float] = []
        for by_rank in steps_ms.values():
            typical = typical_ms(by_rank)
            ranks += [ms / typical for steps in by_rank.values() for ms in steps]
            slowest.append(mean(map(max, zip(*by_rank.values(), strict=False))) / typical)
        most = max((len(by_rank) for by_rank in steps_ms.values()), default=1)
        return cls(of_ranks=tuple(ranks), of_slowest=tuple(slowest), num_ranks=most)

    def factor(self, num_ranks: int) -> float:
        """The slowest of `num_ranks` over a typical one; 1 for one, which waits for none.

        Ranks that stepped together may share cores, or one of them always be slow, so their slowest is
        measured. For more it grows as among independent ranks; fewer are taken as independent.
        """
        if num_ranks == 1:
            return 1.0
        alone = expected_max(self.of_ranks, num_ranks)
        if not self.of_slowest or num_ranks < self.num_ranks:
            return alone
        return median(self.of_slowest) * alone / expected_max(self.of_ranks, self.num_ranks)


def typical_ms(by_rank: Mapping[int, Sequence[float]]) -> float:
    """The median step of all ranks of a round, in the steps' unit."""
    return float(np.median(np.concatenate(list(by_rank.values()))))


def expected_max(samples: Sequence[float], num_ranks: int) -> float:
    """Estimate the largest of `num_ranks` independent draws, given `samples` of one; 1 without samples.

    Up to as many ranks as there are samples it is that of the empirical distribution. Beyond, what lies above
    the upper quartile is taken as exponential (extreme-value theory's Gumbel domain): of n ranks n / 4 are
    there, and the largest of m exponentials of mean b is b (ln m + 0.577) on average.
    """
    values = np.sort(np.asarray(samples, dtype=float))
    if not values.size:
        return 1.0
    within = min(num_ranks, values.size)
    ends = (np.arange(values.size + 1) / values.size) ** within
    expected = float(np.sum(values * np.diff(ends)))
    if num_ranks <= values.size:
        return expected
    quartile = float(np.quantile(values, 0.75))
    excess = values[values > quartile] - quartile
    if not excess.size:
        return expected
    tail = float(excess.mean()) * (math.log(num_ranks * excess.size / values.size) + np.euler_gamma)
    return max(expected, quartile + tail)
