"""The comparisons that a run answers: named by its plan before it measures, decided by one interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from ..plan.settings import IMAGES
from ..stats.fit import MIN_ROUNDS, FittedSteps
from ..stats.interval import Interval
from .case_result import CaseResult, list_records
from .columns import COMPARISONS

FASTER, SLOWER, EQUAL, UNRESOLVED, TOO_FEW = ANSWERS = (
    "faster",
    "slower",
    "no difference",
    "unresolved",
    "too few rounds",
)
"""Answers for a case against its reference; only the first three say something."""

OPEN_ANSWERS = (UNRESOLVED, TOO_FEW)
"""Answers that more rounds would settle."""

METRIC = "images_per_s"

UNIT_RATIO = Interval(1.0, 1.0, 1.0)
"""Ratio of a case to itself."""


def classify_ratio(ratio: Interval, equal: tuple[float, float], *, min_change: float = 0.0) -> str:
    """Classify a known `ratio`, of runs and gates: it differs where its interval excludes 1, by enough.

    It is equal where all of it lies between the ends `equal`; nearer to 1 than `min_change`, a fraction, it
    does not count.
    """
    if ratio.is_clear_of(1.0) and (not min_change or abs(ratio.estimate - 1) > min_change):
        return FASTER if ratio.low > 1 else SLOWER
    return EQUAL if is_within(ratio, equal) else UNRESOLVED


def make_equal_band(margin: float) -> tuple[float, float]:
    """Make the ratios that a margin, a fraction, calls equal."""
    return 1 / (1 + margin), 1 + margin


def is_within(ratio: Interval, ends: tuple[float, float]) -> bool:
    """Tell whether all of the interval is known to lie between these ends."""
    return ends[0] <= ratio.low and ratio.high <= ends[1]


@dataclass(frozen=True)
class Comparison:
    """Throughput of a case over that of its reference, and what the interval says at the margin."""

    case_id: str
    reference_id: str
    ratio: Interval
    margin: float
    """A fraction: what the user calls equal."""
    num_rounds: int
    """Rounds of the one with fewer."""

    @property
    def answer(self) -> str:
        """One of `ANSWERS`."""
        if self.num_rounds < MIN_ROUNDS or math.isnan(self.ratio.low):
            return TOO_FEW
        return classify_ratio(self.ratio, make_equal_band(self.margin))

    @property
    def within_margin(self) -> bool:
        """True where the whole interval lies within the user's margin."""
        return is_within(self.ratio, make_equal_band(self.margin))

    @property
    def is_narrow(self) -> bool:
        """True where the interval is narrow enough for the margin, wherever it lies."""
        return self.half_width <= math.log1p(self.margin) / 2

    @property
    def half_width(self) -> float:
        """Half the interval of the ratio's logarithm; infinite where it is unknown."""
        low, high = self.ratio.low, self.ratio.high
        return math.inf if math.isnan(low) else math.log(high / low) / 2

    def to_row(self, unit: str = IMAGES) -> dict[str, Any]:
        """Return a row of comparisons.csv of a run that counts `unit`."""
        cells = {"metric": METRIC, "unit": unit, "answer": self.answer, **self.ratio.to_columns("ratio")}
        cells = {**vars(self), **cells}
        return {column.name: cells[column.name] for column in COMPARISONS}


def read_comparisons(table: pd.DataFrame) -> list[Comparison]:
    """Read the comparisons that a comparisons.csv holds."""
    return [
        Comparison(
            str(row["case_id"]),
            str(row["reference_id"]),
            Interval(*(float(row[name]) for name in ("ratio", "ratio_low", "ratio_high"))),
            float(row["margin"]),
            int(row["num_rounds"]),
        )
        for row in list_records(table)
    ]


def list_pairs(cases: Iterable[CaseResult]) -> list[tuple[str, str]]:
    """List the pairs to compare, (case, reference), of the cases of a run or of a plan.

    At every device count that the cases have for themselves: on GPUs DDP over DP, and every other case over
    DDP's default. Counts that share devices are compared only where there is no other. So within each batch
    size and mode of torch.compile; then, by `single` and DDP's default, each mode over eager at the same
    batch size, and each batch size over the smallest in the same mode.
    """
    variants = group_variants(cases)
    within = [pair for own in variants.values() for pair in _pair_within(own)]
    return within + _pair_across(variants)


Variants: TypeAlias = dict[tuple[float | None, str], list[CaseResult]]


def group_variants(cases: Iterable[CaseResult]) -> Variants:
    """Group cases by batch size and mode of torch.compile; in a run the smallest and eager come first."""
    found: Variants = {}
    for case in cases:
        found.setdefault(case.variant, []).append(case)
    return found


def _pair_across(variants: Variants) -> list[tuple[str, str]]:
    """Pairs of cases that differ in batch size or torch.compile alone, over the first of each."""
    first_batch, first_mode = next(iter(variants), (None, ""))
    found = []
    for (batch, mode), group in variants.items():
        counts = sorted({case.num_devices for case in select_unshared(group)})
        defaults = [find_default([case for case in group if case.num_devices == count]) for count in counts]
        compared = [case for case in group if case.mode == "single" or case in defaults]
        for other in ((batch, first_mode), (first_batch, mode)):
            reference = variants.get(other, []) if other != (batch, mode) else []
            plain = {name_within(case): case.case_id for case in reversed(reference)}
            ids = ((case.case_id, plain.get(name_within(case))) for case in compared)
            found += [(own, theirs) for own, theirs in ids if theirs]
    return found


def name_within(case: CaseResult) -> tuple[Any, ...]:
    """Name a case within its variant; `optimize_ddp`, a setting of compiled cases, is left out."""
    changed = tuple(pair for pair in case.list_changed().items() if pair[0] != "optimize_ddp")
    return (case.mode, case.num_devices, changed)


def select_unshared(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Cases whose devices are theirs alone; all where none on several devices has them."""
    cases = list(cases)
    own = [case for case in cases if not case.oversubscribed]
    return own if any(case.num_devices > 1 for case in own) else cases


def _pair_within(cases: Iterable[CaseResult]) -> list[tuple[str, str]]:
    several = select_unshared(case for case in cases if case.num_devices > 1 and case.mode != "single")
    found = []
    for count in sorted({case.num_devices for case in several}):
        here = [case for case in several if case.num_devices == count]
        default = find_default(here)
        if default is None:
            continue
        # On CPU cores DP is this suite's own stand-in, of which nothing is learnt about DP against DDP.
        over_dp = (case for case in here if case.mode == "dp" and not case.is_stand_in)
        found += [(default.case_id, case.case_id) for case in over_dp]
        others = (case for case in here if case.mode != "dp" and case is not default)
        found += [(case.case_id, default.case_id) for case in others]
    return found


def find_default(cases: Iterable[CaseResult]) -> CaseResult | None:
    """Find the DDP case that a user gets without settings, else the first DDP case; None without one.

    Where communication was measured of some it is one of these: of a watched script its own, no raced cap.
    """
    ddp = [case for case in cases if case.mode == "ddp"]
    ddp = [case for case in ddp if case.exposed_comm_ms is not None] or ddp
    plain = [case for case in ddp if not case.list_changed()]
    return next(iter(plain or ddp), None)


def compare_pairs(
    pairs: Sequence[tuple[str, str]], typical: FittedSteps, *, units: Mapping[str, int], margin: float
) -> list[Comparison]:
    """Compare the pairs that were measured; all intervals hold at once with 95%. `units` are of a step."""
    known = [pair for pair in pairs if all(map(typical.count_rounds, pair))]
    return [
        Comparison(
            case_id,
            reference_id,
            steps.invert(units[case_id] / units[reference_id]),
            margin,
            min(typical.count_rounds(case_id), typical.count_rounds(reference_id)),
        )
        for (case_id, reference_id), steps in zip(known, typical.estimate_ratios(known), strict=True)
    ]


def select_compile_comparisons(
    comparisons: Iterable[Comparison], cases: Iterable[CaseResult]
) -> list[Comparison]:
    """Those of the comparisons that hold a mode of torch.compile against another."""
    mode = {case.case_id: case.compile for case in cases}
    known = [one for one in comparisons if one.case_id in mode and one.reference_id in mode]
    return [one for one in known if mode[one.case_id] != mode[one.reference_id]]


def compute_speedup_over_default(
    comparisons: Iterable[Comparison], cases: Iterable[CaseResult]
) -> dict[str, Interval]:
    """Return by case its rate over that of DDP's default; DP stands below the line in its comparison."""
    known = {case.case_id: case for case in cases}
    found: dict[str, Interval] = {}
    for one in comparisons:
        ours, reference = known.get(one.case_id), known.get(one.reference_id)
        if ours is None or reference is None or ours.variant != reference.variant:
            continue
        if reference.mode == "dp":
            found[one.case_id] = UNIT_RATIO
            found[one.reference_id] = one.ratio.invert()
        else:
            found[one.reference_id] = UNIT_RATIO
            found[one.case_id] = one.ratio
    return found
