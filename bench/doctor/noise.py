"""What a machine's noise lets a gate see: the gate in turns, of this code with itself."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from ..cli import command, speaker, to_json
from ..errors import UsageError
from ..findings.numbers import about
from ..gate.checkouts import WORKING_TREE
from ..gate.compare import FAMILY_CONFIDENCE
from ..gate.interleave import measure_launches
from ..gate.judge import judge, log_ratios, of_launches
from ..gate.main import DEFAULT_LAUNCHES, DEFAULT_THRESHOLD
from ..gate.runs import side_by_side
from ..results.round_times import ByRound
from ..stats.interval import Estimate, Figures, Interval
from ..stats.one_run import MIN_ROUNDS
from ..stats.two_runs import in_pairs

ARCH, BATCH, STEPS = "resnet20", 8, 3
"""One device and the plain module; small, so that half a minute holds many blocks."""

LENGTHS_S = (15.0, 30.0, 60.0, 300.0, 600.0)
"""Of the gates whose resolution is derived: from a first look to what a pull request can wait for."""

SEEN = 0.9
"""Of gates in which a slow-down of the size named is told from no change."""

GATES = 400
"""Simulated of each length: enough for that quantile, in a second."""

FEWEST_ROUNDS = MIN_ROUNDS * DEFAULT_LAUNCHES
"""In all: a launch of fewer does not tell how its rounds scatter."""


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What a gate can see; shares of the step time, None where its rounds are too few."""

    seconds: float
    """Of measuring, without starting up."""
    num_rounds: int
    resolves: float | None
    """Smallest slow-down told from no change in 9 of 10 gates."""
    gated: float | None
    """Smallest slow-down that fails a gate with a threshold of 5% in 9 of 10 gates."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What the gate measured of equal sides."""

    device: str
    num_rounds: int
    ratio: Interval
    """A / A by throughput at the confidence of a gate with one comparison; 1 is the truth."""
    launch_ratios: tuple[float, ...]
    """A / A of each launch: what differs between them no number of rounds can average out."""
    verdict: str
    """What the gate says of A against A: anything but `unchanged` and `inconclusive` is false."""
    resolutions: tuple[Resolution, ...]

    @property
    def is_bad(self) -> bool:
        """Whether the gate saw a change where there is none."""
        return self.verdict in ("regressed", "improved")


def measure_noise(seconds: float, *, quiet: bool) -> Noise:
    """Gate this code against itself for about `seconds`, starting up not counted. Raises UsageError."""
    # A target that is never reached: the time ends a run.
    run = f"--modes single --gpus 1 --arch {ARCH} --batch-size {BATCH} --steps {STEPS} --passes none "
    run += f"--precision-target 0.001% --max-time {seconds / DEFAULT_LAUNCHES:g}s"
    launches = measure_launches(WORKING_TREE, run.split(), num_launches=DEFAULT_LAUNCHES, quiet=quiet)
    sides = [
        (ours.cases[0].rounds["images_per_s"], theirs.cases[0].rounds["images_per_s"])
        for ours, theirs in launches
    ]
    return noise_of(sides, seconds=seconds, device=launches[0][0].cases[0].row.get("device_name", "CPU"))


def noise_of(launches: list[tuple[ByRound, ByRound]], *, seconds: float, device: str) -> Noise:
    """The same of launches' throughputs by round, baseline and candidate, that took `seconds` to measure."""
    baseline, candidate = (side_by_side(side) for side in zip(*launches, strict=True))
    num_rounds = len(baseline.keys() & candidate.keys())
    if num_rounds < FEWEST_ROUNDS:
        enough_s = 5 * math.ceil(2 * seconds * FEWEST_ROUNDS / max(num_rounds, 1) / 5)
        raise UsageError(
            f"--seconds {seconds:g}s gave {num_rounds} rounds on this machine, as busy as it is, and an "
            f"interval needs {FEWEST_ROUNDS}; say --seconds {enough_s}s, or stop other programs"
        )
    found = of_launches(log_ratios(candidate, baseline))
    ratio = found.interval(FAMILY_CONFIDENCE).exp()
    each = [in_pairs([one for _, one in sorted(log_ratios(*side[::-1]).items())]) for side in launches]
    of_rounds = float(np.nanmean([one.error**2 for one in each]))
    between = math.sqrt(max(float(np.var([one.value for one in each], ddof=1)) - of_rounds, 0.0))
    within = np.concatenate([_within(*launch) for launch in launches])
    return Noise(
        device=device,
        num_rounds=num_rounds,
        ratio=ratio,
        launch_ratios=tuple(math.exp(one.value) for one in each),
        verdict=judge(ratio, higher_is_better=True, threshold=DEFAULT_THRESHOLD),
        resolutions=tuple(
            _resolution(length_s, int(num_rounds * length_s / seconds), within, between, len(launches))
            for length_s in LENGTHS_S
        ),
    )


def _within(baseline: ByRound, candidate: ByRound) -> Figures:
    """Logs of the rounds' ratios over the launch's median: the noise between rounds alone."""
    logs = np.log([candidate[r] / baseline[r] for r in baseline.keys() & candidate.keys()])
    centred: Figures = logs - np.median(logs)
    return centred


def _resolution(
    seconds: float, num_rounds: int, within: Figures, between: float, num_launches: int
) -> Resolution:
    """Gates of that length with the noise of the measured rounds, each with the interval it would have.

    `between` is the standard deviation between launches.
    """
    if num_rounds < FEWEST_ROUNDS:
        return Resolution(seconds=seconds, num_rounds=num_rounds, resolves=None, gated=None)
    # Of the gate's own estimate, the mean of the launches with Student's t.
    rng = np.random.default_rng(num_rounds)
    scatter = math.sqrt(between**2 + float(np.mean(within**2)) * num_launches / num_rounds)
    drawn = rng.normal(0.0, scatter, (GATES, num_launches))
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(num_launches)
    found = (Estimate(*one, num_launches - 1) for one in zip(drawn.mean(axis=1), errors, strict=True))
    gates = [one.interval(FAMILY_CONFIDENCE).exp() for one in found]
    # A step slower by s divides the ratio and both ends by 1 + s.
    excluded = np.array([gate.high for gate in gates]) - 1
    beyond = np.array([gate.estimate for gate in gates]) / (1 - DEFAULT_THRESHOLD) - 1
    resolves, gated = np.quantile(excluded, SEEN), np.quantile(np.maximum(excluded, beyond), SEEN)
    return Resolution(seconds=seconds, num_rounds=num_rounds, resolves=float(resolves), gated=float(gated))


def report(noise: Noise) -> str:
    """The whole answer for a person."""
    ratio, launches = noise.ratio, ", ".join(f"{one:.3f}" for one in noise.launch_ratios)
    within = f"{ratio.estimate:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
    lines = [
        f"Noise of this machine: {ARCH}, {BATCH} images, {STEPS} steps a block on {noise.device}.",
        f"The gate in turns, of this code with itself: {noise.num_rounds} rounds.",
        f"A / A is {within}, and 1 is the truth; by launch {launches}.",
        "More rounds do not average out what differs between launches, but "
        f"{speaker('gate')} with more --launches does.",
        *(_line(one) for one in noise.resolutions),
        f"A slow-down named here is seen in {100 * SEEN:g}% of gates simulated from these rounds.",
        "This holds for this step and one case: longer steps are usually steadier, a gate on many cases asks",
        f"for more confidence. Compare versions with {speaker('gate')} --interleave REF.",
    ]
    if noise.is_bad:
        lines.append(
            f"bad: a gate at {100 * DEFAULT_THRESHOLD:g}% calls A against A {noise.verdict}; see what "
            f"disturbs with {command('doctor')}, then measure longer with --noise --seconds 120s"
        )
    return "\n".join(lines)


def as_json(noise: Noise) -> str:
    """The same for a program: shares of the step time, null where there is none."""
    step = {"arch": ARCH, "batch_size": BATCH, "steps": STEPS}
    return to_json({"step": step, **asdict(noise)})


def _line(one: Resolution) -> str:
    gate = f"  {about(one.seconds):>8} gate ({one.num_rounds} rounds)"
    if one.resolves is None or one.gated is None:
        return f"{gate}: too few rounds for an interval"
    return (
        f"{gate}: resolves a slow-down >= {_pct(one.resolves)}; with a threshold of "
        f"{100 * DEFAULT_THRESHOLD:g}% it fails from {_pct(one.gated)}"
    )


def _pct(share: float) -> str:
    return f"{100 * share:.2f}%" if share < 0.1 else f"{100 * share:.0f}%"
