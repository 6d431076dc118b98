"""The power of the gate on this machine: trial after trial, recorded as it goes, then the two rates."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.console import Console
from bench.gate.launches import DEFAULT_LAUNCHES
from bench.gate.power_rates import EVERY_TRIAL, IN_TURN, Rate, rates, trials_of
from bench.gate.trial_process import Step
from bench.gate.trials import Side, append, load, measure_launch

ROUNDS_PER_LAUNCH = 40
THRESHOLD = 0.05
STEP = Step(batch_size=4, steps=1)


def run(record: Path, *, num_trials: int, quiet: bool = False) -> list[Rate]:
    """Measure until `record`, a CSV file that an earlier call may have begun, holds `num_trials` trials.

    Raises UsageError where the file is another's or a side ends early.
    """
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
                STEP,
                slow_downs=(*EVERY_TRIAL, IN_TURN[trial % len(IN_TURN)]),
                num_rounds=ROUNDS_PER_LAUNCH,
                seed=number,
            )
            append(record, number, launches)
    finally:
        console.progress_done()
    return rates(trials_of(load(record), DEFAULT_LAUNCHES), threshold=THRESHOLD)


def _pairs(count: int) -> Iterator[list[Side]]:
    """Pairs of fresh processes; the next pair starts up, on another core, while this one is measured."""
    upcoming: list[Side] = []
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


def _pair() -> list[Side]:
    return [Side(STEP), Side(STEP)]


def report(found: Sequence[Rate]) -> str:
    """The rates as a Markdown table, and what a trial is."""
    lines = [
        (
            f"A trial is a gate of {DEFAULT_LAUNCHES} launches of {ROUNDS_PER_LAUNCH} rounds, threshold "
            f"{100 * THRESHOLD:g}%; {STEP.arch}, batch {STEP.batch_size}, {STEP.steps} step per block."
        ),
        "",
        "| injected slow-down | called a regression | trials | rate [95%] |",
        "|---:|---:|---:|---:|",
    ]
    for rate in found:
        what = f"{100 * rate.slow_down:g}%" if rate.slow_down else "none (A/A)"
        share = f"{100 * rate.share:.0f}% [{100 * rate.low:.0f}, {100 * rate.high:.0f}]"
        lines.append(f"| {what} | {rate.num_regressed} | {rate.num_trials} | {share} |")
    return "\n".join(lines)


def as_json(found: Sequence[Rate]) -> str:
    """The same for a program: slow-downs and rates as shares."""
    setup = {"launches": DEFAULT_LAUNCHES, "rounds_per_launch": ROUNDS_PER_LAUNCH, "threshold": THRESHOLD}
    return json.dumps({**setup, "step": asdict(STEP), "rates": [asdict(rate) for rate in found]}, indent=2)
