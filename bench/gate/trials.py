"""Runs power trials: two fresh processes per trial that take turns, block by block, as the gate's sides do.

The slow-downs of one trial are blocks of the same two processes in random order, so a hundred trials of each
of them cost little more than a hundred of one; trials of one slow-down share nothing.
"""

from __future__ import annotations

import contextlib
import csv
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.cluster.process import huge_pages_env
from bench.errors import UsageError
from bench.gate.power_rates import Launch
from bench.gate.trial_process import Step, command

COLUMNS = ("launch", "slow_down_pct", "round", "baseline_ms", "candidate_ms")


class Side:
    """A process that trains blocks on request."""

    def __init__(self, step: Step) -> None:
        self._process = subprocess.Popen(
            command(step),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1", **huge_pages_env(os.environ)},
        )

    def warm_up(self) -> None:
        """Wait until it has started and taken its first steps. Raises UsageError if it ends instead."""
        self._answer()
        self._ask("warm up")
        self._answer()

    def block_ms(self, slow_down: float) -> float:
        """Train one block, slowed by this share; its duration."""
        self._ask(str(slow_down))
        return float(self._answer())

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - an invariant: it is a pipe
        self._process.stdin.write(f"{what}\n")

    def _answer(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - an invariant: it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise UsageError("a side of a power trial ended; its own message stands above")
        return line

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.communicate()


def measure_launch(
    sides: Sequence[Side], step: Step, *, slow_downs: Sequence[float], num_rounds: int, seed: int
) -> list[Launch]:
    """One launch of every slow-down by two fresh processes, `num_rounds` rounds each."""
    schedule = random.Random(seed)  # noqa: S311 - a schedule
    times: dict[float, tuple[dict[int, float], dict[int, float]]] = {s: ({}, {}) for s in slow_downs}
    for side in sides:
        side.warm_up()
    for round_index in range(1, num_rounds + 1):
        for slow_down in schedule.sample(slow_downs, len(slow_downs)):
            for candidate in schedule.sample((0, 1), 2):
                block_ms = sides[candidate].block_ms(slow_down if candidate else 0.0)
                times[slow_down][candidate][round_index] = block_ms / step.steps
    return [Launch(slow_down=s, baseline_ms=a, candidate_ms=b) for s, (a, b) in times.items()]


def append(path: Path, number: int, launches: Sequence[Launch]) -> None:
    """Add the rounds of launch `number` to a CSV file, begun with its header where it is new."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for launch in launches:
            percent = f"{100 * launch.slow_down:g}"
            for round_index, baseline_ms in launch.baseline_ms.items():
                candidate_ms = launch.candidate_ms[round_index]
                writer.writerow([number, percent, round_index, f"{baseline_ms:.5f}", f"{candidate_ms:.5f}"])


def load(path: Path) -> list[list[Launch]]:
    """The launches in such a file, all slow-downs of one together. Raises UsageError where it is not one."""
    found: dict[int, dict[float, Launch]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file, strict=True):
                slow_down = float(row["slow_down_pct"]) / 100
                of_launch = found.setdefault(int(row["launch"]), {})
                launch = of_launch.setdefault(
                    slow_down, Launch(slow_down=slow_down, baseline_ms={}, candidate_ms={})
                )
                launch.baseline_ms[int(row["round"])] = float(row["baseline_ms"])
                launch.candidate_ms[int(row["round"])] = float(row["candidate_ms"])
        if not found:
            raise ValueError("it holds none")  # noqa: TRY301 - one message for whatever is wrong with it
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} is no file of power trials: {error}; name a new one") from None
    return [list(of_launch.values()) for of_launch in found.values()]
