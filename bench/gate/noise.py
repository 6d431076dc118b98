"""What a machine's noise lets a gate see, from A against A: two equal processes in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import scipy

from ddp_bench.bench.cli import command, to_json
from ddp_bench.bench.findings.numbers import about
from ddp_bench.bench.gate.compare import FAMILY_CONFIDENCE
from ddp_bench.bench.gate.judge import judge
from ddp_bench.bench.gate.launches import LAUNCH, launch_ratio, side_by_side
from ddp_bench.bench.gate.options import DEFAULT_THRESHOLD
from ddp_bench.bench.gate.power import Launch, TrialStep
from ddp_bench.bench.stats import Interval, median_interval, paired_ratio

Array = np.ndarray[tuple[int], np.dtype[np.float64]]

STEP = TrialStep()
"""Small, so that half a minute holds many blocks."""

LENGTHS_S = (15.0, 30.0, 60.0, 300.0, 600.0)
"""Of the gate runs whose resolution is derived: from a first look to what a pull request can wait for."""

SEEN = 0.9
"""Of runs in which a slow-down of the size named is told from no change."""

SIMULATED_GATES = 400
"""Of each length: enough for a 90% quantile, in a second."""

MOST_SIMULATED_ROUNDS = 300
"""Longer runs are simulated with so many rounds, whose noise is scaled by 1 / sqrt(rounds)."""

FEWEST_ROUNDS = 9
"""In all: a median of fewer has no interval at the gate's confidence."""

CAVEAT = (
    "This holds for this step and one case: longer steps are usually steadier, a gate on many cases asks for "
    "more confidence. Compare versions with bench.gate --interleave REF."
)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What a gate run can see; shares of the step time, None where its rounds are too few."""

    seconds: float
    """Of measured blocks, without starting up."""
    num_rounds: int
    half_width: float | None
    """Of the gate's interval of candidate / baseline, for one case and one metric."""
    resolves: float | None
    """Smallest slow-down told from no change in 9 of 10 runs."""
    gated: float | None
    """Smallest slow-down that fails a gate with a threshold of 5% in 9 of 10 runs."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Shares, not percent; intervals are 95% but for `gate_ratio`."""

    device: str
    num_launches: int
    num_rounds: int
    round_s: float
    """Wall time of one block of both sides."""
    step_ms: float
    block_spread: float
    """Robust standard deviation of blocks of one process over their median: 1.4826 MAD."""
    ratio: Interval
    """A / A by step time; 1 is the truth."""
    gate_ratio: Interval
    """The same at the confidence of a gate with one comparison."""
    launch_ratios: tuple[float, ...]
    """A / A of each launch: what differs between them no number of rounds can average out."""
    drift: Interval
    """Change of the step time from the first to the last round."""
    sub_run_rounds: int
    sub_run_half_width: float
    """Median over sub-runs of that many rounds of their measured half intervals."""
    expected_half_width: float
    """What 1 / sqrt(rounds) gives for such sub-runs, from all rounds."""
    resolutions: tuple[Resolution, ...]

    @property
    def verdict(self) -> str:
        """What the gate would say of A against A: anything but `unchanged` and `inconclusive` is false."""
        return judge(self.gate_ratio, higher_is_better=False, threshold=DEFAULT_THRESHOLD)


def noise_of(launches: Sequence[Launch], *, round_s: float, device: str) -> Noise:
    """Everything from the rounds of launches without slow-down; at least `FEWEST_ROUNDS` of them in all."""
    baseline = side_by_side([launch.baseline_ms for launch in launches])
    candidate = side_by_side([launch.candidate_ms for launch in launches])
    gate_ratio = launch_ratio(candidate, baseline, confidence=FAMILY_CONFIDENCE)
    centred = np.concatenate([_inside(launch) for launch in launches])
    whole = median_interval(centred.tolist(), confidence=FAMILY_CONFIDENCE)
    between = _between(
        gate_ratio, paired_ratio(candidate, baseline, confidence=FAMILY_CONFIDENCE), len(launches)
    )
    sub_run_rounds, sub_run_half_width = _sub_runs(centred)
    return Noise(
        device=device,
        num_launches=len(launches),
        num_rounds=len(baseline),
        round_s=round_s,
        step_ms=float(np.median([*baseline.values(), *candidate.values()])),
        block_spread=_block_spread(launches),
        ratio=launch_ratio(candidate, baseline, confidence=0.95),
        gate_ratio=gate_ratio,
        launch_ratios=tuple(paired_ratio(one.candidate_ms, one.baseline_ms).estimate for one in launches),
        drift=_drift(list(baseline.values()), list(candidate.values())),
        sub_run_rounds=sub_run_rounds,
        sub_run_half_width=sub_run_half_width,
        expected_half_width=_half(whole) * math.sqrt(len(centred) / sub_run_rounds),
        resolutions=tuple(
            _resolution(seconds, int(seconds / round_s), centred, between=between, num_launches=len(launches))
            for seconds in LENGTHS_S
        ),
    )


def _inside(launch: Launch) -> Array:
    """Ratios of the rounds over the launch's median ratio: the noise between rounds alone."""
    ratios: Array = np.array([launch.candidate_ms[r] / ms for r, ms in launch.baseline_ms.items()])
    return ratios / float(np.median(ratios))


def _half(interval: Interval) -> float:
    return (interval.high - interval.low) / 2


def _block_spread(launches: Sequence[Launch]) -> float:
    sides = [list(side.values()) for one in launches for side in (one.baseline_ms, one.candidate_ms)]
    return float(
        np.median([scipy.stats.median_abs_deviation(s, scale="normal") / np.median(s) for s in sides])
    )


def _drift(baseline: Sequence[float], candidate: Sequence[float]) -> Interval:
    """Theil-Sen slope of the log step time of both sides together, over all rounds in order."""
    logs = (np.log(baseline) + np.log(candidate)) / 2
    # Every pair of points makes a slope: a thousand of them are enough.
    places = np.unique(np.linspace(0, len(logs) - 1, min(len(logs), 1000)).round().astype(int))
    slope, _, low, high = scipy.stats.theilslopes(logs[places], places)
    return Interval(*(math.expm1(float(s) * (len(logs) - 1)) for s in (slope, low, high)))


def _sub_runs(centred: Array) -> tuple[int, float]:
    """Rounds in each of about four consecutive parts, and the median of their half intervals."""
    size = min(max(len(centred) // 4, FEWEST_ROUNDS), len(centred))
    parts = [centred[i : i + size] for i in range(0, len(centred) - size + 1, size)]
    halves = [_half(median_interval(part.tolist(), confidence=FAMILY_CONFIDENCE)) for part in parts]
    return size, float(np.median(halves))


def _between(gate_ratio: Interval, pooled: Interval, num_launches: int) -> float:
    """Standard deviation between launches, from what it adds to the gate's interval (`launch_ratio`)."""
    added = max(_half(gate_ratio) ** 2 - _half(pooled) ** 2, 0.0)
    return math.sqrt(added * num_launches) / float(scipy.stats.norm.ppf((1 + FAMILY_CONFIDENCE) / 2))


def _resolution(
    seconds: float, num_rounds: int, centred: Array, *, between: float, num_launches: int
) -> Resolution:
    """Gates of that length from measured rounds drawn anew, each judged by the interval a gate would use."""
    if num_rounds < max(FEWEST_ROUNDS, num_launches):
        return Resolution(seconds=seconds, num_rounds=num_rounds, half_width=None, resolves=None, gated=None)
    rng = np.random.default_rng(num_rounds)
    drawn = min(num_rounds, MOST_SIMULATED_ROUNDS)
    launch = np.arange(drawn) % num_launches
    keys = (launch * LAUNCH + np.arange(drawn)).tolist()
    ones = dict.fromkeys(keys, 1.0)
    logs = np.log(centred)
    # Smoothed a little, with Silverman's bandwidth: few rounds tell the density at their median roughly.
    bandwidth = 0.9 * float(scipy.stats.median_abs_deviation(logs, scale="normal")) * len(logs) ** -0.2
    found = []
    for _ in range(SIMULATED_GATES):
        noise = rng.choice(logs, drawn) + rng.normal(0.0, bandwidth, drawn)
        noise *= math.sqrt(drawn / num_rounds)
        offsets = rng.normal(0.0, between, num_launches)[launch]
        ratios = dict(zip(keys, np.exp(noise + offsets).tolist(), strict=True))
        found.append(launch_ratio(ratios, ones, confidence=FAMILY_CONFIDENCE))
    low, estimate = np.array([one.low for one in found]), np.array([one.estimate for one in found])
    # A step slower by s multiplies the ratio and both ends by 1 + s.
    excluded, exceeded = 1 / np.maximum(low, 1e-9) - 1, (1 + DEFAULT_THRESHOLD) / estimate - 1
    return Resolution(
        seconds=seconds,
        num_rounds=num_rounds,
        half_width=float(np.median([_half(one) for one in found])),
        resolves=float(np.quantile(excluded, SEEN)),
        gated=float(np.quantile(np.maximum(excluded, exceeded), SEEN)),
    )


def report(noise: Noise, step: TrialStep) -> str:
    """The whole answer for a person."""
    launches = ", ".join(f"{ratio:.3f}" for ratio in noise.launch_ratios)
    drift = ", ".join(f"{100 * share:+.1f}%" for share in (noise.drift.low, noise.drift.high))
    lines = [
        (
            f"Noise of this machine: {step.arch}, {step.batch_size} images, {step.steps} steps a block on "
            f"{noise.device}.\nA against A, two equal processes in turns: {noise.num_rounds} rounds of "
            f"{noise.round_s:.3f} s over {noise.num_launches} launches, {noise.step_ms:,.1f} ms a step."
        ),
        (
            f"Blocks of one process scatter by {_pct(noise.block_spread)} (robust standard deviation).\n"
            f"A / A is {_ratio(noise.ratio)}, and 1 is the truth; by launch {launches}. More rounds do not\n"
            "average out what differs between launches, more bench.gate --launches do."
        ),
        f"Step time went {100 * noise.drift.estimate:+.1f}% [{drift}] from the first round to the last.",
        *(_line(one, noise.num_launches) for one in noise.resolutions),
        (
            f"Derived from {SIMULATED_GATES} simulated gates each, drawn from these rounds and launches: a\n"
            f"slow-down named here is seen in {100 * SEEN:g}% of them. Noise is taken to fall as\n"
            f"1 / sqrt(rounds): for {noise.sub_run_rounds} rounds that gives "
            f"±{_pct(noise.expected_half_width)}, sub-runs measured "
            f"±{_pct(noise.sub_run_half_width)}{_agreement(noise)}."
        ),
        CAVEAT,
    ]
    if is_bad(noise):
        lines.append(
            f"bad: a gate at {100 * DEFAULT_THRESHOLD:g}% would call A against A {noise.verdict}; see what "
            f"disturbs with {command('doctor')}, then measure longer with --noise --seconds 120s"
        )
    return "\n".join(lines)


def is_bad(noise: Noise) -> bool:
    """Whether a gate of that length would see a change where there is none."""
    return noise.verdict in ("regressed", "improved")


def as_json(noise: Noise, step: TrialStep) -> str:
    """The same for a program: shares of the step time, null where there is none."""
    return to_json({"step": asdict(step), "verdict": noise.verdict, **asdict(noise)})


def _line(one: Resolution, num_launches: int) -> str:
    run = f"  {about(one.seconds):>8} gate ({one.num_rounds} rounds, {num_launches} launches)"
    if one.half_width is None or one.resolves is None or one.gated is None:
        return f"{run}: too few rounds for an interval"
    return (
        f"{run}: resolves a slow-down >= {_pct(one.resolves)} (interval ±{_pct(one.half_width)}); "
        f"with a threshold of {100 * DEFAULT_THRESHOLD:g}% it fails from {_pct(one.gated)}"
    )


def _agreement(noise: Noise) -> str:
    if not noise.expected_half_width or math.isnan(noise.sub_run_half_width):
        return ""
    return f", {noise.sub_run_half_width / noise.expected_half_width:.2f}x"


def _ratio(interval: Interval) -> str:
    return f"{interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _pct(share: float) -> str:
    return f"{100 * share:.2f}%" if share < 0.1 else f"{100 * share:.0f}%"
