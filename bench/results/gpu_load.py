"""What the GPUs of a case did in its timed blocks: the readings of all ranks together. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeAlias

from ..gpus import ClockReason
from ..stats.interval import median_interval

ByRound: TypeAlias = dict[int, float]

GPUS = "gpus"
"""In the detail of a timed block: by the beginning of a GPU's UUID, what it did."""

DEVICE_ALLOCS = "device_allocs"
"""In the detail of a block on GPUs: how often its timed steps asked their driver for memory."""

TOGETHER: dict[str, Callable[[Iterable[float]], float]] = {
    "sm_clock_mhz": min,
    "power_w": sum,
    "temperature_c": max,
    "throttled_pct": max,
}
"""How the readings of several GPUs become one: in DDP all wait for the slowest, and all use power."""


@dataclass
class GpuLoad:
    """The readings of one case, of all its GPUs together."""

    by_round: dict[str, ByRound] = field(default_factory=lambda: defaultdict(dict))
    """By the name of the reading."""
    reasons: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What held clocks down: percent of samples, added up over blocks and GPUs."""

    def add(self, round_index: int, ranks: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """One block: of each rank its host, and by name what its GPUs did.

        Ranks that share a GPU both tell of it. What one GPU does not tell is unknown of all together.
        """
        if not all(found for _, found in ranks):
            return
        gpus = {(host, name): dict(did) for host, found in ranks for name, did in dict(found).items()}
        for name, together in TOGETHER.items():
            told = [float(did[name]) for did in gpus.values() if name in did]
            if told and len(told) == len(gpus):
                self.by_round[name][round_index] = together(told)
        for did in gpus.values():
            for why, percent in dict(did.get("throttled_by_pct", {})).items():
                self.reasons[why] += float(percent)

    def columns(self, step_ms: Mapping[int, float], units: int) -> dict[str, Any]:
        """The columns of cases.csv that are known.

        Args:
            step_ms: of the timed blocks, by round.
            units: what a step trains.
        """
        clocks, watts, degrees, throttled = (self.by_round.get(name, {}) for name in TOGETHER)
        joules = {r: w * step_ms[r] / 1000 / units for r, w in watts.items() if r in step_ms}
        row: dict[str, Any] = {}
        for name, found in {"sm_clock_mhz": clocks, "power_w": watts, "joules_per_image": joules}.items():
            if found:
                row |= median_interval(list(found.values())).columns(name)
        if degrees:
            row["temperature_c"] = max(degrees.values())
        if throttled:
            row["throttled_pct"] = fmean(throttled.values())
        known = sorted(
            (why for why in ClockReason if why in self.reasons), key=lambda why: -self.reasons[why]
        )
        if known:
            row["throttle_reasons"] = ", ".join(known)
        return row
