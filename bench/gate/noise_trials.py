"""Measures A against A: pairs of fresh processes train equal blocks in turns, as the sides of a gate do."""

from __future__ import annotations

import contextlib
import math
import random
import time

import torch

from bench.console import Console
from bench.gate.noise import FEWEST_ROUNDS, Noise, noise_of
from bench.gate.power_rates import Launch
from bench.gate.trial_process import Step
from bench.gate.trials import Side

LAUNCHES = 3
CPU_CORE = "one CPU core standing in for a GPU"
STEP = Step()


def measure(seconds: float, *, step: Step = STEP, num_launches: int = LAUNCHES, quiet: bool = False) -> Noise:
    """Blocks for about `seconds`, starting up not counted. Raises UsageError if a side ends early."""
    console = Console(silent=quiet)
    launches: list[Launch] = []
    took_s = 0.0
    try:
        for number in range(1, num_launches + 1):
            left_s = (num_launches - number + 1) * seconds / num_launches
            console.progress(f"A/A noise, launch {number}", number - 1, num_launches, left_s)
            launch, launch_s = _launch(step, seconds / num_launches, number, num_launches)
            launches.append(launch)
            took_s += launch_s
    finally:
        console.progress_done()
    num_rounds = sum(len(launch.baseline_ms) for launch in launches)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else CPU_CORE
    return noise_of(launches, round_s=took_s / num_rounds, device=device)


def _launch(step: Step, seconds: float, seed: int, num_launches: int) -> tuple[Launch, float]:
    """One pair of processes, and the wall time of its rounds."""
    order = random.Random(seed)  # noqa: S311 - a schedule
    times: tuple[dict[int, float], dict[int, float]] = ({}, {})
    fewest = math.ceil(FEWEST_ROUNDS / num_launches)
    with contextlib.ExitStack() as opened:
        sides = [opened.enter_context(contextlib.closing(Side(step))) for _ in times]
        for side in sides:
            side.warm_up()
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds or len(times[1]) < fewest:
            round_index = len(times[1]) + 1
            for index in order.sample((0, 1), 2):
                times[index][round_index] = sides[index].block_ms(0.0) / step.steps
        took_s = time.perf_counter() - begun
    return Launch(slow_down=0.0, baseline_ms=times[0], candidate_ms=times[1]), took_s
