"""Answers whether the efficiency of a run is what others reach on the same GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from ..common.cli import format_command
from ..common.numbers import TIMES, format_interval, format_percent
from ..results.published import Scaling, list_scalings, name_gpu_model
from ..results.store import RunData
from .verdicts import PUBLISHED, RESOLVED, Verdict
from .wording import name_model


def answer_published(run: RunData) -> Verdict | None:
    """Compare the largest number of GPUs that others measured alike; None where they measured none."""
    for ours in sorted(list_scalings(run), key=lambda one: -one.case.num_devices):
        if alike := [one for one in run.published if one.can_compare(ours)]:
            return _compare(ours, alike, run.manifest.margin)
    return None


def _compare(ours: Scaling, others: Sequence[Scaling], margin: float) -> Verdict:
    """Place the efficiency below, within or above what `others` reached, the `margin` beside it."""
    is_below = ours.efficiency.high * (1 + margin) < min(one.efficiency.low for one in others)
    is_above = ours.efficiency.low > (1 + margin) * max(one.efficiency.high for one in others)
    relation = "below" if is_below else "above" if is_above else ""
    label = f"{relation} what is published" if relation else "as published"
    reached = sorted(one.efficiency.estimate for one in others)
    shown = " to ".join(dict.fromkeys(map(format_percent, (reached[0], reached[-1]))))
    case, precisions = ours.case, (one.case.precision for one in others)
    names = (*(one.source for one in others), name_model(case.arch), *precisions)
    where = f"{case.num_devices} {TIMES} {name_gpu_model(case.device_name)}"
    where += f" of {case.num_nodes} hosts" if case.num_nodes > 1 else ""
    reads = (
        f"{format_command('doctor')} checks links, clocks, power limits and other programs of this machine"
    )
    return Verdict(
        question=PUBLISHED,
        answer=RESOLVED,
        heading="Published efficiency",
        in_words=label,
        text=f"DDP reaches an efficiency of {format_interval(ours.efficiency, '%', 100, digits=2)} "
        f"on {where}, {label}: {shown} ({', '.join(dict.fromkeys(names))})",
        notes=(reads,) if is_below else (),
    )
