"""The one rule of the gate: which changes can fail it, at what confidence, and what they decide together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..common.errors import ExitCode
from ..results.columns import Metric
from .judge import Change, EndErrors
from .main import DEFAULT_THRESHOLD

Word: TypeAlias = Literal["pass", "regression", "missing", "undecided", "not comparable"]

MAX_ERROR = 0.01
"""Probability of a regression where there is none, and of a pass where a case is slower by the threshold."""

MAX_LOOK_SHARE = 0.5
"""Share of an error that one of several looks has; the others divide the rest equally."""

INFORMATIVE_ERRORS = EndErrors(0.025, 0.025)
"""Errors of an interval that only informs: one of 95% by itself."""

MIN_LAUNCHES = 3
"""Two launches have one degree of freedom: their interval is some twenty times as wide as their scatter."""

EXIT_CODES: Mapping[Word, ExitCode] = {
    "pass": ExitCode.OK,
    "regression": ExitCode.FAILED,
    "missing": ExitCode.FAILED,
    "undecided": ExitCode.UNDECIDED,
    "not comparable": ExitCode.UNDECIDED,
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Metrics and changes that can fail a gate."""

    threshold: float = DEFAULT_THRESHOLD
    """The change that matters, a fraction."""
    named: Mapping[str, float] = field(default_factory=dict)
    """The same of metrics that were named: they can fail it beside the rate."""
    ratios_only: bool = False
    """True where the speed-up decides in place of the rate: it compares across machines."""
    strict: bool = False
    """True where every metric can fail it."""
    allow_missing: bool = False
    looks: Sequence[int] = ()
    """Numbers of launches after which an interleaved gate may end; each costs width."""

    @property
    def rate(self) -> str:
        """The metric by which every case passes or fails."""
        return "speedup" if self.ratios_only else "images_per_s"

    def can_fail(self, metric: Metric) -> bool:
        """Return whether a change of this metric can fail the gate; all others inform."""
        return self.strict or metric.name == self.rate or metric.name in self.named

    def divide_error(self, num_changes: int, num_launches: int) -> EndErrors:
        """Return what each interval that can fail the gate may err by after so many launches.

        Any change can make the gate a regression, so they divide the error (Bonferroni). A pass needs every
        one of them, so each may have all of it (intersection-union test; Berger, 1982).
        """
        shares = self.compute_look_shares(num_launches)
        return EndErrors(MAX_ERROR * shares.worse, MAX_ERROR * shares.better / max(num_changes, 1))

    def compute_look_shares(self, num_launches: int) -> EndErrors:
        """Return the shares of the error that the look after so many launches has, or the next one.

        The first has the largest share of a pass's error: most gates are of equal code, and end there. The
        last has that of a regression's: few launches that scatter little by chance call nothing.
        """
        looks = self.looks
        if len(looks) < 2:
            return EndErrors(1.0, 1.0)
        rest = (1 - MAX_LOOK_SHARE) / (len(looks) - 1)
        return EndErrors(
            MAX_LOOK_SHARE if num_launches <= looks[0] else rest,
            MAX_LOOK_SHARE if num_launches > looks[-2] else rest,
        )


@dataclass(frozen=True)
class Decision:
    """The decision of a gate, and the changes that it follows from."""

    verdict: Word
    reasons: tuple[Change, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.verdict]


def decide(changes: Iterable[Change], policy: Policy) -> Decision:
    """Decide a gate: by the changes that can fail it, never by one that informs.

    A regression or a missing case fails it; a pass needs at least one change that decides, and every one of
    them known to be within its threshold.
    """
    found = list(changes)
    deciding = [one for one in found if one.decides]

    def select_verdicts(*verdicts: str) -> tuple[Change, ...]:
        return tuple(one for one in deciding if one.verdict in verdicts)

    if blocked := select_verdicts("not comparable"):
        return Decision("not comparable", blocked)
    if regressed := select_verdicts("regressed"):
        return Decision("regression", regressed)
    if (missing := select_verdicts("missing")) and not policy.allow_missing:
        return Decision("missing", missing)
    if not select_verdicts("undecided") and (passed := select_verdicts("no regression", "improved")):
        return Decision("pass", passed)
    measured = any(one.ratio is not None for one in found)  # runs may share nothing to decide by
    return Decision("undecided" if measured else "not comparable", select_verdicts("undecided"))
