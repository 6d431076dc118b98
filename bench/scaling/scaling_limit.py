"""Finds where scaling breaks: the first device count with an efficiency below 80%, and why."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_bench.bench.scaling.calibration import Calibration
from ddp_bench.bench.scaling.predict import Prediction, predict
from ddp_bench.bench.scaling.scenario import Scenario, as_calibrated

LEAST_EFFICIENCY = 0.8
RULE = f"Scaling breaks where predicted efficiency is first below {LEAST_EFFICIENCY:.0%}"


@dataclass(frozen=True)
class Curve:
    """One scenario over device counts, 1 to the most asked for; `broken` is where it breaks, if it does.

    `unknown` is what stands in the way of telling: a refused prediction of that count, or of the most.
    """

    predictions: tuple[Prediction, ...]
    broken: Prediction | None
    unknown: Prediction | None = None

    @property
    def most_devices(self) -> int:
        return max(p.scenario.num_devices for p in self.predictions)


def curve(
    calibration: Calibration,
    asked: Sequence[Prediction],
    *,
    fill: bool = False,
    model_error_pct: float | None = None,
) -> Curve:
    """Draw the curve through predictions of one scenario at several device counts, and find its break.

    Args:
        calibration: what they were made from.
        asked: predictions that differ in `num_devices` alone, at least one.
        fill: predict the powers of two up to the largest, and the break, in between: a line to draw.
        model_error_pct: as given to `predict`.
    """
    scenario, most = asked[0].scenario, max(p.scenario.num_devices for p in asked)
    counts = _possible(calibration, scenario, most)

    def whole(num_devices: int) -> Prediction:
        return predict(
            calibration, replace(scenario, num_devices=num_devices), model_error_pct=model_error_pct
        )

    found = {p.scenario.num_devices: p for p in asked}
    first = _first_below(calibration, scenario, counts)
    broken = None if first is None else found.get(first) or whole(first)
    if fill:
        wanted = {2**i for i in range(most.bit_length())} & set(counts)
        found |= {n: whole(n) for n in sorted(wanted - found.keys())}
        found |= {} if broken is None else {broken.scenario.num_devices: broken}
    deciding = found[most] if broken is None else broken
    shown = tuple(found[n] for n in sorted(found))
    return Curve(shown, None, deciding) if deciding.reason else Curve(shown, broken)


def sentence(found: Curve, *, where: str, device: str = "device") -> str:
    """Say in one sentence where it breaks and the causes with their shares, or that it does not."""
    if found.unknown is not None:
        there = f"{found.unknown.scenario.num_devices} {device}s"
        return f"On {where} where scaling breaks is not known; at {there} {found.unknown.reason}."
    if found.broken is None:
        least, most = f"{LEAST_EFFICIENCY:.0%}", found.most_devices
        return f"On {where} efficiency stays at {least} or above up to {most} {device}s."
    p = found.broken
    percent = f"{p.efficiency.estimate:.0%} [{p.efficiency.low:.0%}, {p.efficiency.high:.0%}]"
    causes = p.losses.shares_pct()
    others = "; ".join(f"{share:.0f}% {cause}" for cause, share in causes[1:] if share >= 1)
    plural = "" if p.scenario.num_devices == 1 else "s"
    then = f" (then {others})" if others else ""
    return (
        f"On {where} scaling breaks at {p.scenario.num_devices} {device}{plural}, efficiency {percent}; "
        f"what breaks it: {causes[0][0]}, {causes[0][1]:.0f}% of the time lost{then}."
    )


def _possible(calibration: Calibration, scenario: Scenario, most: int) -> list[int]:
    """List the device counts that can be predicted: all, or those that divide a global batch."""
    scenario = as_calibrated(calibration, scenario)
    if scenario.scaling == "weak":
        return list(range(1, most + 1))
    batch = scenario.batch_per_device or 0
    return [n for n in range(1, most + 1) if batch % n == 0]


def _first_below(calibration: Calibration, scenario: Scenario, counts: Sequence[int]) -> int | None:
    """Search by doubling, then halving: efficiency falls with devices, but for steps at whole nodes."""

    def below(place: int) -> int:
        found = predict(calibration, replace(scenario, num_devices=counts[place]), resamples=0)
        return int(found.efficiency.estimate < LEAST_EFFICIENCY)

    last = len(counts) - 1
    probes = sorted({min(2**i - 1, last) for i in range(len(counts).bit_length() + 1)})
    end = next((place for place in probes if below(place)), None)
    if end is None:
        return None
    start = max((place for place in probes if place < end), default=-1) + 1
    return counts[start + bisect_left(range(start, end), 1, key=below)]
