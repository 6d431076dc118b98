"""Decides what to use from what was measured in turns.

Throughputs are compared inside each round. All intervals together cover the truth with 95% (Bonferroni), so
that the best of several is not best by chance. A more complicated setting has to beat the simpler one by more
than noise. A machine may be faster or slower than when it was calibrated: the bound goes with what the
default took over what was predicted for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.stats import Interval, median_interval, paired_ratio
from ddp_bench.bench.tune.candidates import KINDS, Candidate

FAMILY_CONFIDENCE = 0.95

LEAST_GAIN = 0.01
"""Two equal cases of one process differ by up to this for as long as it lives: less is not worth a change."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A candidate and its throughput by round."""

    candidate: Candidate
    images_per_s: ByRound
    step_ms: Interval
    """Of one optimizer step."""
    ratio: Interval
    """Throughput over the default's in the same round; 1 for the default itself."""
    above_bound: float
    """Step over `Answer.bound_ms`, compared inside each round, less 1; noise may put it below 0."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The choice, what it was chosen from (the default first), and the confidence of each interval."""

    chosen: Measured
    best: Measured
    """Of the highest throughput, whether or not it can be told from the default."""
    measured: tuple[Measured, ...]
    confidence: float

    @property
    def default(self) -> Measured:
        """What DDP does when nothing is said."""
        return self.measured[0]

    @property
    def pace(self) -> float:
        """The default's step over the predicted one: the machine since its calibration, and the model."""
        return self.default.step_ms.estimate / self.default.candidate.predicted_ms

    def bound_ms(self, measured: Measured) -> float:
        """The least step that any layout can reach in the setting of `measured`, at this pace."""
        return measured.candidate.bound_ms * self.pace

    @property
    def changes(self) -> bool:
        """Whether anything but the default is worth using."""
        return self.chosen is not self.default


def decide(
    candidates: Sequence[Candidate], rates: Mapping[Candidate, ByRound], units: Mapping[Candidate, int]
) -> Answer:
    """Choose among `candidates`, the default first; those without a rate were not measured.

    Args:
        candidates: as planned.
        rates: units per second by round; the default's must be there.
        units: per optimizer step.
    """
    default = candidates[0]
    levels = sorted({_complexity(c, default) for c in candidates if c in rates})
    comparisons = max(len(rates) - 1 + len(levels) - 1, 1)
    confidence = 1 - (1 - FAMILY_CONFIDENCE) / comparisons
    ratios = {
        c: paired_ratio(rates[c], rates[default], confidence=confidence) for c in candidates if c in rates
    }
    of_default = {c: units[c] / units[default] / ratio.estimate for c, ratio in ratios.items()}
    measured = [
        Measured(
            candidate=c,
            images_per_s=rates[c],
            step_ms=median_interval([units[c] * 1000 / rate for rate in rates[c].values()]),
            ratio=ratio,
            above_bound=of_default[c] * default.predicted_ms / c.bound_ms - 1,
        )
        for c, ratio in ratios.items()
    ]
    chosen = measured[0]
    for level in levels[1:]:
        equals = [m for m in measured if _complexity(m.candidate, default) == level]
        best = max(equals, key=lambda m: m.ratio.estimate)
        over = paired_ratio(best.images_per_s, chosen.images_per_s, confidence=confidence)
        if over.low > 1 and over.estimate >= 1 + LEAST_GAIN:
            chosen = best
    best = max(measured, key=lambda m: m.ratio.estimate)
    return Answer(chosen=chosen, best=best, measured=tuple(measured), confidence=confidence)


def _complexity(candidate: Candidate, default: Candidate) -> tuple[int, int]:
    """Rank a candidate by how many other settings it changes, then by its kind of cap."""
    others = sum(a != b for a, b in zip(candidate.point[1:], default.point[1:], strict=True))
    return others, KINDS.index(candidate.kind)
