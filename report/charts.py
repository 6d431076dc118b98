"""Charts of a run's cases: speed-up over devices, ratios to DDP's default, and rounds over time.

A chart of a run's cases is None where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ..bench.common.numbers import (
    TIMES,
    format_count,
    format_interval,
    format_rate_unit,
    format_ratio,
)
from ..bench.findings.answers import select_batches, select_headline
from ..bench.findings.cautions import compute_pace
from ..bench.findings.wording import label_case, label_settings, name_devices, name_mode, name_samples
from ..bench.page.charts import (
    Line,
    Mark,
    Ratio,
    draw_chart,
    draw_forest,
    draw_over_devices,
    list_places,
    make_bare_marks,
)
from ..bench.page.drawing import LOOKS
from ..bench.page.page import Figure
from ..bench.results.aggregate import compute_images_per_s
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import (
    Comparison,
    compute_speedup_over_default,
    find_default,
    make_equal_band,
)
from ..bench.results.round_times import RoundTimes
from .cases import WorkloadCases, add_cells, find_headline_count, select_mode

_MIN_ROUNDS = 3

_SCALING = {
    "weak": "Weak scaling: every device has a batch of its own",
    "strong": "Strong scaling: the devices share one batch",
}


def make_marks(
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
        if found := case.get_interval(column):
            value, rounds = (
                found.scale(factor),
                format_count(case.num_rounds, "round") if case.num_rounds else "",
            )
            tip = " · ".join(filter(None, (label_case(case), write(value), rounds)))
            made.append(Mark(x=getattr(case, over), **asdict(value), written=write(value), tip=tip))
    return tuple(made)


def draw_scaling(workload: WorkloadCases, faster: Collection[str] = (), *, key: str) -> Figure | None:
    """Draw the speed-up of DP, of DDP at its usual settings, and of settings that are `faster`, by id."""
    ranked = [case for case in workload.cases if case.is_ranked]
    lines = []
    for mode in ("single", "dp", "ddp"):
        cases = select_mode(ranked, mode)
        if marks := make_marks(cases, "speedup", format_ratio):
            lines.append(Line(_name_line(cases[0]), LOOKS[mode], marks))
    drawn = {mark.tip for line in lines for mark in line.marks}
    for case in ranked:
        marks = make_marks([case], "speedup", format_ratio) if case.case_id in faster else ()
        if marks and marks[0].tip not in drawn:
            lines.append(Line(_name_line(case), LOOKS["other"], marks))
    places = list_places(lines)
    if len(places) < 2:
        return None
    most, how = places[-1], workload.cases[0].scaling
    ends = [(found, line.label) for line in lines for found in line.marks if found.x == most]
    ends.sort(key=lambda end: -end[0].estimate)
    said = "; ".join(f"{label} {found.written}" for found, label in ends)
    not_drawn = "Emulated DP is not drawn: it is not comparable with DP on GPUs."
    stands_in = any(case.is_stand_in for case in workload.cases)
    return draw_over_devices(
        lines,
        ideal={float(n): float(n) for n in places},
        log="xy",
        x_label=f"devices ({workload.device}s), {how} scaling",
        y_label=f"speed-up ({TIMES})",
        key=f"{key}-speedup",
        title="Speed-up over one device",
        caption=f"On {format_count(most, workload.device)}: {said}; ideal {most:g}{TIMES}.",
        note=f"{_SCALING.get(how, '')}. {not_drawn if stands_in else ''}",
        terms=("Speed-up",),
    )


def _name_line(case: CaseResult) -> str:
    """Name the line of a mode, with what of its settings is not usual."""
    unusual = label_settings(case, with_cap=case.get_setting("bucket_cap_mb") != "default")
    return ", ".join(filter(None, (name_mode(case), unusual)))


def draw_against_default(
    workload: WorkloadCases, comparisons: Sequence[Comparison], *, key: str
) -> Figure | None:
    """Draw every case of the headline count over DDP's default there, fastest first, and what is equal."""
    cases = select_headline(workload.cases)
    default = find_default(cases)
    found = compute_speedup_over_default(comparisons, cases)
    others = [case for case in cases if case.case_id in found and case is not default]
    ratios = [
        Ratio(
            name=", ".join(filter(None, (name_mode(case), label_settings(case)))),
            case=label_case(case),
            **asdict(found[case.case_id]),
            written=format_ratio(found[case.case_id]),
            look=case.mode if case.mode in ("dp", "ddp") else "other",
        )
        for case in others
    ]
    if default is None or not ratios:
        return None
    ratios.sort(key=lambda one: -one.estimate)
    margin = comparisons[0].margin
    here = label_settings(default)
    count, first, last = format_count(default.num_devices, workload.device), ratios[0], ratios[-1]
    only_caps = all(case.list_changed(default).keys() == {"bucket_cap_mb"} for case in others)
    none = f"no other {'cap' if only_caps else 'case'} is known to be faster"
    compared = f"{none} or slower than DDP's default."
    if first.low > 1 and first.high > 1 + margin:
        compared = f"{first.name} is {first.written} as fast as DDP's default."
    elif last.high < 1 and last.low < 1 / (1 + margin):
        compared = f"{none} than DDP's default. {last.name} is {last.written} as fast."
    return draw_forest(
        ratios,
        make_equal_band(margin),
        key=f"{key}-forest",
        title="Against DDP's default",
        caption=f"On {count} "
        + (compared if math.isfinite(first.low) else "there are too few rounds to compare."),
        note="Right of the line is faster; a bar within the shaded band differs by less than the margin of "
        f"{100 * margin:g}%." + ("" if here == "cap default" else f" Default here: {here or 'defaults'}."),
        terms=("Against DDP's default", "Cap"),
        x_label=f"throughput over DDP's default on {count}\nshaded: within the margin of {100 * margin:g}%",
    )


def draw_over_batch_sizes(cases: Sequence[CaseResult]) -> list[Figure]:
    """Draw throughput, and the share of DDP's step that communication adds, over batch sizes, if several."""
    alike = [case for case in select_batches(cases) if case.is_ok]
    if len(alike) < 2:
        return []
    first, how = alike[0], "in all" if alike[0].scaling == "strong" else "per device"
    ok = (case for case in cases if case.is_ok and case.compile == first.compile)
    singles = [case for case in ok if case.mode == "single" and first.mode != "single"]
    exposed = [
        add_cells(case, **case.exposed_comm_ms.scale(100 / case.step_ms.estimate).to_columns("exposed_pct"))
        for case in alike
        if case.exposed_comm_ms and case.step_ms
    ]

    def draw(what: str, column: str, unit: str, *groups: Sequence[CaseResult], **words: Any) -> Figure:
        write = partial(format_interval, unit=unit.partition(" ")[0])
        lines = [
            Line(name_mode(of[0]), LOOKS[of[0].mode], make_marks(of, column, write, over="batch"))
            for of in filter(None, groups)
        ]
        marks = lines[-1].marks
        ends = ", ".join(f"{mark.written} at batch {mark.x:g}" for mark in (marks[0], marks[-1]))
        return draw_chart(
            lines,
            x_label=f"batch size ({name_samples(first)} {how})",
            y_label=f"{what.lower()} ({unit})",
            ticks=list_places(lines),
            log="x",
            key=f"batch-{column}",
            title=f"{what} over batch size",
            caption=f"{name_mode(first)} on {name_devices(first)}: {ends}.",
            **words,
        )

    note = "Each batch size has a speed-up of its own, over one device with as large a batch."
    found = [draw("Throughput", "images_per_s", format_rate_unit(first.unit), singles, alike, note=note)]
    share = ("Exposed communication", "exposed_pct", "% of the step")
    return found + ([draw(*share, exposed, note="", terms=("Exposed",))] if len(exposed) > 1 else [])


def draw_drift(workload: WorkloadCases, times: RoundTimes, *, key: str, unit: str = "round") -> Figure | None:
    """Draw throughput of each round in percent of the case's median; None before three rounds.

    `unit` names what rounds are numbered by.
    """
    found = compute_images_per_s(times, workload.cases)
    several = {case_id: by_round for case_id, by_round in found.items() if len(by_round) > 1}
    every = {r for by_round in several.values() for r in by_round}
    if len(every) < _MIN_ROUNDS:
        return None
    overall = compute_pace(several)
    at = find_headline_count(workload.cases)
    is_one = len(several) == 1
    name = "throughput" if is_one else f"median of {format_count(len(several), 'case')}"
    paces = {name: (LOOKS["other"], overall)}
    for mode in ("single", "dp", "ddp") if not is_one else ():
        for case in select_mode(workload.cases, mode):
            if case.case_id in several and case.num_devices == (1 if mode == "single" else at):
                label = label_case(case, with_cap=False)
                paces[label] = LOOKS[mode], compute_pace({label: several[case.case_id]})
    low, high = (
        f"{100 * overall[r]:.0f}% ({unit} {r})"
        for r in (min(overall, key=overall.__getitem__), max(overall, key=overall.__getitem__))
    )
    return draw_chart(
        [
            Line(
                label,
                look | {"marker": ""},
                make_bare_marks({float(r): 100 * share for r, share in by_round.items()}),
            )
            for label, (look, by_round) in paces.items()
        ],
        x_label=unit,
        y_label="throughput (% of the median)" if is_one else "throughput (% of the case's median)",
        key=f"{key}-rounds",
        title=f"{unit.capitalize()}s over time",
        caption=f"{format_count(len(every), unit)} ran at {low} to {high} of typical speed.",
        note="A level line is good. A slope is a machine that warms up or throttles, a dip "
        f"{'' if is_one else 'of all modes '}another program."
        f"{'' if is_one else ' Ratios are formed within rounds, so what all modes share cancels in them.'}",
    )
