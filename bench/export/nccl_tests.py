"""The all-reduces of a run in the columns of nccl-tests' `all_reduce_perf`, for `bench.predict --network`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export.options import Options
from ddp_bench.bench.findings.wording import CPU_STAND_IN, text
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.results.store import RunData
from ddp_bench.bench.text import visible

FLOAT32_BYTES = 4
"""Of an element: float32 is what the curve is measured with."""

_WHAT = (12, 12, 8, 6, 6)
"""Widths of size, count, type, redop and root."""

_OUT_OF_PLACE, _IN_PLACE = (7, 6, 6, 6), (14, 14, 14, 6)
"""Widths of time, algbw, busbw and #wrong. A run reduces in place alone, as DDP does; the rest is blank."""


def export(run: RunData, options: Options) -> str:
    """Write allreduce.csv of one number of devices as a log of nccl-tests.

    Times and bandwidths have more digits than nccl-tests writes, so that reading them back loses nothing.
    Raises UsageError where the run has no all-reduce by itself, or has several numbers of devices and none
    was chosen.
    """
    measured = run.allreduce.dropna(subset=["time_ms", "busbw_gb_per_s"])
    rows = records(measured[measured["num_devices"] > 1])
    counts = sorted({int(row["num_devices"]) for row in rows})
    chosen = _chosen(run, counts, options.num_devices)
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
    if not counts:
        raise UsageError(
            f"{run.path} has no all-reduce measured by itself; measure a run with --allreduce-curve"
        )
    if asked is None and len(counts) > 1:
        raise UsageError(
            f"{run.path} has all-reduces over {_listed(counts)} devices; a log is of one number, give --gpus "
            f"{counts[0]}"
        )
    if asked is not None and asked not in counts:
        raise UsageError(f"{run.path} has no all-reduce over {asked} devices, but over {_listed(counts)}")
    return counts[0] if asked is None else asked


def _listed(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))


def _heading(what: Sequence[str], out_of_place: Sequence[str], in_place: Sequence[str]) -> str:
    cells = zip((10, *_WHAT[1:], *_OUT_OF_PLACE, *_IN_PLACE), (*what, *out_of_place, *in_place), strict=True)
    return f"# {_row(cells)}".rstrip()


def _line(num_bytes: int, time_ms: float, busbw: float) -> str:
    what = [str(num_bytes), str(num_bytes // FLOAT32_BYTES), "float", "sum", "-1"]
    in_place = [f"{value:.10g}" for value in (1000 * time_ms, num_bytes / time_ms / 1e6, busbw)]
    cells = (*what, *[""] * len(_OUT_OF_PLACE), *in_place, "N/A")
    return _row(zip((*_WHAT, *_OUT_OF_PLACE, *_IN_PLACE), cells, strict=True))


def _row(cells: Iterable[tuple[int, str]]) -> str:
    return "  ".join(f"{cell:>{width}}" for width, cell in cells)
