"""How long a case trains without a pause after the rounds, and in blocks of how many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Protocol

from ..case import Case
from ..plan import Planned
from ..results.round_times import CaseTimes
from ..settings import ResolvedSettings
from .failures import PATIENCE, block_s

BLOCK_S = 10.0
"""A block takes no longer: what a crash or Ctrl-C costs, against some ms between two blocks."""

LEAST_BLOCKS = 20
"""A case gets so many blocks, unless its steps are longer: two in the first tenth, ten in the last half."""

MOST_STEPS = 5000
"""Of a block: a row of blocks.csv holds each step's time, 40 KiB of text by then."""


class Placed(Protocol):
    """A case of a plan, prepared or not."""

    @property
    def case(self) -> Case: ...

    @property
    def oversubscribed(self) -> bool: ...


def is_sustained(case: Placed, settings: ResolvedSettings) -> bool:
    """Whether a case that runs trains on after the rounds: one that has its devices for itself."""
    return settings.sustain is not None and not case.oversubscribed


def expected_s(plan: Sequence[Planned], settings: ResolvedSettings) -> float:
    """Seconds that all cases of a plan train on after the rounds."""
    return left_s(settings, [p for p in plan if p.skip_reason is None and is_sustained(p, settings)], {})


def left_s(settings: ResolvedSettings, cases: Sequence[Placed], done_s: Mapping[str, float]) -> float:
    """Seconds that these cases still train, of which each has trained `done_s` by its id."""
    wanted_s = settings.sustain or 0.0
    return sum(max(wanted_s - done_s.get(one.case.case_id, 0.0), 0.0) for one in cases)


def blocks_left(settings: ResolvedSettings, done_s: float) -> int:
    """Blocks that a case still lacks after `done_s` seconds of them; half a block more or less is enough."""
    if settings.sustain is None:
        return 0
    return max(round((settings.sustain - done_s) / _usual_s(settings, settings.sustain)), 0)


def next_steps(settings: ResolvedSettings, times: CaseTimes) -> int:
    """Steps of a case's next block, by its latest step time; 0 where it has trained long enough."""
    left, step_s = blocks_left(settings, times.sustained_s), _step_s(times)
    if not left or step_s is None:
        return 0
    wanted = round(((settings.sustain or 0.0) - times.sustained_s) / left / step_s)
    return min(max(wanted, 1), MOST_STEPS)


def limit_s(settings: ResolvedSettings, longest_step_s: float, step_s: float) -> float:
    """The time limit of a block, in seconds; arguments as of `block_s`."""
    return settings.case_timeout or max(block_s(settings, longest_step_s, step_s), PATIENCE * BLOCK_S)


def _step_s(times: CaseTimes) -> float | None:
    latest = times.step_ms.get("sustained")
    if latest:
        return latest[max(latest)] / 1000
    timed = times.step_ms.get("timed")
    return median(timed.values()) / 1000 if timed else None


def _usual_s(settings: ResolvedSettings, whole_s: float) -> float:
    """Seconds of a block of `whole_s` in all; with `--case-timeout` far enough below it."""
    longest_s = BLOCK_S if settings.case_timeout is None else min(BLOCK_S, settings.case_timeout / 2)
    return min(longest_s, whole_s / LEAST_BLOCKS)
