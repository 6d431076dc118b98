"""Measures trials of the gate: two fresh processes take turns, block by block, as the sides of a gate do."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_bench.bench.cluster.process import huge_pages_env
from ddp_bench.bench.console import Console
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate import noise, power
from ddp_bench.bench.gate.noise import Noise, noise_of
from ddp_bench.bench.gate.options import DEFAULT_LAUNCHES, DEFAULT_THRESHOLD
from ddp_bench.bench.gate.power import Launch, Rate, TrialStep, rates, trials_of
from ddp_bench.bench.package import own_command
from ddp_bench.bench.results.disk import read_bytes
from ddp_bench.bench.results.store import write_output

COLUMNS = ("launch", "slow_down_pct", "round", "baseline_ms", "candidate_ms")

MOST_RECORD_BYTES = 64 * 2**20
"""Largest record of trials that is read: that of a thousand trials has 20 MB."""


BLOCK_MS = (1e-6, 1e12)
"""From a nanosecond to thirty years: a number beyond is damage, and its square may be no number."""


class TrialProcess:
    """A process that trains blocks on request (`bench.gate.trial_process`)."""

    def __init__(self, step: TrialStep) -> None:
        trains = (step.arch, str(step.batch_size), str(step.steps))
        self._process = subprocess.Popen(
            own_command("-m", "ddp_bench.bench.gate.trial_process", *trains),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1", **huge_pages_env(os.environ)},
        )
        self.device = ""
        """Name of what it trains on; known once it is warm."""

    def warm_up(self) -> None:
        """Wait until it has started and taken its first steps. Raises UsageError if it ends instead."""
        self._answer()
        self._ask("warm up")
        self.device = self._answer().strip()

    def block_ms(self, slow_down: float) -> float:
        """Train one block, slowed by this share; its duration."""
        self._ask(str(slow_down))
        return float(self._answer())

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its answer will be missing
            self._process.stdin.write(f"{what}\n")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UsageError("a side of a power trial ended; its own message stands above")
        return line

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.communicate()


def measure_launch(
    sides: Sequence[TrialProcess], step: TrialStep, *, slow_downs: Sequence[float], num_rounds: int, seed: int
) -> list[Launch]:
    """One launch of every slow-down by two fresh processes, `num_rounds` rounds each.

    The slow-downs are blocks of the same two processes in random order, so a hundred trials of each of them
    cost little more than a hundred of one; trials of one slow-down share nothing.
    """
    schedule = random.Random(seed)
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
    """Add the rounds of launch `number` to a CSV file, all or none, begun with its header where it is new."""
    lines = [",".join(COLUMNS)] if not path.exists() else path.read_text(encoding="utf-8").splitlines()
    for launch in launches:
        for round_index, baseline_ms in launch.baseline_ms.items():
            candidate_ms = launch.candidate_ms[round_index]
            percent = f"{100 * launch.slow_down:g}"
            lines.append(f"{number},{percent},{round_index},{baseline_ms:.5f},{candidate_ms:.5f}")
    text = "\n".join(lines) + "\n"
    write_output(path, lambda part: part.write_text(text, encoding="utf-8"), option="--power")


def load(path: Path) -> list[list[Launch]]:
    """The launches in such a file, all slow-downs of one together. Raises UsageError where it is not one."""
    found: dict[int, dict[float, Launch]] = {}
    try:
        text = read_bytes(path, most_bytes=MOST_RECORD_BYTES).decode("utf-8")
        if not text.endswith("\n"):
            raise ValueError("its last line is cut off")  # one message for all
        for row in csv.DictReader(io.StringIO(text), strict=True):
            slow_down = _within(row["slow_down_pct"], 0, 1000) / 100
            of_launch = found.setdefault(int(row["launch"]), {})
            launch = of_launch.setdefault(
                slow_down, Launch(slow_down=slow_down, baseline_ms={}, candidate_ms={})
            )
            round_index = int(row["round"])
            launch.baseline_ms[round_index] = _within(row["baseline_ms"], *BLOCK_MS)
            launch.candidate_ms[round_index] = _within(row["candidate_ms"], *BLOCK_MS)
        if not found:
            raise ValueError("it holds none")  # one message for whatever is wrong with it
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} is no file of power trials: {error}; name a new one") from None
    return [list(of_launch.values()) for of_launch in found.values()]


def _within(text: str, least: float, most: float) -> float:
    value = float(text)
    if not least <= value <= most:
        raise ValueError(f"{text} is not between {least:g} and {most:g}")
    return value


def measure_power(record: Path, *, num_trials: int, quiet: bool = False) -> list[Rate]:
    """Measure until `record`, a CSV file that an earlier call may have begun, holds `num_trials` trials.

    Raises UsageError where the file is another's or a side ends early.
    """
    if not record.parent.is_dir():
        raise UsageError(f"{record.parent} is no folder; name a file in one")
    console = Console(silent=quiet)
    done = len(load(record)) if record.exists() else 0
    wanted = num_trials * DEFAULT_LAUNCHES
    begun = time.monotonic()
    try:
        for number, sides in enumerate(_pairs(wanted - done), start=done + 1):
            took_s = (time.monotonic() - begun) / max(number - 1 - done, 1)
            left_s = took_s * (wanted - number + 1) if number > done + 1 else None
            console.progress("power trials, launch", number - 1, wanted, left_s)
            trial = (number - 1) // DEFAULT_LAUNCHES
            launches = measure_launch(
                sides[:: 1 if number % 2 else -1],
                power.STEP,
                slow_downs=(*power.EVERY_TRIAL, power.IN_TURN[trial % len(power.IN_TURN)]),
                num_rounds=power.ROUNDS_PER_LAUNCH,
                seed=number,
            )
            append(record, number, launches)
    finally:
        console.progress_done()
    return rates(trials_of(load(record), DEFAULT_LAUNCHES), threshold=DEFAULT_THRESHOLD)


def _pairs(count: int) -> Iterator[list[TrialProcess]]:
    """Pairs of fresh processes; the next pair starts up, on another core, while this one is measured."""
    upcoming: list[TrialProcess] = []
    try:
        for left in range(count, 0, -1):
            now, upcoming = upcoming or _pair(), []
            upcoming = _pair() if left > 1 else []
            try:
                yield now
            finally:
                for side in now:
                    side.close()
    finally:
        for side in upcoming:
            side.close()


def _pair() -> list[TrialProcess]:
    return [TrialProcess(power.STEP), TrialProcess(power.STEP)]


def measure_noise(
    seconds: float, *, step: TrialStep = noise.STEP, num_launches: int = DEFAULT_LAUNCHES, quiet: bool = False
) -> Noise:
    """Blocks for about `seconds`, starting up not counted. Raises UsageError if a side ends early."""
    console = Console(silent=quiet)
    launches: list[Launch] = []
    took_s, device = 0.0, ""
    try:
        for number in range(1, num_launches + 1):
            left_s = (num_launches - number + 1) * seconds / num_launches
            console.progress(f"A/A noise, launch {number}", number - 1, num_launches, left_s)
            launch, launch_s, device = _noise_launch(step, seconds / num_launches, number, num_launches)
            launches.append(launch)
            took_s += launch_s
    finally:
        console.progress_done()
    num_rounds = sum(len(launch.baseline_ms) for launch in launches)
    return noise_of(launches, round_s=took_s / num_rounds, device=device)


def _noise_launch(step: TrialStep, seconds: float, seed: int, num_launches: int) -> tuple[Launch, float, str]:
    """One pair of processes, the wall time of its rounds, and the device's name."""
    order = random.Random(seed)
    times: tuple[dict[int, float], dict[int, float]] = ({}, {})
    fewest = math.ceil(noise.FEWEST_ROUNDS / num_launches)
    with contextlib.ExitStack() as opened:
        sides = [opened.enter_context(contextlib.closing(TrialProcess(step))) for _ in times]
        for side in sides:
            side.warm_up()
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds or len(times[1]) < fewest:
            round_index = len(times[1]) + 1
            for index in order.sample((0, 1), 2):
                times[index][round_index] = sides[index].block_ms(0.0) / step.steps
        took_s = time.perf_counter() - begun
    return Launch(slow_down=0.0, baseline_ms=times[0], candidate_ms=times[1]), took_s, sides[0].device
