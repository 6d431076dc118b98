"""Answers how confident one may be of a run's answers, by what they claim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import stdev
from typing import Any, NamedTuple

from ..common.numbers import format_count, format_percent
from ..common.text import begin_sentence
from ..machine.records import Record
from ..results.case_result import CaseResult
from ..results.comparisons import TOO_FEW, Comparison
from ..stats.interval import Interval, estimate_common_value
from .cautions import DIRECTION, LARGE_DRIFT, SIZES, TRANSFER, WEAKENED_BY, Caution
from .verdicts import Verdict


class Trust(Record, frozen=True, omit_defaults=False):
    """Trust in the answers of a run, by the claims that they make."""

    order: str
    """Trust in which is faster, in sentences as all of them."""
    size: str
    """Trust in the size of the difference, in this run."""
    next_run: str
    """Forecast for another run of the same plan on this machine."""
    other_machines: str

    @property
    def lines(self) -> dict[str, str]:
        """The sentences by the claim that they are of."""
        names = ("which is faster", "by how much", "next run", "other machines")
        return dict(zip(names, (self.order, self.size, self.next_run, self.other_machines), strict=True))


def assess_confidence(
    verdicts: Sequence[Verdict],
    cautions: Sequence[Caution],
    *,
    on_cpu: bool,
    load: str = "",
    repeats: str = "",
) -> Trust | None:
    """Assess how reliable the answers of a run are; None without any.

    `load` is as `describe_busy_cores` says it, `repeats` as `describe_repeatability` does.
    """
    if not verdicts:
        return None
    direction, weak, transfer = (
        ", ".join(one.short or one.kind for one in cautions if WEAKENED_BY[one.kind] == claim)
        for claim in (DIRECTION, SIZES, TRANSFER)
    )
    compared = [one for one in verdicts if one.comparisons]
    undecided = [one for one in compared if one.is_open]
    order = "The answers are reliable within this run." if compared else "Nothing is compared."
    if undecided:
        are = "answer is" if len(undecided) == 1 else "answers are"
        order = f"{len(undecided)} {are} not resolved. Others are reliable within this run."
    if compared and undecided == compared:
        order = "Nothing is resolved yet."
    drift = next((one.short or one.kind for one in cautions if one.kind == LARGE_DRIFT), "")
    if drift and compared and not undecided:
        order = f"The direction of the answers is certain, their size is not: {drift}."
    size = "This run's true values are in their intervals with 95% confidence."
    size += f" Caution: {weak}." if weak else ""
    if all(one.answer == TOO_FEW for one in verdicts):
        size = "This is not known: there are too few rounds for intervals."
    changed = f" Expect other times and rates than in this run: {transfer}." if transfer else ""
    return Trust(
        order=f"The answers are in doubt: {direction}." if direction else order,
        size=f"{size} {begin_sentence(load)}." if load else size,
        next_run=f"{repeats}{changed}",
        other_machines="Measure on GPUs, because a device here is a CPU core."
        if on_cpu
        else "Measure there: speed depends on GPU, interconnect and PyTorch version.",
    )


MIN_RUNS = 3
"""Two agree or not; they have no scatter to hold their intervals against."""

UNKNOWN_REPEATABILITY = (
    "Unknown: intervals are of this run alone. Before a decision, run the same command twice more."
)


class Agreement(NamedTuple):
    """A ratio, or a rate, in several runs."""

    scatter: float
    """Standard deviation of the runs, a share."""
    holding: int
    """Runs whose interval holds the value that they have in common."""
    num_runs: int


def find_agreements(runs: Iterable[Mapping[Any, Interval]]) -> list[Agreement]:
    """Compare by name what at least `MIN_RUNS` runs know with an interval that has a width."""
    found: dict[Any, list[Interval]] = {}
    for run in runs:
        for name, value in run.items():
            if 0 < value.low < value.high < math.inf:
                found.setdefault(name, []).append(value)
    return [
        Agreement(
            scatter=stdev(math.log(one.estimate) for one in values),
            holding=sum(not one.is_clear_of(common) for one in values),
            num_runs=len(values),
        )
        for values in found.values()
        if len(values) >= MIN_RUNS and (common := estimate_common_value(values))
    ]


def _collect_values(
    cases: Iterable[CaseResult], comparisons: Iterable[Comparison]
) -> tuple[dict[Any, Interval], dict[Any, Interval]]:
    """Return the ratios and rates of a run's cases that have their devices for themselves."""
    own = {case.case_id: case for case in cases if case.is_ok and not case.oversubscribed}
    pairs = {(one.case_id, one.reference_id): one.ratio for one in comparisons}
    ranked = (case for case in own.values() if case.mode != "single" and case.is_ranked)
    ratios = {pair: ratio for pair, ratio in pairs.items() if own.keys() >= {*pair}}
    speedups = {case.case_id: case.speedup for case in ranked if case.speedup}
    return ratios | speedups, {i: case.images_per_s for i, case in own.items() if case.images_per_s}


def describe_repeatability(
    cases: Sequence[CaseResult],
    comparisons: Sequence[Comparison],
    earlier: Sequence[tuple[Sequence[CaseResult], Sequence[Comparison]]],
) -> str:
    """Say what runs of the same plan on this machine, this one and `earlier` ones, tell of another run."""
    runs = [*earlier, (cases, comparisons)]
    ratios, rates = map(find_agreements, zip(*(_collect_values(*run) for run in runs), strict=True))
    if not rates:
        return UNKNOWN_REPEATABILITY
    apart = hold = ""
    if ratios:
        held, total = sum(one.holding for one in ratios), sum(one.num_runs for one in ratios)
        apart = f", ratios by {_describe_scatter(ratios)}"
        share = f"{format_percent(held / total)}, where 95% would if rounds alone differed"
        hold = f" {held} of {total} intervals of ratios hold the common value: {share}."
    others = format_count(len(runs) - 1, "earlier run")
    return (
        f"In this and {others} of the plan, rates vary by {_describe_scatter(rates)}{apart} (standard "
        f"deviation): if runs differ by more than an interval, decide by that difference.{hold}"
    )


def _describe_scatter(found: Sequence[Agreement]) -> str:
    least, most = (format_percent(extreme(one.scatter for one in found)) for extreme in (min, max))
    return least if least == most else f"{least} to {most}"
