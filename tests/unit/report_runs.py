"""Small runs made by hand: round numbers, so that what the page shows can be checked by eye."""

from pathlib import Path
from typing import NamedTuple

from made import block, compared, made_manifest, times_of

from ddp_bench.bench.plan.case_settings import DDP_DEFAULTS, STEP_DEFAULTS
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.case_result import CaseResult
from ddp_bench.bench.results.columns import ALLREDUCE, BLOCKS, BUCKETS, COMPARISONS, make_frame
from ddp_bench.bench.results.comparisons import compute_speedup_over_default
from ddp_bench.bench.results.store import RunData


def case(mode, num_devices, images_per_s=None, **more):
    """A case of 10 images per device; a rate makes it `ok`, with an interval of 1% either way."""
    row = {
        "case_id": f"{mode}-n{num_devices}-{more.get('bucket_cap_mb', 'x')}-{more.get('accumulate', 1)}",
        "status": "ok",
        "mode": mode,
        "impl": "torch",
        "device_type": "cuda",
        "device_name": "Test GPU",
        "num_devices": num_devices,
        "num_nodes": 1,
        "oversubscribed": False,
        "arch": "resnet50",
        "image_size": 224,
        "batch_per_device": 10,
        "global_batch": 10 * num_devices,
        "unit": "images",
        "units_per_sample": 1,
        "scaling": "weak",
        "precision": "fp32",
        **STEP_DEFAULTS,
        "data": "device",
        **(DDP_DEFAULTS if mode == "ddp" else {}),
    }
    if images_per_s is not None:
        row["num_rounds"] = 2
        for name, value in (
            ("images_per_s", images_per_s),
            ("speedup", images_per_s / 100),
            ("efficiency", images_per_s / 100 / num_devices),
        ):
            row |= {name: value, f"{name}_low": 0.99 * value, f"{name}_high": 1.01 * value}
    return row | more


def blocks(cases):
    """Two rounds of one timed step, on every rank, for every case that has a rate."""
    return [
        timed(row, round_index, 1000 * row["global_batch"] / row["images_per_s"], rank=rank)
        for row in cases
        if row.get("images_per_s")
        for round_index in (1, 2)
        for rank in range(row["num_devices"] if row["mode"] == "ddp" else 1)
    ]


def timed(row, round_index, *steps_ms, rank=0, **more):
    """A timed block of the given steps."""
    steps = {"block_ms": sum(steps_ms), "steps_ms": " ".join(map(str, steps_ms))}
    made = block(row["case_id"], round_index, 0.0, rank=rank, steps=len(steps_ms), host="h")
    return made | steps | more


class Drawn(NamedTuple):
    """A mark as matplotlib drew it; its interval is None where none was drawn."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


def canvas_of(figure):
    """What Matplotlib draws of a figure."""
    from matplotlib.figure import Figure as Canvas

    from ddp_bench.bench.page.drawing import set_look

    with set_look("test"):
        canvas = Canvas()
        figure.draw(canvas)
    return canvas


def drawn(figure):
    """The lines of a chart by their names."""
    (axes,) = canvas_of(figure).axes
    lines, bar = {}, {}
    for line in axes.lines:
        label, at, values = str(line.get_label()), [*line.get_xdata()], [*line.get_ydata()]
        if line.get_marker() == "_":
            bar = {at[0]: values}
        elif not label.startswith("_"):  # marks take the place of the line through them
            marks = [Drawn(x, y, *bar.pop(x, ())) for x, y in zip(at, values, strict=True)]
            known = lines.setdefault(label, {})
            known |= {mark.x: mark for mark in marks}
    return {label: [*marks.values()] for label, marks in lines.items()}


def dashed(written):
    """Return text with an en dash for `--`, as intervals have it."""
    return written.replace("--", "\N{EN DASH}")


def measured(**values):
    """Columns with an interval of 1% either way."""
    return {
        f"{name}{end}": factor * value
        for name, value in values.items()
        for end, factor in (("", 1.0), ("_low", 0.99), ("_high", 1.01))
    }


def run(cases, manifest=None, *, path="runs/by-hand", timed_blocks=None):
    told = made_manifest(**manifest or {})
    frame = make_frame(blocks(cases) if timed_blocks is None else timed_blocks, BLOCKS)
    comparisons = compared(make_frame(cases, CASES), times_of(frame), told.margin)
    ratios = compute_speedup_over_default(comparisons, map(CaseResult.from_row, cases))
    rows = [
        {**ratios[row["case_id"]].to_columns("vs_ddp_default"), **row} if row["case_id"] in ratios else row
        for row in cases
    ]
    return RunData(
        path=Path(path),
        manifest=told,
        cases=make_frame(rows, CASES),
        blocks=frame,
        buckets=make_frame([], BUCKETS),
        allreduce=make_frame([], ALLREDUCE),
        comparisons=make_frame([one.to_row() for one in comparisons], COMPARISONS),
    )


def usual_cases():
    """Two GPUs in the machine, four asked for; single runs at 100 images/s."""
    return [
        case("single", 1, 100.0),
        case("dp", 1, status="skipped", reason="DataParallel on one device is the plain module"),
        case("dp", 2, 150.0),
        case("dp", 4, 160.0, oversubscribed=True),
        case("ddp", 1, 98.0, num_buckets=3),
        case("ddp", 2, 180.0, num_buckets=3, bucket_bytes="1048576/2097152/10485760"),
        case("ddp", 2, 160.0, bucket_cap_mb="1", num_buckets=12),
        case("ddp", 2, 200.0, bucket_cap_mb="25", num_buckets=2),
        case("ddp", 4, 240.0, oversubscribed=True, num_buckets=3),
        case("ddp", 4, None, bucket_cap_mb="25", status="failed", reason="rank 3 died: exit code 9"),
    ]


PHASES = {"data_ms": 1.0, "forward_ms": 30.0, "backward_ms": 60.0, "optimizer_ms": 9.0}
COMMUNICATION = {"comm_ms": 40.0, "exposed_comm_ms": 20.0, "hidden_pct": 50.0, "no_sync_step_ms": 80.0}


def communicating(num_devices, images_per_s, **more):
    """A DDP case with an anatomy pass and measured communication; a step of 100 ms in parts."""
    columns = measured(**PHASES, **COMMUNICATION, step_ms=10_000 * num_devices / images_per_s)
    return case("ddp", num_devices, images_per_s, **columns, **{"num_buckets": 3, **more})


def paper_like():
    """The shape of the DDP paper's sweep: caps and accumulation varied one at a time on two GPUs."""
    cases = [
        case("single", 1, 100.0, gradient_error=1e-7, update_error=1e-6, **measured(**PHASES)),
        case("ddp", 1, 98.0, num_buckets=3),
        communicating(2, 200.0, num_buckets=2, bucket_bytes="1048576/3145728"),
        communicating(2, 125.0, bucket_cap_mb="0", num_buckets=60),
        communicating(2, 160.0, bucket_cap_mb="100", num_buckets=1, bucket_bytes="4194304"),
        communicating(2, 220.0, accumulate=2, global_batch=40),
        communicating(2, 240.0, accumulate=8, global_batch=160),
    ]
    return run(cases, {"settings": {"sweep": "star"}, "model": {"gradient_bytes": 46_758_048}})
