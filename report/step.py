"""Shows where a step goes: the parts of it in each case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..bench.common.numbers import format_interval, format_quantity
from ..bench.findings.communication import estimate_contention, estimate_saved_by_overlap
from ..bench.findings.watched import BUFFERS, COLLECTIVES, WAITING
from ..bench.findings.wording import label_case
from ..bench.page.drawing import (
    COLOURS,
    INK,
    PAPER,
    WIDTH_PT,
    draw_legend,
    drop_unprintable,
    make_tag,
    read_across,
)
from ..bench.page.page import Figure
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import FASTER, SLOWER, Comparison, select_unshared
from ..bench.results.store import RunData
from .cases import WorkloadCases, find_headline_count, select_mode

BACKWARD, EXPOSED, MIXED = "backward", "exposed communication", "backward with communication"
ALONE = "communication by itself"
REST = "rest of DP: loss, optimizer, batch"
"""Part of a step of DataParallel, beside its own stages."""

_DP_STAGES = {
    "scatter": "dp_scatter_ms",
    "replicate": "dp_replicate_ms",
    "apply (forward)": "dp_apply_ms",
    "gather": "dp_gather_ms",
    "backward": "dp_backward_ms",
    "reduce": "dp_reduce_ms",
}
_PHASES = {"data": "data_ms", "forward": "forward_ms", BACKWARD: "backward_ms", "optimizer": "optimizer_ms"}

_LOOKS: dict[str, tuple[str, str]] = {
    "data": ("data", ""),
    "scatter": ("move", "||||"),
    "replicate": ("move", "----"),
    "forward": ("forward", ""),
    "apply (forward)": ("forward", "--"),
    "gather": ("move", "++++"),
    BACKWARD: ("backward", "////"),
    MIXED: ("backward", "xxxx"),
    WAITING: ("exposed", "////"),
    EXPOSED: ("exposed", "\\\\\\\\"),
    ALONE: ("exposed", "++"),
    "reduce": ("move", ""),
    BUFFERS: ("move", "xx"),
    COLLECTIVES: ("exposed", "oo"),
    "optimizer": ("optimizer", "||||"),
    "evaluation": ("forward", "xx"),
    "other": ("rest", "--"),
    REST: ("rest", ""),
}
"""Colour and hatch of each part of a step, so that neither has to be told alone; in the legend's order."""

_TERMS = {EXPOSED: "Exposed", REST: "Only device 0 works"}
_MAX_BARS = 10
_MIN_VISIBLE = 0.004
"""Least share of the longest bar; a narrower part is thinner than the outline."""

_BAR_PT, _BAR_ROW_PT, _CHARACTER_PT = 17, 42, 5.7


class Bar(NamedTuple):
    """A step as a bar: its name, its length as it is written, and milliseconds by part in their order."""

    name: str
    whole: str
    parts: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.parts.values())


def draw_breakdown(
    workload: WorkloadCases, comparisons: Sequence[Comparison], run: RunData, *, key: str
) -> Figure | None:
    """Draw a stacked bar per case; None without an anatomy pass.

    Of DDP at several settings the usual, and those whose step is known to differ from its reference's.
    """
    # A step of several micro-batches is as many times as long, and would flatten all others.
    once = [case for case in workload.cases if (case.get_number("accumulate") or 1) == 1]
    cases = [case for case in select_unshared(once or workload.cases) if not case.is_stand_in]
    ddp = {case.case_id for case in cases if case.mode == "ddp"}
    differing = {
        one.case_id for one in comparisons if one.reference_id in ddp and one.answer in (FASTER, SLOWER)
    }
    unlike = ddp - differing - {case.case_id for case in select_mode(cases, "ddp")}
    every = [(case, parts) for case in cases if (parts := get_step_parts(case))]
    shown = [(case, parts) for case, parts in every if case.case_id not in unlike][:_MAX_BARS]
    if not shown:
        return None
    bars = []
    for case, parts in shown:
        whole = format_interval(case.step_ms, "ms") or format_quantity(sum(parts.values()), "ms", 3)
        bars.append(Bar(label_case(case), whole, parts))
    at = find_headline_count([case for case in workload.cases if case.mode == "ddp"])
    headline = (i for i, (case, _) in enumerate(shown) if case.mode == "ddp" and case.num_devices == at)
    place = next(headline, len(shown) - 1)
    case, first = shown[place][0], bars[place]
    if (without := _remove_overlap(case, first, run)) is not None:
        bars.insert(place + 1, without)
    longest = max(bar.total_ms for bar in bars)
    seen = {name for bar in bars for name, ms in bar.parts.items() if ms >= _MIN_VISIBLE * longest}
    notes = [
        "Shares of parts that are not communication are of the anatomy pass, scaled to the timed step.",
        f"“{MIXED}”: what communication adds was not measured there." if MIXED in seen else "",
        "“Without overlap” is computed: the step under no_sync plus communication by itself."
        if without
        else "",
        "Settings that are not significantly different from the default are in the tables only."
        if len(shown) < len(every)
        else "",
    ]
    return draw_bars(
        bars,
        [label for label in _LOOKS if label in seen],
        key=f"{key}-anatomy",
        title="Where a step goes",
        caption=_write_caption(case, first, without, run),
        note=" ".join(filter(None, notes)),
        terms=tuple(term for part, term in _TERMS.items() if part in seen),
    )


def get_step_parts(case: CaseResult) -> dict[str, float]:
    """Return a step's parts in ms; none where the anatomy pass did not measure the case.

    They are as long as the timed step: other steps, fewer of them, tell the shares of what is not exposed.
    """
    stages = {name: case.get_number(column) for name, column in _DP_STAGES.items()}
    phases = {name: case.get_number(column) for name, column in _PHASES.items()}
    whole_backward, step = phases[BACKWARD], case.step_ms
    exposed = max(case.exposed_comm_ms.estimate, 0.0) if case.exposed_comm_ms else 0.0
    if any(ms is not None for ms in stages.values()):
        known = [ms for ms in phases.values() if ms is not None]
        whole = sum(known) if len(known) == len(phases) else case.get_number("step_ms")
        measured = sum(ms for ms in stages.values() if ms is not None)
        parts, exposed = stages | {REST: None if whole is None else whole - measured}, 0.0
    elif phases["forward"] is None or whole_backward is None:
        return {}
    else:
        unknown = case.mode == "ddp" and case.num_devices != 1 and case.exposed_comm_ms is None
        parts = {
            "data": phases["data"],
            "forward": phases["forward"],
            MIXED if unknown else BACKWARD: max(whole_backward - exposed, 0.0),
            EXPOSED: exposed,
            "optimizer": phases["optimizer"],
        }
    found = {name: ms for name, ms in parts.items() if ms is not None and ms > 0}
    others = sum(found.values()) - exposed
    if step is None or not others > 0 or not step.estimate > exposed:
        return found
    factor = (step.estimate - exposed) / others
    return {name: ms if name == EXPOSED else ms * factor for name, ms in found.items()}


def _remove_overlap(case: CaseResult, bar: Bar, run: RunData) -> Bar | None:
    """Make the bar of the same step if nothing overlapped, of what was measured apart; None without it."""
    alone, local = case.comm_ms, case.get_interval("no_sync_step_ms")
    if case.hidden_pct is None or alone is None or local is None or BACKWARD not in bar.parts:
        return None
    factor = local.estimate / (bar.total_ms - bar.parts.get(EXPOSED, 0.0))
    parts = {name: ms * factor for name, ms in bar.parts.items()} | {ALONE: alone.estimate}
    in_order = {name: parts[name] for name in _LOOKS if name in parts and name != EXPOSED}
    columns = [(case.case_id, phase) for phase in ("no_sync", "comm")]
    whole = run.typical.estimate_total(dict.fromkeys(columns, 1.0)).compute_interval()
    computed = replace(whole, estimate=sum(in_order.values()))
    return Bar(f"{bar.name}, without overlap", format_interval(computed, "ms"), in_order)


def draw_bars(bars: Sequence[Bar], labels: Sequence[str], **words: Any) -> Figure:
    """Draw steps of cases or ranks as stacked bars of the parts in `labels`; `words` are a figure's."""
    longest = max(bar.total_ms for bar in bars)

    def draw(canvas: Any) -> None:
        from matplotlib.patches import Patch

        axes = canvas.subplots()
        for place, bar in enumerate(bars):
            above: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom"}
            above |= {"gid": make_tag(bar.name), "annotation_clip": False}
            top = place - _BAR_PT / _BAR_ROW_PT / 2
            axes.annotate(drop_unprintable(f"{bar.name}: {bar.whole}"), (0, top), **above)
            _draw_bar(axes, bar, place, labels, per_pt=longest / (0.9 * WIDTH_PT))
        axes.set_xlim(0, longest)
        axes.set_ylim(len(bars) - 0.3, -0.65)
        axes.set_yticks([])
        read_across(axes, "time per step (ms)")
        draw_legend(canvas, [Patch(label=label, **_fill(label)) for label in labels], handlelength=1.6)

    height_pt = 60 + 15 * -(-len(labels) // 2) + _BAR_ROW_PT * len(bars)
    return Figure(height_pt=height_pt, draw=draw, **words)


def _draw_bar(axes: Any, bar: Bar, place: int, labels: Sequence[str], *, per_pt: float) -> None:
    left = 0.0
    for name, ms in bar.parts.items():
        if name not in labels:
            continue
        written = format_quantity(ms, "ms", 2)
        named = {"gid": make_tag(f"{bar.name} · {name} {written}", name)}
        if ms <= per_pt * (_CHARACTER_PT * len(written) + 6):
            written = written.removesuffix(" ms")  # which the axis says
        where = {"y": place, "width": ms, "left": left, "height": _BAR_PT / _BAR_ROW_PT, **named}
        axes.barh(**where, **_fill(name))
        axes.barh(**where, color="none", edgecolor=INK, linewidth=0.7)
        if ms > per_pt * (_CHARACTER_PT * len(written) + 6):
            box = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"}
            middle = {"ha": "center", "va": "center_baseline", "fontsize": 10}
            axes.text(left + ms / 2, place, written, bbox=box, **middle, **named)
        left += ms


def _fill(label: str) -> dict[str, Any]:
    # A hatch takes the colour of the edge; the outline is drawn by itself.
    colour, hatch = _LOOKS[label]
    return {"facecolor": COLOURS[colour], "hatch": hatch, "edgecolor": PAPER, "linewidth": 0}


def _write_caption(case: CaseResult, bar: Bar, without: Bar | None, run: RunData) -> str:
    """Say which part of a bar takes most, and how it compares with the same step `without` overlap."""
    exposed, alone = case.exposed_comm_ms, format_interval(case.get_interval("dp_device0_pct"), "%")
    largest = max(bar.parts, key=lambda name: bar.parts[name])
    name, ms = (largest, bar.parts[largest]) if exposed is None else (EXPOSED, exposed.estimate)
    below = exposed is not None and not exposed.low > 0
    part = "below the noise" if below else f"{format_quantity(100 * ms / bar.total_ms, '%', 2)} of the step"
    if exposed is not None and math.isnan(exposed.low):
        part = "too few rounds to tell"
    said = f" Only device 0 works during {alone} of it." if alone else ""
    written = format_interval(exposed, "ms") or format_quantity(ms, "ms", 2)
    hidden, contention = case.hidden_pct, estimate_contention(case, run.typical)
    if without and (below or hidden is None or not hidden.is_clear_of(0.0)):
        said += " Whether overlap saves time is not known in this run."
    elif without and contention:
        share = estimate_saved_by_overlap(case, run.typical, contention)
        if contention.estimate > 0:
            longer = f"{format_interval(contention, 'ms')} longer, {format_interval(share.negate(), '%')}"
            said += f" Overlap does not shorten it: contention, waiting and copies make it {longer},"
            said += f" than computing and communication take one after the other, {without.whole} (computed)."
        else:
            saved = f"{format_interval(contention.negate(), 'ms')}, {format_interval(share, '%')} of that"
            said += f" Without overlap it would take {without.whole} (computed): overlap saves {saved}."
    return f"{bar.name}: {name} {written}, {part}.{said}"
