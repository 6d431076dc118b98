"""Compares cases that several separate runs measured, and says which run is faster in which of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_bench.bench.conditions import machine_kind
from ddp_bench.bench.findings.next_step import UNKNOWN_REF, interleave_command, took_turns
from ddp_bench.bench.findings.numbers import between, plural, times
from ddp_bench.bench.findings.wording import Row, case_label, estimate, text, truth
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.aggregate import images_per_s_by_round, units_per_step
from ddp_bench.bench.results.comparisons import EQUAL, FASTER, SLOWER, Comparison
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.stats import paired_ratio, ratio_of_runs
from ddp_bench.report.model import Following
from ddp_bench.report.select import WorkloadCases

_CONFIDENCE = 0.95
"""Of all ratios that stand beside each other together, and of a run's own intervals each."""

_NAMED = 3
"""Cases that a sentence names."""


@dataclass(frozen=True)
class MeasuredRun:
    """One of several runs on a page: its name and look there, and what it measured of one workload."""

    title: str
    style: str
    workload: WorkloadCases
    manifest: Manifest
    rounds: Mapping[str, ByRound]
    """Units per second by case id and round."""

    rows: Mapping[str, Row]
    """Its cases by the name that is the same in every run."""


def measured_run(run: RunData, title: str, style: str, workload: WorkloadCases) -> MeasuredRun:
    """Take what is compared of one workload of a run."""
    rounds = images_per_s_by_round(run.blocks, units_per_step(workload.cases))
    rows = {case_label(row, workload.device): row for row in records(workload.cases)}
    return MeasuredRun(title, style, workload, run.manifest, rounds, rows)


def in_turns(group: Sequence[MeasuredRun]) -> bool:
    """Whether these runs were measured together by `bench.gate --interleave`."""
    return took_turns([run.manifest for run in group])


def ratios(group: Sequence[MeasuredRun]) -> list[dict[str, Comparison]]:
    """Return for every run but the first its cases over those of the first, by name; all hold at once."""
    first, *others = group
    common = [[name for name in run.rows if name in first.rows] for run in others]
    confidence = 1 - (1 - _CONFIDENCE) / max(sum(map(len, common)), 1)
    margin = first.manifest.margin
    return [
        {
            name: found
            for name in names
            if (found := _compared(run, first, name, margin=margin, confidence=confidence)) is not None
        }
        for run, names in zip(others, common, strict=True)
    ]


def _compared(
    run: MeasuredRun, first: MeasuredRun, name: str, *, margin: float, confidence: float
) -> Comparison | None:
    row, reference = run.rows[name], first.rows[name]
    ids = [text(r["case_id"]) for r in (row, reference)]
    ours, theirs = (one.rounds.get(case_id, {}) for one, case_id in zip((run, first), ids, strict=True))
    fits = estimate(row, "images_per_s"), estimate(reference, "images_per_s")
    if any(fit is None or fit.estimate <= 0 for fit in fits):
        return None
    if in_turns([first, run]):
        ratio = paired_ratio(ours, theirs, confidence=confidence)
    else:
        left, right = ([rate for _, rate in sorted(rounds.items())] for rounds in (ours, theirs))
        _, ratio = ratio_of_runs(fits, (left, right), confidence=confidence)
    num_rounds = min(len(ours), len(theirs))
    return Comparison(ids[0], ids[1], ratio, margin, num_rounds) if ratio.estimate > 0 else None


def findings(group: Sequence[MeasuredRun], found: Sequence[Mapping[str, Comparison]]) -> list[str]:
    """Say of every run but the first in which cases it is faster, beginning with the largest change.

    Cases on shared devices are left out, as from a run's own answers; so are runs of other work.
    """
    first = group[0]
    if len({run.workload.label for run in group}) > 1:
        return []
    said: list[str] = []
    for run, compared in zip(group[1:], found, strict=True):
        own = {name: one for name, one in compared.items() if not truth(run.rows[name]["oversubscribed"])}
        if own:
            said += _sentences(run.title, first.title, own)
    return said


def _sentences(title: str, first: str, compared: Mapping[str, Comparison]) -> list[str]:
    of = f"of {plural(len(compared), 'case')}"
    ordered = sorted(compared.items(), key=lambda pair: -abs(math.log(pair[1].ratio.estimate)))
    margin = f"{100 * ordered[0][1].margin:g}%"
    beyond = {
        answer: [(name, one) for name, one in ordered if one.answer == answer and not one.within_margin]
        for answer in (FASTER, SLOWER)
    }
    equal = [name for name, one in ordered if one.within_margin and one.answer in (FASTER, SLOWER, EQUAL)]
    clear = {name for pairs in beyond.values() for name, _ in pairs} | {*equal}
    left = [(name, one) for name, one in ordered if name not in clear]
    parts = [
        f"{title} is {answer} than {first} in {len(pairs)} {of}: {_listed(pairs)}."
        for answer, pairs in beyond.items()
        if pairs
    ]
    if equal:
        parts.append(f"No difference above {margin} between {title} and {first} in {len(equal)} {of}.")
    if left:
        parts.append(f"Not told apart are {title} and {first} in {len(left)} {of}: {_listed(left)}.")
    return parts


def _listed(pairs: Sequence[tuple[str, Comparison]]) -> str:
    named = [f"{name} {times(one.ratio.estimate)} {between(one.ratio)}" for name, one in pairs[:_NAMED]]
    more = f"; and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else ""
    return f"{'; '.join(named)}{more}"


def following(group: Sequence[MeasuredRun]) -> Following | None:
    """Return the command that measures two runs of one kind of machine in turns."""
    if len(group) != 2 or in_turns(group) or len({str(machine_kind(run.manifest)) for run in group}) > 1:
        return None
    first, other = group
    command = interleave_command(first.manifest, other.manifest)
    unknown = f" {UNKNOWN_REF} " in command
    where = f", {UNKNOWN_REF} being the commit of {first.title}" if unknown else ""
    return Following(f"to tell the code from the machine, measure both in turns{where}", command)
