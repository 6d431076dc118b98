"""How often the gate fires, from recorded trials; the gate's own `compare` judges every trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import scipy

from ddp_bench.bench.cli import to_json
from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.judge import METRICS
from ddp_bench.bench.gate.launches import merged
from ddp_bench.bench.gate.options import DEFAULT_LAUNCHES, DEFAULT_THRESHOLD
from ddp_bench.bench.gate.runs import GateCase, GateRun
from ddp_bench.bench.results.round_times import ByRound

EVERY_TRIAL = (0.0, 0.07, 0.10)
"""Injected in every trial, as shares of the step time; 0 is an A/A trial, in which any alarm is false."""

IN_TURN = (0.01, 0.02, 0.03, 0.05)
"""One of these comes with them, another in every trial: a hundred trials of each would take twice as long."""

ROUNDS_PER_LAUNCH = 40
"""Of each slow-down; few, because a rate takes a hundred trials and more."""


@dataclass(frozen=True, kw_only=True)
class TrialStep:
    """The training step of a trial: one device, the plain module."""

    arch: str = "resnet20"
    batch_size: int = 8
    steps: int = 3
    """Steps per block."""


STEP = TrialStep(batch_size=4, steps=1)
"""Smaller than that of `bench.gate.noise`, for the same reason."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Two fresh processes, one slow-down: step times of both sides by round, in ms."""

    slow_down: float
    baseline_ms: ByRound
    candidate_ms: ByRound


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How many of the trials of one slow-down the gate called a regression."""

    slow_down: float
    num_regressed: int
    num_trials: int
    low: float
    """Ends of the exact (Clopper-Pearson, 1934) 95% interval of the rate, shares."""
    high: float

    @property
    def share(self) -> float:
        """Of the trials."""
        return self.num_regressed / self.num_trials


def trials_of(launches: Sequence[Sequence[Launch]], launches_per_trial: int) -> Iterator[list[Launch]]:
    """Gate runs: of every slow-down, launches one after the other; those too few for another are left out."""
    by_slow_down: dict[float, list[Launch]] = {}
    for of_one_launch in launches:
        for launch in of_one_launch:
            by_slow_down.setdefault(launch.slow_down, []).append(launch)
    for found in by_slow_down.values():
        whole = len(found) - len(found) % launches_per_trial
        yield from (found[i : i + launches_per_trial] for i in range(0, whole, launches_per_trial))


def regressed(trial: Sequence[Launch], *, threshold: float) -> bool:
    """Whether `bench.gate --interleave` would end with exit status 1 on these launches."""
    gate = compare(
        merged([_run(launch.baseline_ms) for launch in trial]),
        merged([_run(launch.candidate_ms) for launch in trial]),
        thresholds={metric.name: threshold for metric in METRICS},
        interleaved=True,
    )
    return gate.exit_code == ExitCode.FAILED


def rates(trials: Iterable[Sequence[Launch]], *, threshold: float) -> list[Rate]:
    """The rate of regressions for every slow-down, smallest first; a trial holds launches of one of them."""
    verdicts: dict[float, list[bool]] = {}
    for trial in trials:
        verdicts.setdefault(trial[0].slow_down, []).append(regressed(trial, threshold=threshold))
    return [_rate(slow_down, verdicts[slow_down]) for slow_down in sorted(verdicts)]


def _rate(slow_down: float, verdicts: Sequence[bool]) -> Rate:
    interval = scipy.stats.binomtest(sum(verdicts), len(verdicts)).proportion_ci(method="exact")
    return Rate(
        slow_down=slow_down,
        num_regressed=sum(verdicts),
        num_trials=len(verdicts),
        low=float(interval.low),
        high=float(interval.high),
    )


def _run(step_ms: Mapping[int, float]) -> GateRun:
    row = {"status": "ok", "mode": "single", "num_devices": "1", "case_id": "single-n1"}
    case = GateCase(
        case_id="single-n1",
        row=row,
        images_per_s={r: 1000 / ms for r, ms in step_ms.items()},
        speedup={},
        exposed_comm_ms={},
        peak_mem_mib=None,
    )
    return GateRun(Path("trial"), {}, (case,))


def report(found: Sequence[Rate]) -> str:
    """The rates as a Markdown table, and what a trial is."""
    lines = [
        (
            f"A trial is a gate of {DEFAULT_LAUNCHES} launches of {ROUNDS_PER_LAUNCH} rounds, "
            f"threshold {100 * DEFAULT_THRESHOLD:g}%; {STEP.arch}, batch {STEP.batch_size}, "
            f"{STEP.steps} step per block."
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
    setup = {
        "launches": DEFAULT_LAUNCHES,
        "rounds_per_launch": ROUNDS_PER_LAUNCH,
        "threshold": DEFAULT_THRESHOLD,
    }
    return to_json({**setup, "step": asdict(STEP), "rates": [asdict(rate) for rate in found]})
