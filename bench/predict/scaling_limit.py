"""A line of predictions that differ in devices alone, and where scaling breaks on it: below 80%, and why."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..findings.wording import cap_label, device_noun
from .calibration import Calibration
from .prediction import Prediction, efficiency_of, predict
from .scenario import Scenario, as_calibrated

LEAST_EFFICIENCY = 0.8
RULE = f"Scaling breaks where predicted efficiency is first below {LEAST_EFFICIENCY:.0%}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """Predictions that differ in devices alone, from few to many, at least one."""

    predictions: tuple[Prediction, ...]
    broken_at: int | None
    """The first number of devices whose efficiency is below 80%, where it is known and there is one."""
    verdict: str
    """One sentence: where scaling breaks, and what breaks it."""

    def __post_init__(self) -> None:
        if not self.predictions:
            raise ValueError("a line has no predictions")

    @property
    def first(self) -> Prediction:
        """Any of them: network, cap, scaling and batch are the same in all."""
        return self.predictions[0]


def predicted_line(
    calibration: Calibration,
    scenario: Scenario,
    counts: Sequence[int],
    *,
    fill: bool = False,
    model_error_pct: float | None = None,
) -> Line:
    """Predict one scenario at each of `counts` devices, whatever its own number, and find where it breaks.

    With `fill` also at the powers of two up to the largest, and at the break: a line to draw.
    """
    scenario, most = as_calibrated(calibration, scenario), max(counts)

    def at(num_devices: int) -> Prediction:
        there = replace(scenario, num_devices=num_devices)
        found = predict(calibration, there, model_error_pct=model_error_pct)
        return replace(found, asked=num_devices in counts)

    found = {n: at(n) for n in counts}
    # A global batch has to be divided.
    weak, batch = scenario.scaling == "weak", scenario.batch_per_device or 0
    possible = [n for n in range(1, most + 1) if weak or batch % n == 0]
    breaks_at = _first_below(calibration, scenario, possible)
    deciding = found.get(breaks_at or most) or at(breaks_at or most)
    if fill:
        wanted = {2**i for i in range(most.bit_length())} & set(possible)
        found |= {deciding.num_devices: deciding} | {n: at(n) for n in wanted - found.keys()}
    return Line(
        predictions=tuple(found[n] for n in sorted(found)),
        broken_at=None if deciding.reason else breaks_at,
        verdict=_verdict(calibration, deciding, breaks=breaks_at is not None),
    )


def _verdict(calibration: Calibration, p: Prediction, *, breaks: bool) -> str:
    """Say in one sentence where it breaks and the causes with their shares, or that it does not."""
    device = device_noun(calibration.identity.device_type)
    on, devices = f"On {p.network}, bucket cap {cap_label(p.bucket_cap_mb)},", f"{p.num_devices} {device}"
    if p.efficiency is None or p.lost is None:
        return f"{on} where scaling breaks is not known; at {devices}s {p.reason}."
    if not breaks:
        return f"{on} efficiency stays at {LEAST_EFFICIENCY:.0%} or above up to {devices}s."
    percent = f"{p.efficiency.estimate:.0%} [{p.efficiency.low:.0%}, {p.efficiency.high:.0%}]"
    (cause, share), *others = p.lost.shares_pct()
    more = "; ".join(f"{share:.0f}% {cause}" for cause, share in others if share >= 1)
    return (
        f"{on} scaling breaks at {devices}{'s' * (p.num_devices > 1)}, efficiency {percent}; "
        f"what breaks it: {cause}, {share:.0f}% of the time lost{f' (then {more})' if more else ''}."
    )


def _first_below(calibration: Calibration, scenario: Scenario, counts: Sequence[int]) -> int | None:
    """Search by doubling, then halving: efficiency falls with devices, but for steps at whole nodes."""

    def below(place: int) -> int:
        there = replace(scenario, num_devices=counts[place])
        return int(efficiency_of(calibration, there) < LEAST_EFFICIENCY)

    last = len(counts) - 1
    probes = sorted({min(2**i - 1, last) for i in range(len(counts).bit_length() + 1)})
    end = next((place for place in probes if below(place)), None)
    if end is None:
        return None
    start = max((place for place in probes if place < end), default=-1) + 1
    return counts[start + bisect_left(range(start, end), 1, key=below)]
