"""Formats of text: Prometheus' and nccl-tests'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export.measured import Figure, MeasuredCase, filled, having, measured_cases
from ddp_bench.bench.findings.wording import CPU_STAND_IN, text
from ddp_bench.bench.results.schema import EXPORTED, records
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.text import visible

BASE_UNITS = {
    "images/s": ("per_second", 1.0),
    "ms": ("seconds", 1e-3),
    "MiB": ("bytes", 2.0**20),
    "": ("ratio", 1.0),
}
"""Prometheus' units, and how many of them one of ours has."""


def prometheus(run: RunData) -> str:
    """Write a gauge for every metric, and one for each end of its interval, with a sample per case.

    Prometheus' text exposition format 0.0.4, which is valid OpenMetrics 1.0 as well. Samples have no time of
    their own, which node_exporter's textfile collector would refuse; when the run began is a gauge.
    """
    cases = measured_cases(run)
    note = f". {CPU_STAND_IN}" if any(case.note for case in cases) else ""
    lines: list[str] = []
    for column, metric in EXPORTED.items():
        name = metric.label.replace(" ", "_").replace("-", "")
        unit, factor = BASE_UNITS[metric.unit]
        what = metric.brief.capitalize()
        for end, meaning in (
            ("", what),
            ("low", f"{what}: lower end of the 95% interval"),
            ("high", f"{what}: upper end of the 95% interval"),
        ):
            samples = [
                (_series(case, figure), number * factor)
                for case, figure, value in having(cases, column)
                if math.isfinite(number := getattr(value, end or "estimate"))
            ]
            lines += _family("_".join(filter(None, (name, end, unit))), f"{meaning}{note}", samples)
    about = {
        "run_id": run.manifest.run_id,
        "torch": run.manifest.versions.get("torch"),
        "commit": run.manifest.git.commit,
    }
    lines += _family("run_info", "The run that was measured", [(filled(about), 1.0)])
    try:
        began = datetime.fromisoformat(run.manifest.created_utc or "").timestamp()
    except (ValueError, OverflowError):
        pass
    else:
        lines += _family("run_start_time_seconds", "When the run began, since the epoch", [({}, began)])
    return "\n".join([*lines, "# EOF"])


SERIES = (
    *("arch", "mode", "impl", "num_devices", "num_nodes", "device_type", "device_name", "oversubscribed"),
    *("backend", "link", "precision", "scaling", "global_batch"),
)
"""Columns of cases.csv that label a series beside the case's id, so that one can be asked for.

No label changes from run to run: a series goes on."""


def _series(case: MeasuredCase, figure: Figure) -> dict[str, str]:
    known = case.labels
    counted = {"unit": figure.unit.removesuffix("/s")} if figure.unit.endswith("/s") else {}
    return {"case_id": case.case_id, **{name: known[name] for name in SERIES if name in known}, **counted}


def _family(name: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> list[str]:
    name = f"ddp_bench_{name}"
    lines = []
    for labels, value in samples:
        pairs = ",".join(f'{label}="{_escaped(told)}"' for label, told in labels.items())
        lines.append(f"{name}{{{pairs}}} {value:.12g}" if pairs else f"{name} {value:.12g}")
    return [f"# HELP {name} {meaning}.", f"# TYPE {name} gauge", *lines] if lines else []


def _escaped(value: str) -> str:
    return visible(value).replace("\\", r"\\").replace('"', r"\"")


_WHAT = (12, 12, 8, 6, 6)
"""Widths of nccl-tests' columns size, count, type, redop and root."""

_OUT_OF_PLACE, _IN_PLACE = (7, 6, 6, 6), (14, 14, 14, 6)
"""Widths of time, algbw, busbw and #wrong. A run reduces in place alone, as DDP does; the rest is blank."""

_FLOAT32_BYTES = 4
"""Of an element: float32 is what the curve is measured with."""


def nccl_tests(run: RunData, *, gpus: int | None = None) -> str:
    """Write allreduce.csv of one number of devices in the columns of nccl-tests' `all_reduce_perf`.

    Times and bandwidths have more digits than nccl-tests writes, so that reading them back loses nothing.
    Raises UsageError where the run has no all-reduce by itself, or has several numbers of devices and none
    was chosen.
    """
    measured = run.allreduce.dropna(subset=["time_ms", "busbw_gb_per_s"])
    rows = records(measured[measured["num_devices"] > 1])
    chosen = _chosen(run, sorted({int(row["num_devices"]) for row in rows}), gpus)
    known = sorted((row for row in rows if row["num_devices"] == chosen), key=lambda row: int(row["bytes"]))
    backends = ", ".join(filter(None, dict.fromkeys(visible(text(row["backend"])) for row in known)))
    on_cores = (run.cases["device_type"] == "cpu").any()
    average = sum(float(row["busbw_gb_per_s"]) for row in known) / len(known)
    return "\n".join(
        [
            f"# Measured by ddp-bench, not by nccl-tests: all_reduce over {chosen} ranks",
            *([f"# Backend {backends}"] if backends else []),
            *([f"# {CPU_STAND_IN}"] if on_cores else []),
            "#",
            _heading([""] * 5, ["", "out-of-place", "", ""], ["", "in-place", "", ""]),
            _heading(["size", "count", "type", "redop", "root"], *[["time", "algbw", "busbw", "#wrong"]] * 2),
            _heading(["(B)", "(elements)", "", "", ""], *[["(us)", "(GB/s)", "(GB/s)", ""]] * 2),
            *(_line(int(row["bytes"]), float(row["time_ms"]), float(row["busbw_gb_per_s"])) for row in known),
            f"# {'Avg bus bandwidth':<20} : {average:g} ",
            "#",
        ]
    )


def _chosen(run: RunData, counts: list[int], asked: int | None) -> int:
    listed = ", ".join(map(str, counts))
    if not counts:
        raise UsageError(
            f"{run.path} has no all-reduce measured by itself; measure a run with --allreduce-curve"
        )
    if asked is None and len(counts) > 1:
        raise UsageError(
            f"{run.path} has all-reduces over {listed} devices; a log is of one number, give --gpus "
            f"{counts[0]}"
        )
    if asked is not None and asked not in counts:
        raise UsageError(f"{run.path} has no all-reduce over {asked} devices, but over {listed}")
    return counts[0] if asked is None else asked


def _heading(what: Sequence[str], out_of_place: Sequence[str], in_place: Sequence[str]) -> str:
    widths = (10, *_WHAT[1:], *_OUT_OF_PLACE, *_IN_PLACE)
    return f"# {_row(widths, (*what, *out_of_place, *in_place))}".rstrip()


def _line(num_bytes: int, time_ms: float, busbw: float) -> str:
    what = [str(num_bytes), str(num_bytes // _FLOAT32_BYTES), "float", "sum", "-1"]
    in_place = [f"{value:.10g}" for value in (1000 * time_ms, num_bytes / time_ms / 1e6, busbw)]
    return _row((*_WHAT, *_OUT_OF_PLACE, *_IN_PLACE), (*what, *[""] * len(_OUT_OF_PLACE), *in_place, "N/A"))


def _row(widths: Iterable[int], cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:>{width}}" for width, cell in zip(widths, cells, strict=True))
