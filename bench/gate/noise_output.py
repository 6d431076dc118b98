"""A machine's noise as text and JSON. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from bench.findings.wording import about
from bench.gate.noise import SEEN, SIMULATED_GATES, THRESHOLD, Noise, Resolution
from bench.gate.trial_process import Step
from bench.stats import Interval

CAVEAT = (
    "This holds for this step and one case: longer steps are usually steadier, a gate on many cases asks for "
    "more confidence. Compare versions with bench.gate --interleave REF."
)


def report(noise: Noise, step: Step) -> str:
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
            f"bad: a gate at {100 * THRESHOLD:g}% would call A against A {noise.verdict}; see what disturbs "
            "with python -m bench.doctor, then measure longer with --noise --seconds 120"
        )
    return "\n".join(lines)


def is_bad(noise: Noise) -> bool:
    """Whether a gate of that length would see a change where there is none."""
    return noise.verdict in ("regressed", "improved")


def as_json(noise: Noise, step: Step) -> str:
    """The same for a program: shares of the step time, null where there is none."""
    return json.dumps(
        {"step": asdict(step), "verdict": noise.verdict, **asdict(noise)}, indent=2, allow_nan=False
    )


def _line(one: Resolution, num_launches: int) -> str:
    run = f"  {about(one.seconds):>8} gate ({one.num_rounds} rounds, {num_launches} launches)"
    if one.half_width is None or one.resolves is None or one.gated is None:
        return f"{run}: too few rounds for an interval"
    return (
        f"{run}: resolves a slow-down >= {_pct(one.resolves)} (interval ±{_pct(one.half_width)}); "
        f"with a threshold of {100 * THRESHOLD:g}% it fails from {_pct(one.gated)}"
    )


def _agreement(noise: Noise) -> str:
    if not noise.expected_half_width or math.isnan(noise.sub_run_half_width):
        return ""
    return f", {noise.sub_run_half_width / noise.expected_half_width:.2f}x"


def _ratio(interval: Interval) -> str:
    return f"{interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _pct(share: float) -> str:
    return f"{100 * share:.2f}%" if share < 0.1 else f"{100 * share:.0f}%"
