"""Ratios of cases with the band of what is equal: every case against DDP's default, or against a baseline."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from ..bench.common.numbers import plural, ratio
from ..bench.findings.answers import headline
from ..bench.findings.wording import case_label, settings_label, short_mode
from ..bench.results.comparisons import Comparison, band, default_of, over_default
from ..bench.stats.interval import Interval
from .cases import WorkloadCases
from .drawing import GRID, INK, LOOKS, MUTED, Figure, mark_look, printable, read_across, tag

_MOST_ROWS = 24
_NAME_WIDTH = 26
"""Characters of a line of a name that leave room for the marks and the number beside them."""

_LEAST_REACH = 0.2
"""The axis has at least so much to both sides of 1, so that a band of a few percent does not fill it."""


class Ratio(NamedTuple):
    """A case's ratio: `name` stands beside it, `case` is its whole name, `written` the number."""

    name: str
    case: str
    interval: Interval
    written: str
    look: str
    hollow: bool = False


def against_default(workload: WorkloadCases, comparisons: Sequence[Comparison], *, key: str) -> Figure | None:
    """Draw every case of the headline count over DDP's default there, fastest first, and what is equal."""
    cases = headline(workload.cases)
    default = default_of(cases)
    found = over_default(comparisons, cases)
    ratios = [
        Ratio(
            name=", ".join(filter(None, (short_mode(case), settings_label(case)))),
            case=case_label(case),
            interval=found[case.case_id],
            written=ratio(found[case.case_id]),
            look=case.mode if case.mode in ("dp", "ddp") else "other",
        )
        for case in cases
        if case.case_id in found and case is not default
    ]
    if default is None or not ratios:
        return None
    ratios.sort(key=lambda one: -one.interval.estimate)
    margin = comparisons[0].margin
    here = settings_label(default)
    count, first = plural(default.num_devices, workload.device), ratios[0]
    compared = f"{first.name} is {first.written} as fast as DDP's default."
    return forest(
        ratios,
        margin,
        key=f"{key}-forest",
        title="Against DDP's default",
        caption=f"On {count} "
        + (compared if math.isfinite(first.interval.low) else "there are too few rounds to compare."),
        note="Right of the line is faster; a bar within the shaded band counts as equal, by the margin of "
        f"{100 * margin:g}%." + ("" if here == "cap default" else f" Default here: {here or 'defaults'}."),
        terms=("Against DDP's default", "Cap"),
        x_label=f"throughput over DDP's default on {count}",
    )


def forest(
    ratios: Sequence[Ratio],
    margin: float,
    *,
    x_label: str,
    ticks: Callable[[float], str] = "{:g}".format,
    note: str,
    **words: Any,
) -> Figure:
    """Draw ratios, a row each, over a band of `margin` around 1; `words` are those of a figure."""
    shown = ratios[:_MOST_ROWS]
    of_many = f" Of {len(ratios)} cases the first {len(shown)} are drawn." if shown != ratios else ""
    names = [_lines(printable(one.name)) for one in shown]
    ends = [end for one in shown for end in astuple(one.interval) if math.isfinite(end)]
    low, high = min([1 - _LEAST_REACH, *ends]), max([1 + _LEAST_REACH, *ends])

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.axvspan(*band(margin), facecolor=GRID, edgecolor="none", zorder=0.5)
        axes.axvline(1.0, color=INK, linewidth=1.2, zorder=1)
        axes.set_yticks(range(len(shown)), ["\n".join(lines) for lines in names])
        for place, (one, label) in enumerate(zip(shown, axes.get_yticklabels(), strict=True)):
            label.set_gid(tag(one.case))
            _draw_ratio(axes, one, place)
        read_across(axes, x_label)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(lambda x, _: ticks(x))

    rows_pt = 34 if any(len(lines) > 1 for lines in names) else 24
    return Figure(note=f"{note}{of_many}", height_pt=62 + rows_pt * len(shown), draw=draw, **words)


def _lines(name: str) -> list[str]:
    """Break a name into at most two lines, after commas where it can."""
    parts = name.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
    return textwrap.wrap(parts, _NAME_WIDTH, max_lines=2, placeholder=" …")


def _draw_ratio(axes: Any, one: Ratio, place: int) -> None:
    named, look = {"gid": tag(f"{one.case} · {one.written}")}, LOOKS[one.look]
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    beside |= {"xytext": (6, 0), "va": "center", "annotation_clip": False}
    axes.annotate(one.written, (1, place), color=MUTED, **named, **beside)
    if math.isfinite(one.interval.low):
        ends = [one.interval.low, one.interval.high]
        axes.plot(ends, [place] * 2, color=look["color"], linewidth=1.6, marker="|", markersize=8, **named)
    axes.plot([one.interval.estimate], [place], label=one.name, **named, **mark_look(look, hollow=one.hollow))
