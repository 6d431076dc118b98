"""Two watched trainings in a gate: milliseconds of their steps, and what the first watch expected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest

from ..common.numbers import choose_places, format_interval, format_quantity
from ..findings.verdicts import MIN_SHARE
from ..findings.watched import list_costs, list_parts, name_rank
from ..findings.watched_settings import describe_share, write_estimate
from ..machine.manifest import Manifest
from ..machine.watched import Watched, WatchedRank, WatchedSetting
from ..page.page import BAD, GOOD, Card, Heading, Table
from ..stats.interval import Interval
from .judge import Change
from .runs import GateRun

MAX_RANKS = 4
"""Ranks in the table of parts: those on which a part changed most."""


@dataclass(frozen=True)
class Promise:
    """Step that the watch of the baseline expected of a change that the candidate has."""

    title: str
    change: str
    expected_ms: Interval


@dataclass(frozen=True)
class StepChange:
    """Milliseconds of a step on both sides of a gate."""

    baseline_ms: Interval
    candidate_ms: Interval
    difference_ms: Interval
    """Candidate less baseline, with the interval of the change that the gate judges."""
    promises: tuple[Promise, ...]
    left: str
    """The most expensive finding of the candidate's watch; empty without one of `MIN_SHARE` of its step."""


def compare_steps(baseline: GateRun, candidate: GateRun, rate: Change) -> StepChange | None:
    """Compare the steps of two watched trainings by the change of their rate; None where it is not known."""
    before, after = (run.cases[0].result.step_ms for run in (baseline, candidate))
    if before is None or after is None or rate.ratio is None or math.isnan(rate.ratio.low):
        return None
    difference = rate.ratio.invert(before.estimate).shift(-before.estimate)
    promises = tuple(_find_promises(baseline, candidate.manifest))
    return StepChange(before, after, difference, promises, _find_left(candidate, after))


def _find_left(run: GateRun, step: Interval) -> str:
    """Find the most expensive finding of a watch; empty without one of `MIN_SHARE` of its step."""
    watched, case = run.manifest.watched or Watched(), run.cases[0].result
    costs, exposed_ms = list_costs(run.manifest, case, watched.settings), case.exposed_comm_ms
    found = [(one.ms.estimate, one.fact) for one in costs if one.ms]
    if exposed_ms is not None and exposed_ms.low > 0:
        added = f"{format_interval(exposed_ms, 'ms')}, {describe_share(exposed_ms, step)}"
        found.append((exposed_ms.estimate, f"Communication adds {added}."))
    most_ms, fact = max(found, default=(0.0, ""))
    return fact if most_ms >= MIN_SHARE * step.estimate else ""


def _describe_surprise(expected: Interval, took: Interval) -> str:
    """Say whether a step takes as long as expected: where their intervals overlap."""
    if took.low <= expected.high and expected.low <= took.high:
        return "as expected"
    word = "more" if took.estimate > expected.estimate else "less"
    return f"{format_quantity(abs(took.estimate - expected.estimate), 'ms')} {word} than expected"


def _find_promises(baseline: GateRun, candidate: Manifest) -> Iterator[Promise]:
    """Find what the baseline's watch expected of the changes that the candidate has."""
    before, after = baseline.manifest.watched or Watched(), candidate.watched or Watched()
    changed = [one for one in before.settings if _is_changed(one, after.find_setting(one.name))]
    is_late = after.late is not None and after.late.is_straggler
    for one in list_costs(baseline.manifest, baseline.cases[0].result, changed):
        if one.after_ms is not None and not (is_late and one.title == "Straggler"):
            change = "equal ranks" if one.title == "Straggler" else one.change.removeprefix("Try ")
            yield Promise(one.title, change, one.after_ms)


def _is_changed(before: WatchedSetting, after: WatchedSetting | None) -> bool:
    """Tell whether a setting is no longer as costly: a loader has more workers, another is gone or rarer."""
    if before.name == "loader":
        return after is not None and after.amount > before.amount
    return after is None or after.amount < before.amount


def _write_change(before_ms: float, after_ms: float) -> str:
    """Write a change with its sign, and as many places as the larger side."""
    places = max(choose_places(Interval(max(before_ms, after_ms), math.nan, math.nan)), 0)
    return f"{round(after_ms - before_ms, places) + 0.0:+,.{places}f}"


def make_cards(found: StepChange) -> list[Card]:
    """Make a card of the step on both sides, and one of each promise."""
    before, after = (format_interval(ms, "ms") for ms in (found.baseline_ms, found.candidate_ms))
    more = found.difference_ms
    less = more.negate()
    state, label = "open", "no significant difference"
    difference = f"between {write_estimate(less, less.high)} less and {write_estimate(more, more.high)} more"
    for ms, word, tone in ((less, "less", GOOD), (more, "more", BAD)):
        if ms.low > 0:
            state, label = tone.name, f"{write_estimate(ms)} {word} per step"
            difference = f"{format_interval(ms, 'ms')} {word}"
    is_alone = len(found.promises) == 1
    step = Card(
        "Step",
        state,
        label,
        f"A step takes {after} in the candidate and {before} in the baseline: {difference}.",
    )
    return [
        step,
        *(
            Card(
                one.title,
                "equal",
                f"expected {write_estimate(one.expected_ms)}, took {write_estimate(found.candidate_ms)}",
                f"The watch of the baseline expected {format_interval(one.expected_ms, 'ms')} with "
                f"{one.change}{'' if is_alone else ' alone'}; the candidate takes {after}"
                f"{f', {_describe_surprise(one.expected_ms, found.candidate_ms)}' if is_alone else ''}.",
            )
            for one in found.promises
        ),
        *([Card("What is left", "found", "", found.left)] if found.left else []),
    ]


def _compare_parts(ours: WatchedRank, theirs: WatchedRank) -> list[tuple[str, float, float]]:
    """List the step of a rank and its parts, each with its milliseconds on both sides."""
    step = [("step", ours.step_ms, theirs.step_ms)] if ours.step_ms and theirs.step_ms else []
    headings = list_parts([ours, theirs]).items()
    parts = ((heading, ours.parts[part], theirs.parts[part]) for part, heading in headings)
    return [(name, before.estimate, after.estimate) for name, before, after in (*step, *parts)]


def tabulate_parts(baseline: Manifest, candidate: Manifest) -> Table:
    """Tabulate the parts of a step on both sides, of the ranks on which they changed most."""
    before, after = (
        {one.rank: one for one in (side.watched or Watched()).ranks} for side in (baseline, candidate)
    )
    found = {rank: _compare_parts(before[rank], after[rank]) for rank in before if rank in after}
    changes = {rank: max((abs(b - a) for _, a, b in parts), default=0.0) for rank, parts in found.items()}
    most = nlargest(MAX_RANKS, changes, key=changes.__getitem__)
    rows = tuple(
        (
            f"rank {name_rank(baseline, rank)}: {part}",
            *(format_quantity(ms, "") for ms in sides),
            _write_change(*sides),
        )
        for rank, parts in found.items()
        if rank in most
        for part, *sides in parts
    )
    note = "Medians of each part, so parts need not add up to the step."
    if len(most) < len(found):
        note += f" The {len(most)} of {len(found)} ranks on which a part changed most."
    columns = ("Baseline", "Candidate", "Change")
    headings = (Heading("Part of a step"), *(Heading(one, "number") for one in columns))
    return Table("Where a step goes, in ms", "", headings, rows, below=(note,))
