"""All that a gate found: its sides, the changes between them, and what they decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.cli import NextStep
from ..common.errors import ExitCode
from ..machine.conditions import Difference
from ..stats.interval import Estimate
from .decide import MIN_LAUNCHES, Decision, Policy
from .judge import Change, EndErrors, Verdict
from .runs import GateRun
from .watched import StepChange

NOT_IN_CANDIDATE = "not in the candidate"
"""Reason of a case that is missing because the candidate never had it."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """All that a gate found, worst first."""

    baseline: GateRun
    candidate: GateRun
    policy: Policy
    comparisons: tuple[Change, ...]
    decision: Decision
    errors: EndErrors
    """Error probabilities of each single interval that can fail the gate."""
    asked: Sequence[str] | None = None
    """Words behind the name of an interleaved gate; None of one between results folders."""
    interleaved: bool = False
    """True where the two runs were interleaved on one machine."""
    num_launches: int = 1
    """Number of launches of interleaved runs; 1 of others, whose intervals hold within their launches."""
    differences: tuple[Difference, ...] = ()
    obstacle: str = ""
    """Reason why absolute figures were not compared; empty where they were."""
    only_in_candidate: tuple[str, ...] = ()
    only_in_baseline: tuple[str, ...] = ()
    """Metrics of compared cases that the candidate's passes left out."""
    steps: StepChange | None = None
    """Steps of two watched trainings; None of runs, and where it is not known."""
    machine: tuple[str, ...] = ()
    """Facts about the machine while both sides were measured."""
    cautions: tuple[str, ...] = ()
    """Facts of these that speak against the comparison."""
    more: NextStep | None = None
    """The next thing to do; None where nothing is open."""

    @property
    def exit_code(self) -> ExitCode:
        return self.decision.exit_code

    @property
    def needs_more_launches(self) -> bool:
        """True where the gate is undecided for want of launches alone."""
        return self.decision.verdict == "undecided" and bool(self.undecided)

    @property
    def blocking(self) -> list[Difference]:
        """Return the differences that make the sides not comparable."""
        return [one for one in self.differences if one.blocking]

    @property
    def conditions_block(self) -> bool:
        """True where nothing is compared because the sides differ in their conditions."""
        return self.decision.verdict == "not comparable" and bool(self.blocking and self.decision.reasons)

    @property
    def undecided(self) -> list[Change]:
        """The changes that could fail it and are not known to be within their threshold, nor beyond."""
        return [c for c in self.comparisons if c.decides and c.verdict == "undecided"]

    @property
    def shown(self) -> list[Change]:
        """The rows of a table: what decides, and what surely changed; none where conditions differ."""
        if self.conditions_block:
            return []
        return [c for c in self.comparisons if c.decides or c.verdict not in ("undecided", "no regression")]

    @property
    def ended_early(self) -> bool:
        """Return whether time ended it between two looks."""
        looks = self.policy.looks
        return self.num_launches < max(looks, default=0) and self.num_launches not in looks

    @property
    def num_lacking(self) -> int:
        """Launches of the first look, where time ended it before that; else 0."""
        first = min(self.policy.looks, default=0)
        return first if self.num_launches < first else 0

    @property
    def launch_s(self) -> float | None:
        """Seconds that a launch took, or two separate runs; None where a manifest does not tell."""
        known = [run.manifest.timing.total_s for run in (self.baseline, self.candidate)]
        if None in known:
            return None
        # Runs in turns wait for each other: each has taken as long as both.
        return (max if self.interleaved else sum)(one for one in known if one is not None)

    def compute_resolvable_change(self, launches: int | None = None) -> float | None:
        """Return the change that every case can tell from none, a fraction; None while that is not known.

        With `launches`, what is expected after so many, from the scatter of those that there are.
        """
        now, looks = self.num_launches, self.policy.looks
        known = [(c.error, c.freedom or math.inf) for c in self.comparisons if c.decides and c.error]
        if not known or (looks and now < min(MIN_LAUNCHES, looks[0])):
            return None
        better = self.errors.better
        if launches is not None and now > 1:
            then, here = (self.policy.compute_look_shares(number).better for number in (launches, now))
            better *= then / here
            known = [(error * math.sqrt(now / launches), launches - 1) for error, _ in known]
        return max(Estimate(0.0, *one).compute_quantile_interval(better, better).high for one in known)

    def select_verdict(self, verdict: Verdict) -> list[Change]:
        return [c for c in self.comparisons if c.verdict == verdict]
