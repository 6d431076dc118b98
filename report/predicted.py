"""Shows predictions beside what was measured: scaling on hardware that was not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from ..bench.common.cli import format_command
from ..bench.common.numbers import format_count, format_interval
from ..bench.findings.wording import format_cap, name_device, name_link
from ..bench.page.charts import Line, Mark, draw_over_devices
from ..bench.page.drawing import LOOKS, MANY_LOOKS
from ..bench.page.page import Figure, Section
from ..bench.plan.case_settings import DDP_DEFAULTS
from ..bench.predict.calibration import list_differences
from ..bench.predict.output import Predictions
from ..bench.predict.prediction import Prediction
from ..bench.predict.runs import describe_identity, list_ddp_cases
from ..bench.results.case_result import CaseResult
from ..bench.results.store import RunData
from .charts import make_marks


def make_prediction_section(run: RunData, predictions: Predictions) -> Section:
    """Show `predictions` beside the cases of `run`."""
    lines = predictions.group_lines()
    notes = [
        f"Predicted by {format_command('predict')}, not measured: a simulation of one step, fed "
        f"by a calibration.",
        *(f"On {of}: {said}" for of, said in predictions.describe_scaling()),
    ]
    if len(lines) > len(MANY_LOOKS):
        notes.append(f"Of {len(lines)} lines the first {len(MANY_LOOKS)} are drawn.")
    unlike = [
        list_differences(predictions.identity, describe_identity(run, case)) for case in list_ddp_cases(run)
    ]
    if unlike and all(unlike):
        notes.append(f"The calibration is not of this run: {min(map('; '.join, unlike), key=len)}.")
    figures, tables = [], predictions.make_tables()
    if lines:
        figures = [_draw_figure(run, predictions, lines[: len(MANY_LOOKS)])]
        tables[0] = replace(tables[0], below=predictions.notes)
    else:
        notes += predictions.notes
    return Section("predicted", "On hardware you do not have", notes, figures, tables)


def _draw_figure(run: RunData, predictions: Predictions, lines: Sequence[Sequence[Prediction]]) -> Figure:
    """Draw efficiency against devices, a line for each network and bucket cap."""
    device, link = name_device(predictions.identity.device_type), predictions.identity.link
    first = lines[0][0]
    several_caps = len({line[0].bucket_cap_mb for line in lines}) > 1
    drawn = [
        Line(
            line[0].network + (f", bucket cap {format_cap(line[0].bucket_cap_mb)}" if several_caps else ""),
            look,
            tuple(map(_make_mark, line)),
            band=True,
        )
        for line, look in zip(lines, MANY_LOOKS, strict=False)
    ]
    said = "; ".join(f"{line.label} {line.marks[-1].written}" for line in drawn)
    most = drawn[0].marks[-1].x
    if measured := make_marks(_find_measured(run, predictions, first), "efficiency", _percent, 100.0):
        name = f"measured, {name_link(link)}" if link else "measured"
        drawn.append(Line(name, LOOKS["single"] | {"linestyle": ""}, measured))
    return draw_over_devices(
        drawn,
        ideal={1.0: 100.0, most: 100.0},
        log="x",
        key="predicted-efficiency",
        title="Predicted efficiency",
        x_label=f"devices ({device}s), {first.scaling} scaling",
        y_label="efficiency (%)",
        caption=f"Predicted on {format_count(most, device)}: {said}.",
        note="Areas are 95% intervals: where one is wide, little is known. Diamonds were measured in this "
        "run, over its own network.",
        terms=("Efficiency",),
    )


_percent = partial(format_interval, unit="%")


def _make_mark(p: Prediction) -> Mark:
    share = p.efficiency.scale(100)
    return Mark(x=p.num_devices, **asdict(share), written=_percent(share))


def _find_measured(run: RunData, predictions: Predictions, p: Prediction) -> list[CaseResult]:
    """Return the run's own cases of what `p` predicts, possibly on another network."""
    asked = {name: getattr(p, name) for name in ("bucket_cap_mb", "comm_hook", "accumulate")}
    usual = CaseResult.from_row({**DDP_DEFAULTS, **asked})

    # Under strong scaling the batch is another at every count, and lines tell theirs.
    wanted = replace(predictions.identity, batch_per_device=1)
    found = [
        case
        for case in list_ddp_cases(run)
        if not list_differences(replace(describe_identity(run, case), batch_per_device=1), wanted)
        and (case.scaling, case.batch or 0) == (p.scaling, p.batch_size)
        and not case.list_changed(usual)
    ]
    return sorted(found, key=lambda case: case.num_devices)
