"""How long a case trains without a pause after the rounds, and in blocks of how many steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ddp_bench.bench.cluster.ranks import Cluster
from ddp_bench.bench.console import Console
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.recovery.failures import PATIENCE, block_s
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.results.round_times import CaseTimes
from ddp_bench.bench.run.prepare import LiveCase
from ddp_bench.bench.settings import ResolvedSettings

BLOCK_S = 10.0
"""A block takes no longer: what a crash or Ctrl-C costs, against some ms between two blocks."""

LEAST_BLOCKS = 20
"""A case gets so many blocks, unless its steps are longer: two in the first tenth, ten in the last half."""

MOST_STEPS = 5000
"""Of a block: a row of blocks.csv holds each step's time, 40 KiB of text by then."""


def is_sustained(case: Planned | LiveCase, settings: ResolvedSettings) -> bool:
    """Whether a case that runs trains on after the rounds: one that has its devices for itself."""
    return settings.sustain is not None and not case.oversubscribed


def expected_s(plan: Sequence[Planned], settings: ResolvedSettings) -> float:
    """Seconds that all cases of a plan train on after the rounds."""
    return left_s(settings, [p for p in plan if p.skip_reason is None and is_sustained(p, settings)], {})


def left_s(
    settings: ResolvedSettings, cases: Sequence[Planned | LiveCase], done_s: Mapping[str, float]
) -> float:
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


class Training:
    """The blocks of cases that train on; rank 0, which has the `recorder`, decides for all."""

    def __init__(
        self, settings: ResolvedSettings, cluster: Cluster, recorder: Recorder | None, console: Console
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._recorder = recorder
        self._console = console

    def blocks(self, cases: Sequence[LiveCase], *, first: int) -> Iterator[tuple[int, ResolvedSettings]]:
        """Number and settings of block after block of the first of `cases`, all those still to train."""
        for number in itertools.count(first):
            steps = self._cluster.from_first(self._steps(cases))
            if not steps:
                return
            yield number, replace(self._settings, steps=steps, least_block_s=0.0)

    def _steps(self, cases: Sequence[LiveCase]) -> int:
        if self._recorder is None:
            return 0
        case_id = cases[0].case.case_id
        times = self._recorder.times_of(case_id)
        steps = next_steps(self._settings, times)
        if steps:
            done = len(times.sustained_ms)
            total = done + blocks_left(self._settings, times.sustained_s)
            seconds = left_s(self._settings, cases, self._recorder.sustained_s())
            self._console.progress(f"sustained {case_id}", done, total, seconds)
        return steps


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
