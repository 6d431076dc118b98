"""Figures that the summary of a run needs of its blocks, kept as numbers instead of rows. No I/O.

A block has one row per rank, and a large run millions of them; of each block only what ranks have in common
stays: the longest and the shortest rank, the step times, and the medians of its details.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..machine.gpus import ClockReason
from ..stats.fit import FITTED_PHASES, FittedSteps
from ..stats.interval import Samples
from .block_times import DEVICE_ALLOCS, GPUS
from .blocks import Block
from .case_columns import CASES

ByRound: TypeAlias = dict[int, float]
MOMENTS = ("ready_ms", "start_ms", "done_ms")
"""Details that hold one figure per bucket."""

_COLUMNS = frozenset(column.name for column in CASES)
_OF_GPUS = {column.name: column.of_gpus for column in CASES if column.of_gpus}

_BLOCK_DEFAULTS: Mapping[str, Any] = {"case_id": "", "phase": "", "round": 0, "launch": 1, "started_s": 0.0}
"""Columns in which the ranks of a block agree, and what an empty cell means."""

_NO_TEXTS: Sequence[Sequence[str]] = ((), (), ())
"""Hosts, single steps and details of a block, which take most of the time to read, and nobody asks for."""

WAIT_KEY = "waited_ms"
"""Key in the detail of a `no_sync` block: the part of a step in which its rank waited for others."""


@dataclass
class CaseTimes:
    """The blocks of one case; all durations in ms per step."""

    step_ms: dict[str, ByRound] = field(default_factory=dict)
    """Time of the longest rank's block over its steps, by phase and round."""
    slowest: Counter[int] = field(default_factory=Counter)
    """Number of times that each rank took longest under `no_sync`."""
    steps_ms: array[float] = field(default_factory=lambda: array("f"))
    """Every timed step of every rank and round; single precision holds the five digits they come with."""
    num_steps: int = 0
    """Timed steps of all blocks."""
    timed_ms: float = 0.0
    """Time of the longest ranks over all timed blocks."""
    details: dict[str, ByRound] = field(default_factory=dict)
    """Values from the blocks by column of cases.csv and round, medians over ranks."""
    device_allocs: array[int] = field(default_factory=lambda: array("q"))
    """Allocations of each rank and block of steps on GPUs."""
    moments: dict[int, dict[str, list[array[float]]]] = field(default_factory=dict)
    """Figures by rank and name, for every block that has them: one for each bucket."""
    throttled_by: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Percent of samples in which each reason held clocks of GPUs down, added up over blocks and GPUs."""

    def add(self, block: Block) -> None:
        """Take a block of this case."""
        phase, round_index = block.phase, block.round_index
        per_step = [ms / steps for ms, steps in zip(block.block_ms, block.num_steps, strict=True)]
        details = [dict(json.loads(told)) if told else {} for told in block.details]
        self.step_ms.setdefault(phase, {})[round_index] = max(per_step)
        if phase == "no_sync":
            # Where no rank waits for another, but in a watched script's own collectives.
            waited = [float(told.get(WAIT_KEY, 0.0)) for told in details] or [0.0] * len(per_step)
            own_ms = [ms - others for ms, others in zip(per_step, waited, strict=True)]
            slowest = max(own_ms)
            self.details.setdefault("rank_skew_ms", {})[round_index] = slowest - min(own_ms)
            self.slowest[block.ranks[own_ms.index(slowest)]] += 1
        elif phase == "timed":
            self.num_steps += block.num_steps[0]
            self.timed_ms += max(block.block_ms)
            for steps in block.steps_ms:
                self.steps_ms.extend(map(float, (steps or "").split()))
        if any(details):
            self._add_details(block, details)

    def _add_details(self, block: Block, details: Sequence[Any]) -> None:
        samples: dict[str, list[float]] = {}
        gpus: list[tuple[Any, Any]] = []
        for rank, host, told in zip(block.ranks, block.hosts, details, strict=True):
            detail = dict(told)
            if "local_last_ready_ms" in detail:
                detail["compute_slowdown"] = detail["last_ready_ms"] / detail["local_last_ready_ms"]
            for name, value in detail.items():
                if name in MOMENTS:
                    self.moments.setdefault(rank, {}).setdefault(name, []).append(array("f", value))
                elif name == GPUS:
                    gpus.append((host, value))
                elif name in _COLUMNS:
                    samples.setdefault(name, []).append(float(value))
        self.device_allocs.extend(map(int, samples.pop(DEVICE_ALLOCS, ())))
        for name, values in samples.items():
            self.details.setdefault(name, {})[block.round_index] = float(np.median(values))
        if len(gpus) == len(block.ranks) and all(found for _, found in gpus):
            self._add_gpus(block.round_index, gpus)

    def _add_gpus(self, round_index: int, ranks: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """Add each rank's host and, by name, what its GPUs did: two that share one both tell of it."""
        gpus = {(host, name): dict(did) for host, found in ranks for name, did in dict(found).items()}
        for name, together in _OF_GPUS.items():
            told = [float(did[name]) for did in gpus.values() if name in did]
            if told and len(told) == len(gpus):  # what one does not tell is unknown of all
                self.details.setdefault(name, {})[round_index] = together(told)
        for did in gpus.values():
            for why, percent in dict(did.get("throttled_by_pct", {})).items():
                self.throttled_by[why] += float(percent)

    def get_steps(self, phase: str = "timed") -> ByRound:
        """Return the step times of blocks of a phase."""
        return self.step_ms.get(phase, {})

    def get_values(self, column: str) -> ByRound:
        """Return the values that details of blocks have of a column of cases.csv."""
        return self.details.get(column, {})

    def name_throttle_reasons(self) -> str | None:
        """Name what held clocks down, the most frequent first; None where nothing did."""
        known = [why for why in ClockReason if why in self.throttled_by]
        return ", ".join(sorted(known, key=lambda why: -self.throttled_by[why])) or None

    def find_slowest_rank(self) -> int | None:
        """Find the rank that most often took longest, the lowest of several; None without `no_sync`."""
        return min(self.slowest, key=lambda rank: (-self.slowest[rank], rank), default=None)

    def compute_percentile_ms(self, percent: float) -> float:
        """Percentile of the timed steps, to six significant digits; NaN without any.

        Also the 99th of fewer than 100.
        """
        steps = np.frombuffer(self.steps_ms, dtype=np.float32)
        if not steps.size or (percent > 95 and steps.size * (100 - percent) < 100):
            return math.nan
        return float(f"{np.percentile(steps, percent):.6g}")

    def collect_bucket_moments(self, num_buckets: int) -> dict[int, dict[str, Samples]]:
        """Return by rank and name a row per block and a column per bucket; other layouts are left out."""
        found: dict[int, dict[str, Samples]] = {}
        for rank, names in self.moments.items():
            for name, blocks in names.items():
                if same := [values for values in blocks if len(values) == num_buckets]:
                    found.setdefault(rank, {})[name] = np.array(same, dtype=np.float64)
        return found


class RoundTimes:
    """The blocks of a run by case. `add` is called once for every block."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.cases: dict[str, CaseTimes] = {}
        self.fitted_s = 0.0
        """Seconds of blocks whose step times are compared."""
        self.elapsed_s = 0.0
        """End of the last block, in seconds since the run began."""
        self._rounds_of: dict[int, tuple[float, float]] = {}
        """Begin and end of the rounds of each launch of the workers, in seconds since the run began."""
        for block in blocks:
            self.add(block)

    def add(self, block: Block) -> None:
        self.cases.setdefault(block.case_id, CaseTimes()).add(block)
        longest_s = max(block.block_ms) / 1000
        self.elapsed_s = max(self.elapsed_s, block.started_s + longest_s)
        if block.phase != "warmup":
            begun_s, _ = self._rounds_of.setdefault(block.launch, (block.started_s, 0.0))
            self._rounds_of[block.launch] = begun_s, self.elapsed_s
        if block.phase in FITTED_PHASES:
            self.fitted_s += longest_s

    @property
    def rounds_s(self) -> float:
        """Seconds of rounds: all launches of the workers, without their start-up."""
        return sum(ended_s - begun_s for begun_s, ended_s in self._rounds_of.values())

    def get_case(self, case_id: str) -> CaseTimes:
        return self.cases.get(case_id) or CaseTimes()

    def collect_step_ms(self, phase: str) -> dict[str, ByRound]:
        """Milliseconds per step of every case that has such blocks, by round: the longest rank's."""
        return {name: case.step_ms[phase] for name, case in self.cases.items() if phase in case.step_ms}

    def fit_steps(self) -> FittedSteps:
        """Return the typical step times of all cases, of one fit."""
        return FittedSteps(
            {(c, p): rounds for p in FITTED_PHASES for c, rounds in self.collect_step_ms(p).items()}
        )


def assign_block_numbers(frame: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Assign each row the number of its block, ascending by case, phase and round."""
    found = np.zeros(len(frame), np.int64)
    for name in ("case_id", "phase", "round"):
        codes, values = pd.factorize(frame[name], sort=True)
        found = found * len(values) + codes
    return found


def group_blocks(frame: pd.DataFrame) -> Iterator[Block]:
    """Make the blocks of a blocks.csv, by case, phase and round."""
    numbers = assign_block_numbers(frame)
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    firsts = order[starts]
    common = (frame[name].iloc[firsts].fillna(usual).tolist() for name, usual in _BLOCK_DEFAULTS.items())
    columns = [frame[name].to_numpy() for name in ("rank", "num_steps", "block_ms")]
    for told, rows in zip(zip(*common, strict=True), np.split(order, starts[1:]), strict=False):
        yield Block(*told, *(column[rows].tolist() for column in columns), *_NO_TEXTS)
