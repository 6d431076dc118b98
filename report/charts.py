"""Charts of a run's cases: speed-up over devices, ratios to DDP's default, and rounds over time.

A chart of a run's cases is None where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ..bench.common.numbers import TIMES, per_second, plural, quantity, ratio, with_interval
from ..bench.findings.answers import headline, select_batches
from ..bench.findings.cautions import pace
from ..bench.findings.wording import case_label, place, samples_noun, settings_label, short_mode
from ..bench.page.charts import Line, Mark, Ratio, bare, chart, counts, forest, over_devices
from ..bench.page.drawing import LOOKS
from ..bench.page.page import Figure
from ..bench.results.aggregate import images_per_s_by_round
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import Comparison, band, default_of, over_default
from ..bench.results.round_times import RoundTimes
from .cases import WorkloadCases, by_mode, headline_count, with_cells

_FEWEST_ROUNDS = 3

_SCALING = {
    "weak": "Weak scaling: every device has a batch of its own",
    "strong": "Strong scaling: the devices share one batch",
}


def marks_of(
    cases: Iterable[CaseResult],
    column: str,
    write: Callable[..., str],
    factor: float = 1.0,
    *,
    over: str = "num_devices",
) -> tuple[Mark, ...]:
    """Make a mark at each case's `over`, where case, value and rounds are shown."""
    made = []
    for case in cases:
        if found := case.interval(column):
            value, rounds = found.scaled(factor), plural(case.num_rounds, "round") if case.num_rounds else ""
            tip = " · ".join(filter(None, (case_label(case), write(value), rounds)))
            made.append(Mark(x=getattr(case, over), **asdict(value), written=write(value), tip=tip))
    return tuple(made)


def scaling(workload: WorkloadCases, *, key: str) -> Figure | None:
    """Draw the speed-up of DP, and of DDP at its usual settings, over device counts."""
    ranked = [case for case in workload.cases if case.is_ranked]
    lines = []
    for mode in ("single", "dp", "ddp"):
        cases = by_mode(ranked, mode)
        if marks := marks_of(cases, "speedup", ratio):
            lines.append(Line(_line_name(cases[0]), LOOKS[mode], marks))
    places = counts(lines)
    if len(places) < 2:
        return None
    most, how = places[-1], workload.cases[0].scaling
    ends = [(found, line.label) for line in lines for found in line.marks if found.x == most]
    ends.sort(key=lambda end: -end[0].estimate)
    said = "; ".join(f"{label} {found.written}" for found, label in ends)
    not_drawn = "Emulated DP is not drawn: its speed says nothing of DP on GPUs."
    stands_in = any(case.is_stand_in for case in workload.cases)
    return over_devices(
        lines,
        ideal={float(n): float(n) for n in places},
        log="xy",
        x_label=f"devices ({workload.device}s), {how} scaling",
        y_label=f"speed-up ({TIMES})",
        key=f"{key}-speedup",
        title="Speed-up over one device",
        caption=f"On {plural(most, workload.device)}: {said}; ideal {most:g}{TIMES}.",
        note=f"{_SCALING.get(how, '')}. {not_drawn if stands_in else ''}",
        terms=("Speed-up",),
    )


def _line_name(case: CaseResult) -> str:
    """Name the line of a mode, with what of its settings is not usual."""
    unusual = settings_label(case, with_cap=case.setting("bucket_cap_mb") != "default")
    return ", ".join(filter(None, (short_mode(case), unusual)))


def against_default(workload: WorkloadCases, comparisons: Sequence[Comparison], *, key: str) -> Figure | None:
    """Draw every case of the headline count over DDP's default there, fastest first, and what is equal."""
    cases = headline(workload.cases)
    default = default_of(cases)
    found = over_default(comparisons, cases)
    ratios = [
        Ratio(
            name=", ".join(filter(None, (short_mode(case), settings_label(case)))),
            case=case_label(case),
            **asdict(found[case.case_id]),
            written=ratio(found[case.case_id]),
            look=case.mode if case.mode in ("dp", "ddp") else "other",
        )
        for case in cases
        if case.case_id in found and case is not default
    ]
    if default is None or not ratios:
        return None
    ratios.sort(key=lambda one: -one.estimate)
    margin = comparisons[0].margin
    here = settings_label(default)
    count, first = plural(default.num_devices, workload.device), ratios[0]
    compared = f"{first.name} is {first.written} as fast as DDP's default."
    return forest(
        ratios,
        band(margin),
        key=f"{key}-forest",
        title="Against DDP's default",
        caption=f"On {count} "
        + (compared if math.isfinite(first.low) else "there are too few rounds to compare."),
        note="Right of the line is faster; a bar within the shaded band counts as equal, by the margin of "
        f"{100 * margin:g}%." + ("" if here == "cap default" else f" Default here: {here or 'defaults'}."),
        terms=("Against DDP's default", "Cap"),
        x_label=f"throughput over DDP's default on {count}",
    )


def over_batch_sizes(cases: Sequence[CaseResult]) -> list[Figure]:
    """Draw throughput, and the share of DDP's step that communication adds, over batch sizes, if several."""
    alike = [case for case in select_batches(cases) if case.is_ok]
    if len(alike) < 2:
        return []
    first, how = alike[0], "in all" if alike[0].scaling == "strong" else "per device"
    ok = (case for case in cases if case.is_ok and case.compile == first.compile)
    singles = [case for case in ok if case.mode == "single" and first.mode != "single"]
    exposed = [
        with_cells(case, **case.exposed_comm_ms.scaled(100 / case.step_ms.estimate).columns("exposed_pct"))
        for case in alike
        if case.exposed_comm_ms and case.step_ms
    ]

    def draw(what: str, column: str, unit: str, *groups: Sequence[CaseResult], **words: Any) -> Figure:
        write = partial(with_interval, unit=unit.partition(" ")[0])
        lines = [
            Line(short_mode(of[0]), LOOKS[of[0].mode], marks_of(of, column, write, over="batch"))
            for of in filter(None, groups)
        ]
        marks = lines[-1].marks
        ends = ", ".join(f"{mark.written} at batch {mark.x:g}" for mark in (marks[0], marks[-1]))
        return chart(
            lines,
            x_label=f"batch size ({samples_noun(first)} {how})",
            y_label=f"{what.lower()} ({unit})",
            ticks=counts(lines),
            log="x",
            key=f"batch-{column}",
            title=f"{what} over batch size",
            caption=f"{short_mode(first)} on {place(first)}: {ends}.",
            **words,
        )

    note = "Each batch size has a speed-up of its own, over one device with as large a batch."
    found = [draw("Throughput", "images_per_s", per_second(first.unit), singles, alike, note=note)]
    share = ("Exposed communication", "exposed_pct", "% of the step")
    return found + ([draw(*share, exposed, note="", terms=("Exposed",))] if len(exposed) > 1 else [])


def drift(workload: WorkloadCases, times: RoundTimes, *, key: str, unit: str = "round") -> Figure | None:
    """Draw throughput of each round in percent of the case's median; None before three rounds.

    `unit` names what rounds are numbered by.
    """
    found = images_per_s_by_round(times, workload.cases)
    several = {case_id: by_round for case_id, by_round in found.items() if len(by_round) > 1}
    every = {r for by_round in several.values() for r in by_round}
    if len(every) < _FEWEST_ROUNDS:
        return None
    overall = pace(several)
    at = headline_count(workload.cases)
    paces = {f"median of {plural(len(several), 'case')}": (LOOKS["other"], overall)}
    for mode in ("single", "dp", "ddp"):
        for case in by_mode(workload.cases, mode):
            if case.case_id in several and case.num_devices == (1 if mode == "single" else at):
                label = case_label(case, with_cap=False)
                paces[label] = LOOKS[mode], pace({label: several[case.case_id]})
    low, high = (
        f"{quantity(100 * overall[r], '%')} ({unit} {r})"
        for r in (min(overall, key=overall.__getitem__), max(overall, key=overall.__getitem__))
    )
    return chart(
        [
            Line(label, look | {"marker": ""}, bare({float(r): 100 * share for r, share in by_round.items()}))
            for label, (look, by_round) in paces.items()
        ],
        x_label=unit,
        y_label="throughput (% of the case's median)",
        key=f"{key}-rounds",
        title=f"{unit.capitalize()}s over time",
        caption=f"Over {plural(len(every), 'round')} the median case ran between {low} and {high} of its own "
        "median.",
        note="A level line is good. A slope is a machine that warms up or throttles, a dip of all modes "
        "another program. Ratios are formed within rounds, so what all modes share cancels in them.",
    )
