"""Shows where a step goes: the parts of it in each case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from ..bench.findings.numbers import quantity, with_interval
from ..bench.findings.wording import case_label, setting_names
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import FASTER, SLOWER, Comparison
from ..bench.text import listed
from .cases import WorkloadCases, by_mode, caps_at_headline, headline_count, step_time, unshared
from .drawing import COLOURS, INK, PAPER, WIDTH_PT, Figure, legend, time_axis
from .svg import printable, tag

BACKWARD, EXPOSED, MIXED = "backward", "exposed communication", "backward with communication"
REST = "rest of DP: loss, optimizer, batch"
"""Of a step of DataParallel, beside its own stages."""

_DP_STAGES = {
    "scatter": "dp_scatter_ms",
    "replicate": "dp_replicate_ms",
    "apply (forward)": "dp_apply_ms",
    "gather": "dp_gather_ms",
    "backward": "dp_backward_ms",
    "reduce": "dp_reduce_ms",
}
_PHASES = {"data": "data_ms", "forward": "forward_ms", BACKWARD: "backward_ms", "optimizer": "optimizer_ms"}

LOOKS: dict[str, tuple[str, str]] = {
    "data": ("data", ""),
    "scatter": ("move", "||||"),
    "replicate": ("move", "----"),
    "forward": ("forward", ""),
    "apply (forward)": ("forward", "--"),
    "gather": ("move", "++++"),
    BACKWARD: ("backward", "////"),
    MIXED: ("backward", "xxxx"),
    EXPOSED: ("exposed", "\\\\\\\\"),
    "reduce": ("move", ""),
    "optimizer": ("optimizer", "||||"),
    REST: ("rest", ""),
}
"""Colour and hatch of each part of a step, so that neither has to be told alone; in the legend's order."""

_MANY = 10
_FASTEST_CAPS = 8
_LEAST_VISIBLE = 0.004
"""Of the longest bar; a narrower part is thinner than the outline."""

_BAR_PT, _BAR_ROW_PT, _CHARACTER_PT = 17, 42, 5.7


class Bar(NamedTuple):
    """A case and its step's parts in milliseconds, in the order of the step."""

    case: CaseResult
    parts: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.parts.values())


def breakdown(workload: WorkloadCases, comparisons: Sequence[Comparison], *, key: str) -> Figure | None:
    """Draw a stacked bar per case; None without an anatomy pass.

    Of many cases the usual; of DDP's settings those whose step is known to differ from the default's.
    """
    own, chosen = unshared(workload.cases), _chosen(workload.cases)
    like_default = _not_apart(chosen, comparisons)
    bars = step_bars([case for case in chosen if case not in like_default])
    if not bars:
        return None
    longest = max(bar.total_ms for bar in bars)
    seen = {name for bar in bars for name, ms in bar.parts.items() if ms >= _LEAST_VISIBLE * longest}
    labels = [label for label in LOOKS if label in seen]
    names = list(dict.fromkeys(setting_names(case.changed()) for case in like_default))
    left_out = f" Not drawn, as their step is not known to differ: {listed(names)}." if names else ""

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for place, bar in enumerate(bars):
            step = step_time(bar.case)
            written = quantity(bar.total_ms, "ms", 2) if step is None else with_interval(step, "ms")
            name = printable(f"{case_label(bar.case)}: {written}")
            above: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom"}
            above |= {"gid": tag(case_label(bar.case)), "annotation_clip": False}
            axes.annotate(name, (0, place - _BAR_PT / _BAR_ROW_PT / 2), **above)
            _draw_bar(axes, bar, place, labels, per_pt=longest / (0.9 * WIDTH_PT))
        axes.set_xlim(0, longest)
        axes.set_ylim(len(bars) - 0.3, -0.65)
        axes.set_yticks([])
        time_axis(axes, "time per step (ms)")
        handles = [Patch(label=label, **_fill(label)) for label in labels]
        legend(canvas, handles, _columns(labels), handlelength=1.6)

    how = [
        "Each bar is a timed step: its parts stand in the order of the legend. What is not exposed "
        "communication has the shares of the anatomy pass, whose own values and intervals are in the tables."
    ]
    if EXPOSED in seen:
        how.append("Exposed communication is what synchronising adds to the step; backward is without it.")
    if MIXED in seen:
        how.append(f"“{MIXED}”: what communication adds was not measured there.")
    if REST in seen:
        how.append("Outside apply and backward only device 0 works under DataParallel.")
    if len(chosen) < len(own):
        how.append(
            "Of many cases the usual are drawn: default settings at every device count, and the fastest "
            "bucket caps at the most devices. Steps of several micro-batches are in the tables only."
        )
    if len(own) < len(workload.cases):
        how.append("Cases that share devices are in the tables only.")
    return Figure(
        key=f"{key}-anatomy",
        title="Where a step goes",
        caption=_caption(bars, workload) + left_out,
        how_to_read=" ".join(how),
        height_pt=60 + 15 * -(-len(labels) // _columns(labels)) + _BAR_ROW_PT * len(bars),
        draw=draw,
    )


def step_bars(cases: Iterable[CaseResult]) -> list[Bar]:
    """Divide the steps of cases into parts.

    A bar is as long as the timed step: other steps, fewer of them, tell the shares of what is not exposed.
    """
    return [Bar(case, made) for case in cases if (made := _parts(case))]


def _parts(case: CaseResult) -> dict[str, float]:
    """Return a step's parts; none where the anatomy pass did not measure the case."""
    stages = {name: case.number(column) for name, column in _DP_STAGES.items()}
    phases = {name: case.number(column) for name, column in _PHASES.items()}
    whole_backward, step = phases[BACKWARD], step_time(case)
    exposed = max(case.exposed_comm_ms.estimate, 0.0) if case.exposed_comm_ms else 0.0
    if any(ms is not None for ms in stages.values()):
        known = [ms for ms in phases.values() if ms is not None]
        whole = sum(known) if len(known) == len(phases) else case.number("step_ms")
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


def _not_apart(cases: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> list[CaseResult]:
    """Return DDP cases that were held against another of these, and are neither faster nor slower."""
    ddp = {case.case_id for case in cases if case.mode == "ddp"}
    known = [one for one in comparisons if {one.case_id, one.reference_id} <= ddp]
    like = {one.case_id for one in known if one.answer not in (FASTER, SLOWER)}
    return [case for case in cases if case.case_id in like]


def _chosen(cases: Sequence[CaseResult]) -> Sequence[CaseResult]:
    # A step of several micro-batches is as many times as long, and would flatten all others.
    once = [case for case in cases if (case.number("accumulate") or 1) == 1]
    cases = unshared(once or cases)
    if len(cases) <= _MANY:
        return cases
    rates = {case.case_id: -case.images_per_s.estimate for case in cases if case.images_per_s}
    caps = sorted(caps_at_headline(cases), key=lambda case: rates.get(case.case_id, 0.0))[:_FASTEST_CAPS]
    usual = {case.case_id for mode in ("single", "dp", "ddp") for case in by_mode(cases, mode)}
    usual |= {case.case_id for case in caps}
    return [case for case in cases if case.case_id in usual]


def _draw_bar(axes: Any, bar: Bar, place: int, labels: Iterable[str], *, per_pt: float) -> None:
    left, case = 0.0, case_label(bar.case)
    for name, ms in bar.parts.items():
        if name not in labels:
            continue
        named = {"gid": tag(f"{case} · {name} {quantity(ms, 'ms', 2)}", name)}
        where = {"y": place, "width": ms, "left": left, "height": _BAR_PT / _BAR_ROW_PT, **named}
        axes.barh(**where, **_fill(name))
        axes.barh(**where, color="none", edgecolor=INK, linewidth=0.7)
        written = quantity(ms, "ms", 2)
        if ms > per_pt * (_CHARACTER_PT * len(written) + 6):
            box = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"}
            middle = {"ha": "center", "va": "center_baseline", "fontsize": 10}
            axes.text(left + ms / 2, place, written, bbox=box, **middle, **named)
        left += ms


def _fill(label: str) -> dict[str, Any]:
    # A hatch takes the colour of the edge; the outline is drawn by itself.
    colour, hatch = LOOKS[label]
    return {"facecolor": COLOURS[colour], "hatch": hatch, "edgecolor": PAPER, "linewidth": 0}


def _columns(labels: Sequence[str]) -> int:
    return 2 if any(len(label) > 24 for label in labels) else 3


def _caption(bars: Sequence[Bar], workload: WorkloadCases) -> str:
    """Describe the first DDP case at the most devices; without DDP what there is."""
    ddp = [case for case in workload.cases if case.mode == "ddp"]
    at = headline_count(ddp) or headline_count(workload.cases)
    there = [bar for bar in bars if bar.case.num_devices == at] or list(bars)
    firsts = {bar.case.mode: bar for bar in reversed(there)}
    bar = next(firsts[mode] for mode in ("ddp", "dp", "single") if mode in firsts)
    largest = max(bar.parts, key=lambda name: bar.parts[name])
    exposed, alone = bar.case.exposed_comm_ms, with_interval(bar.case.interval("dp_device0_pct"), "%")
    said = [f"{largest} takes most, {_share(bar.parts[largest], bar)}"] if largest != EXPOSED else []
    if exposed is not None:
        share = _share(exposed.estimate, bar) if exposed.low > 0 else "below the noise"
        said.append(f"{EXPOSED} {with_interval(exposed, 'ms')}, {share}")
    said += [f"only device 0 works during {alone} of it"] if alone else []
    return f"{case_label(bar.case)}: {'; '.join(said)}."


def _share(ms: float, bar: Bar) -> str:
    return f"{quantity(100 * ms / bar.total_ms, '%', 2)} of the step"
