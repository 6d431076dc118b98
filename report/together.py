"""Shows several runs side by side, and says which is faster in which of their common cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..bench.conditions import machine_kind
from ..bench.findings.next_step import (
    NOT_INTERLEAVED,
    UNKNOWN_REF,
    NextStep,
    interleave_command,
    took_turns,
)
from ..bench.findings.numbers import TIMES, between, per_second, plural, times, with_interval
from ..bench.findings.wording import cap_label, case_label, short_mode
from ..bench.results.aggregate import (
    estimates_of_cases,
    images_per_s_by_round,
    typical_of,
    units_per_step,
)
from ..bench.results.case_result import Cells as Row
from ..bench.results.case_result import estimate, text, truth
from ..bench.results.comparisons import EQUAL, FASTER, OPEN, SLOWER, UNRESOLVED, Comparison
from ..bench.results.schema import records
from ..bench.results.store import RunData
from ..bench.stats.interval import Estimate
from ..bench.stats.two_runs import in_pairs, with_change_of_runs
from .caps import cap_ticks, in_order, placed, step_by_cap
from .cases import WorkloadCases, workloads
from .drawing import MOST_RUNS, Figure, Line, chart
from .figures import BARS, by_devices, counts_of, device_ticks, over_devices
from .repeats import repeats
from .table import Heading, Section, Table

_CONFIDENCE = 0.95
"""Of all ratios that stand beside each other together, and of a run's own intervals each."""

_NAMED = 3
"""Cases that a sentence names."""

_HOW = (
    "Each run has its colour, mark and line. What differs between runs that were not measured in turns, "
    "below, and the time of day, can cause a difference. "
)


@dataclass(frozen=True)
class MeasuredRun:
    """One of several runs on a page: its name and look there, and what it measured of one workload."""

    title: str
    look: str
    run: RunData
    workload: WorkloadCases

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Its cases by the name that is the same in every run."""
        return {case_label(row): row for row in records(self.workload.cases)}

    @cached_property
    def rounds(self) -> Mapping[str, Mapping[int, float]]:
        """Units per second by case id and round."""
        return images_per_s_by_round(self.run.times, units_per_step(self.workload.cases))

    @cached_property
    def log_rates(self) -> Mapping[str, Estimate]:
        """The logarithm of each case's rate, by case id."""
        rows, units = records(self.workload.cases), units_per_step(self.workload.cases)
        found = estimates_of_cases(rows, typical_of(self.run.times), units)
        return {case_id: one["images_per_s"] for case_id, one in found.items() if "images_per_s" in one}


def together(titles: Sequence[str], runs: Sequence[RunData]) -> Section | None:
    """Show what can be drawn of several runs together, in the order given; None for fewer than two.

    Workloads of one name belong together; runs that have one workload each are compared whatever its name.
    """
    measured = [workloads(run.cases) for run in runs]
    labels = dict.fromkeys(workload.label for own in measured for workload in own)
    alone = all(len(own) <= 1 for own in measured)
    groups = [
        [
            MeasuredRun(title, f"run{i}", run, workload)
            for i, (title, run, own) in enumerate(zip(titles, runs, measured, strict=True), start=1)
            for workload in own
            if alone or workload.label == label
        ]
        for label in ([""] if alone else labels)
    ]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return None
    drawn: list[Figure] = []
    tables, said = [], []
    if (again := repeats(runs)) is not None:
        said, tables = [again[0]], [again[1]]
    for i, group in enumerate(groups, 1):
        name = group[0].workload.label if len(groups) > 1 else ""
        found = _ratios(group)
        said += [f"{name}: {sentence}" if name else sentence for sentence in _findings(group, found)]
        drawn += [
            replace(figure, title=f"{figure.title}: {name}") if name else figure
            for figure in _figures(group[:MOST_RUNS], f"together-{i}")
        ]
        tables += filter(None, [_table(group, found)])
    return Section(
        title="The runs side by side",
        findings=said,
        warnings=[NOT_INTERLEAVED] if said and not all(map(_in_turns, groups)) else [],
        following=_following(groups[0]) if said and len(groups) == 1 else None,
        notes=[
            "The same cases of every run, beside each other.",
            *(note for group in groups for note in _notes(group)),
        ],
        figures=drawn,
        tables=tables,
    )


def _in_turns(group: Sequence[MeasuredRun]) -> bool:
    """Whether these runs were measured together by `bench.gate --interleave`."""
    return took_turns([one.run.manifest for one in group])


def _ratios(group: Sequence[MeasuredRun]) -> list[dict[str, Comparison]]:
    """Return for every run but the first its cases over those of the first, by name; all hold at once."""
    first, *others = group
    common = [[name for name in run.rows if name in first.rows] for run in others]
    confidence = 1 - (1 - _CONFIDENCE) / max(sum(map(len, common)), 1)
    found: list[dict[str, Comparison]] = []
    for run, names in zip(others, common, strict=True):
        compared = {}
        for name in names:
            rows = run.rows[name], first.rows[name]
            ids = text(rows[0]["case_id"]), text(rows[1]["case_id"])
            ours, theirs = run.rounds.get(ids[0], {}), first.rounds.get(ids[1], {})
            if ids[0] not in run.log_rates or ids[1] not in first.log_rates:
                continue
            if _in_turns([first, run]):
                both = sorted(ours.keys() & theirs.keys())
                apart = in_pairs([math.log(ours[r] / theirs[r]) for r in both])
            else:
                series = [np.log([rate for _, rate in sorted(one.items())]) for one in (ours, theirs)]
                apart = with_change_of_runs(run.log_rates[ids[0]].minus(first.log_rates[ids[1]]), *series)
            ratio, least = apart.interval(confidence).exp(), min(len(ours), len(theirs))
            compared[name] = Comparison(*ids, ratio, first.run.manifest.margin, least)
        found.append(compared)
    return found


def _findings(group: Sequence[MeasuredRun], found: Sequence[Mapping[str, Comparison]]) -> list[str]:
    """Say of every run but the first in which cases it is faster, beginning with the largest change.

    Cases on shared devices are left out, as from a run's own answers; so are runs of other work.
    """
    if len({run.workload.label for run in group}) > 1:
        return []
    said: list[str] = []
    for run, compared in zip(group[1:], found, strict=True):
        own = {name: one for name, one in compared.items() if not truth(run.rows[name]["oversubscribed"])}
        said += _sentences(run.title, group[0].title, own) if own else []
    return said


def _sentences(title: str, first: str, compared: Mapping[str, Comparison]) -> list[str]:
    of = f"of {plural(len(compared), 'case')}"
    found: dict[str, list[tuple[str, Comparison]]] = {FASTER: [], SLOWER: [], EQUAL: [], UNRESOLVED: []}
    for name, one in sorted(compared.items(), key=lambda pair: -abs(math.log(pair[1].ratio.estimate))):
        answer = UNRESOLVED if one.answer in OPEN else EQUAL if one.within_margin else one.answer
        found[answer].append((name, one))
    parts = [
        f"{title} is {answer} than {first} in {len(found[answer])} {of}: {_listed(found[answer])}."
        for answer in (FASTER, SLOWER)
        if found[answer]
    ]
    if equal := found[EQUAL]:
        margin = f"{100 * equal[0][1].margin:g}%"
        parts.append(f"No difference above {margin} between {title} and {first} in {len(equal)} {of}.")
    if left := found[UNRESOLVED]:
        parts.append(f"Not told apart are {title} and {first} in {len(left)} {of}: {_listed(left)}.")
    return parts


def _listed(pairs: Sequence[tuple[str, Comparison]]) -> str:
    named = [f"{name} {times(one.ratio.estimate)} {between(one.ratio)}" for name, one in pairs[:_NAMED]]
    more = f"; and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else ""
    return f"{'; '.join(named)}{more}"


def _following(group: Sequence[MeasuredRun]) -> NextStep | None:
    """Return the command that measures two runs of one kind of machine in turns."""
    manifests = [one.run.manifest for one in group]
    if len(group) != 2 or _in_turns(group) or len({str(machine_kind(m)) for m in manifests}) > 1:
        return None
    command = interleave_command(*manifests)
    if not command:
        return None
    where = f", {UNKNOWN_REF} being the commit of {group[0].title}" if f" {UNKNOWN_REF} " in command else ""
    return NextStep(f"to tell the code from the machine, measure both in turns{where}", command)


def _notes(group: Sequence[MeasuredRun]) -> list[str]:
    said = []
    if len({run.workload.label for run in group}) > 1:
        work = "; ".join(f"{run.title}: {run.workload.label}" for run in group)
        said.append(f"The runs do not measure the same work, so only ratios compare: {work}.")
    if not _unit(group):
        units = ", ".join(f"{run.title} {run.workload.unit}" for run in group)
        said.append(f"Throughputs are not comparable, because the runs count different units: {units}.")
    if len(group) > MOST_RUNS:
        said.append(f"Of {len(group)} runs the first {MOST_RUNS} are drawn.")
    return said


def _unit(group: Sequence[MeasuredRun]) -> str:
    """Return what the throughput of all runs counts; empty where they differ in it."""
    units = {run.workload.unit for run in group}
    return units.pop() if len(units) == 1 else ""


def _device(group: Sequence[MeasuredRun]) -> str:
    kinds = {run.workload.device for run in group}
    return kinds.pop() if len(kinds) == 1 else "device"


_WORDS = {
    "images_per_s": ("throughput", "Throughput of every run", "Higher is better. "),
    "efficiency": (
        "efficiency",
        "Scaling efficiency of every run",
        "Efficiency is throughput over that of the run's own “single”, divided by the number of devices: it "
        "compares machines of different speed. ",
    ),
}
"""By column what it shows, the title of its figure, and how to read that."""


def _figures(group: Sequence[MeasuredRun], key: str) -> list[Figure]:
    unit = _unit(group)
    made = (
        _against_devices(group, "images_per_s", per_second(unit), key) if unit else None,
        _against_devices(group, "efficiency", "%", key),
        _caps(group, key),
    )
    return [figure for figure in made if figure is not None]


def _against_devices(group: Sequence[MeasuredRun], column: str, unit: str, key: str) -> Figure | None:
    """Draw a panel per mode that several runs have, and a line per run."""
    what, title, how = _WORDS[column]
    device, panels, said = _device(group), {}, []
    found = [(run, line) for run in group for line in by_devices(run.workload, column)]
    for mode in ("dp", "ddp"):
        lines = [line._replace(label=run.title, look=run.look) for run, line in found if line.look == mode]
        if len(lines) > 1:
            rows = (row for run in group for row in records(run.workload.cases))
            name = " and ".join(dict.fromkeys(short_mode(row) for row in rows if text(row["mode"]) == mode))
            panels[f"{name}: {what} ({unit})"] = lines
            said.append(f"{name} on {_best_first(lines, device, unit)}.")
    counts = counts_of(line for lines in panels.values() for line in lines)
    if not counts or counts == [1.0]:
        return None
    return over_devices(
        key=f"{key}-{what}",
        title=title,
        panels=panels,
        x_label=f"devices ({device}s)",
        ticks=device_ticks(counts),
        caption=" ".join(said),
        how_to_read=f"{how}{_HOW}{BARS}",
    )


def _best_first(lines: Sequence[Line], device: str, unit: str) -> str:
    """Name each run, best first, at the largest count of unshared devices that most runs have."""
    marks = [(mark, line.label) for line in lines for mark in line.marks]
    counts = [mark.x for mark, _ in marks]
    shared = {mark.x for mark, _ in marks if mark.hollow}
    at = max(set(counts), key=lambda n: (counts.count(n), n not in shared, n))
    there = sorted(((m, label) for m, label in marks if m.x == at), key=lambda pair: -pair[0].value.estimate)
    each = ", ".join(f"{label} {with_interval(mark.value, unit)}" for mark, label in there)
    return f"{plural(at, device)}: {each}"


def _caps(group: Sequence[MeasuredRun], key: str) -> Figure | None:
    """Draw a panel per device count at which several runs swept bucket caps."""
    swept = [
        (run, {n: marks for n, marks in step_by_cap(run.workload).items() if len(marks) > 1}) for run in group
    ]
    counts = sorted({n for _, by_count in swept for n in by_count})
    counts = [n for n in counts if sum(n in by_count for _, by_count in swept) > 1]
    order = in_order(by_count[n] for _, by_count in swept for n in counts if n in by_count)
    panels, said = {}, []
    for n in counts:
        name, best = f"DDP, {plural(n, _device(group))}", []
        lines = panels[f"{name}: step time (ms)"] = list[Line]()
        for run, by_count in swept:
            if n in by_count:
                # Several runs leave no room for the number of buckets beside each mark.
                marks = tuple(mark._replace(note="") for mark in placed(by_count[n], order))
                lines.append(Line(run.title, run.look, marks, joined=False))
                least = min(marks, key=lambda mark: mark.value.estimate)
                at = f"{cap_label(order[int(least.x)])}, {with_interval(least.value, 'ms')}"
                best.append(f"{run.title} has its shortest step at {at}")
        said.append(f"{name}: {'; '.join(best)}")
    if not panels:
        return None
    return chart(
        key=f"{key}-buckets",
        title="Step time against bucket cap, every run",
        panels=panels,
        x_label="bucket cap (MiB)",
        ticks=cap_ticks(order),
        caption=". ".join(said) + ".",
        how_to_read=f"Lower is better. {_HOW}{BARS} Each panel has its own scale.",
        from_zero=False,
    )


def _table(group: Sequence[MeasuredRun], found: Sequence[Mapping[str, Comparison]]) -> Table | None:
    """Tabulate throughput of every case that several runs have, a column per run; None in several units."""
    names = dict.fromkeys(name for run in group for name in run.rows)
    kept = [name for name in names if sum(name in run.rows for run in group) > 1]
    if not _unit(group) or not kept:
        return None
    per_s, (first, *others) = per_second(_unit(group)), [run.title for run in group]
    heads = [f"{first} ({per_s})"]
    for title in others:
        heads += [f"{title} ({per_s})", f"{title} / {first} ({TIMES})"]
    rows = []
    for name in kept:
        rates = [estimate(r.rows[name], "images_per_s") if name in r.rows else None for r in group]
        cells = [with_interval(rates[0])]
        for rate, compared in zip(rates[1:], found, strict=True):
            ratio = compared[name].ratio if name in compared else None
            cells += [with_interval(rate), with_interval(ratio)]
        rows.append((name, *cells))
    note = (
        "Throughput with its 95% interval, of cases that several runs measured, and its ratio to "
        "the first run's. The intervals of the ratios hold all at once"
    )
    note += (
        ". The runs were measured in turns, so the ratio is of those within rounds, where the machine did "
        "the same to both; it may differ from the quotient of the throughputs. It holds within this launch."
        if _in_turns(group)
        else ", and hold how much each run changed within itself; a change of the machine between the runs "
        "may be larger."
    )
    columns = (Heading("Case"), *(Heading(name, "number") for name in heads))
    return Table("Throughput side by side", note, columns, tuple(rows))
