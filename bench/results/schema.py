"""The columns of every results file: one definition for the writer, the reader and the documentation.

`python -m bench.results.schema --write` puts the tables of columns into `results/README.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bench.settings import DDP_SETTINGS

SCHEMA_VERSION = 1
"""Of the files as a whole; a folder of a later one is refused."""

STATUSES = ("ok", "skipped", "oom", "failed", "timeout")
"""Every planned case ends in exactly one of these."""

PHASES = ("warmup", "timed", "no_sync", "comm", "anatomy", "trace", "calibration")
"""What a block measured; only `timed` blocks make throughput."""


@dataclass(frozen=True)
class Column:
    """One column of a results file; `kind` is `text`, `int`, `float` or `bool`."""

    name: str
    kind: str
    meaning: str


def _interval(name: str, meaning: str) -> tuple[Column, Column, Column]:
    return (
        Column(name, "float", meaning),
        Column(f"{name}_low", "float", f"lower end of the 95% interval of `{name}`"),
        Column(f"{name}_high", "float", f"upper end of the 95% interval of `{name}`"),
    )


def _setting(setting: Field[Any]) -> Column:
    kind = {bool: "bool", int: "int"}.get(type(setting.default), "text")
    return Column(setting.name, kind, setting.metadata["column"])


IDENTITY: tuple[Column, ...] = (
    Column("case_id", "text", "readable name of the case plus a hash of every setting that defines it"),
    Column("status", "text", "`ok`, `skipped`, `oom`, `failed` or `timeout`"),
    Column("reason", "text", "why the status is not `ok`; empty otherwise"),
    Column("mode", "text", "`single`, `dp` (nn.DataParallel) or `ddp` (DistributedDataParallel)"),
    Column("impl", "text", "`torch`, or `cpu_standin` where DP's stages ran on CPU cores"),
    Column("device_type", "text", "`cuda` or `cpu`; on `cpu` a device is one core"),
    Column("device_name", "text", "GPU or CPU model of rank 0"),
    Column("backend", "text", "process-group backend of the gradients, `nccl` or `gloo`; empty without one"),
    Column("num_devices", "int", "devices the case trains on (DDP: world size)"),
    Column("num_nodes", "int", "machines those devices are on"),
    Column("link", "text", "rate of the link between the hosts of a lab; empty on a real network"),
    Column("oversubscribed", "bool", "more devices than physical ones on a machine: shared cores or GPUs"),
    Column("arch", "text", "model architecture, or the user's workload"),
    Column("image_size", "int", "height and width of an image, in pixels"),
    Column("batch_per_device", "int", "images per device and micro-batch"),
    Column("global_batch", "int", "images per optimizer step over all devices"),
    Column("scaling", "text", "`weak` fixes the batch per device, `strong` the global batch"),
    Column("precision", "text", "`fp32`, `tf32`, `bf16` or `fp16` (the last two under autocast)"),
    Column("data", "text", "`device`, `host`, or the folder the images come from"),
    *(_setting(setting) for setting in DDP_SETTINGS),
)
"""What a case is: known before it is measured, equal when it is measured again."""

MEASURED: tuple[Column, ...] = (
    Column("num_buckets", "int", "DDP buckets after the rebuild"),
    Column("bucket_bytes", "text", "bytes of each bucket in all-reduce order, `/`-separated"),
    *_interval("images_per_s", "median over rounds of global batch x steps / longest rank's block time"),
    Column("step_ms_p50", "float", "median step time, all ranks and timed steps"),
    Column("step_ms_p75", "float", "75th percentile of the step time"),
    Column("step_ms_p95", "float", "95th percentile of the step time"),
    *_interval("speedup", "throughput over that of `single` in the same round, median over rounds"),
    *_interval("efficiency", "speed-up / number of devices"),
    *_interval("forward_ms", "forward and loss per step, from the anatomy pass"),
    *_interval("backward_ms", "backward per step, from the anatomy pass; includes exposed communication"),
    *_interval("optimizer_ms", "optimizer step and `zero_grad`, from the anatomy pass"),
    *_interval("data_ms", "fetching the batch, from the anatomy pass"),
    *_interval("comm_ms", "all-reduce of the recorded bucket sizes back to back, no compute, per step"),
    *_interval("no_sync_step_ms", "step time of the same case under `no_sync`: the compute"),
    *_interval("exposed_comm_ms", "step minus step under `no_sync`, same round: time communication adds"),
    *_interval("hidden_pct", "100 x (1 - exposed / comm), clamped to 0-100"),
    *_interval("overlap_trace_pct", "time both compute and communication run / communication, trace"),
    *_interval("overlap_window_pct", "DDP logger: its communication window inside the backward"),
    *_interval("compute_slowdown", "time to the last gradient beside communication / without it"),
    *_interval("anatomy_slowdown_pct", "how much slower the instrumented step is than the timed one"),
    Column(
        "peak_mem_mib", "float", "most GPU memory in use by this case's tensors, worst rank; empty on a CPU"
    ),
    *_interval("rank_skew_ms", "slowest minus fastest rank's own work per step (under `no_sync`)"),
    Column("slowest_rank", "int", "the rank whose own work most often took longest: the one others wait for"),
    *_interval("dp_scatter_ms", "DP: splitting the batch over the devices"),
    *_interval("dp_replicate_ms", "DP: copying the model to every device"),
    *_interval("dp_apply_ms", "DP: the replicas' forward"),
    *_interval("dp_gather_ms", "DP: collecting the outputs on device 0"),
    *_interval("dp_backward_ms", "DP: the replicas' backward (on GPUs with the reduction)"),
    *_interval("dp_reduce_ms", "DP: adding the replicas' gradients on device 0 (empty on GPUs)"),
    *_interval("dp_device0_pct", "DP: share of the step in which only device 0 works"),
    Column("num_rounds", "int", "rounds with a timed block of this case"),
)

CASES: tuple[Column, ...] = IDENTITY + MEASURED

BLOCKS: tuple[Column, ...] = (
    Column("case_id", "text", "the case, as in cases.csv"),
    Column("phase", "text", "`warmup`, `timed`, `no_sync`, `comm`, `anatomy`, `trace` or `calibration`"),
    Column("round", "int", "1, 2, ...; 0 for warm-up before the first round"),
    Column("position", "int", "place of the block in its round's random order, from 0"),
    Column("rank", "int", "global rank that took the times"),
    Column("host", "text", "host of the rank"),
    Column("started_s", "float", "start, in seconds since the run began"),
    Column("num_steps", "int", "steps in the block"),
    Column("block_ms", "float", "duration of the block on this rank"),
    Column("steps_ms", "text", "each step's duration, space-separated"),
    Column("detail", "text", "JSON: further durations of this phase, in ms per step"),
)

BUCKETS: tuple[Column, ...] = (
    Column("case_id", "text", "the case, as in cases.csv"),
    Column("rank", "int", "global rank"),
    Column("bucket", "int", "index in all-reduce order, from 0"),
    Column("bytes", "int", "gradient bytes in the bucket"),
    Column("num_params", "int", "parameters in the bucket"),
    Column("ready_ms", "float", "last gradient ready, since the start of the backward, median over steps"),
    Column(
        "launch_ms", "float", "all-reduce launched: DDP does so once this bucket and all before it are ready"
    ),
    Column("start_ms", "float", "all-reduce taken up by gloo or NCCL, from the trace, median over steps"),
    Column("done_ms", "float", "all-reduce done, from the trace, median over steps"),
)

ALLREDUCE: tuple[Column, ...] = (
    Column("num_devices", "int", "ranks of the all-reduce"),
    Column("backend", "text", "`nccl` or `gloo`"),
    Column("bytes", "int", "message size"),
    *_interval(
        "time_ms",
        "an all-reduce of that size, longest rank, median over repetitions, each of up to 8 in a row",
    ),
    Column("busbw_gb_per_s", "float", "bus bandwidth, bytes / time x 2 (n - 1) / n, in 10^9 bytes/s"),
    Column("num_samples", "int", "repetitions"),
)

FILES: dict[str, tuple[Column, ...]] = {
    "cases.csv": CASES,
    "blocks.csv": BLOCKS,
    "buckets.csv": BUCKETS,
    "allreduce.csv": ALLREDUCE,
}

README = Path(__file__).resolve().parents[2] / "results" / "README.md"
"""Explains the files to people."""

_DTYPES = {"text": "string", "int": "Int64", "float": "float64", "bool": "boolean"}


def typed_frame(rows: Iterable[Mapping[str, Any]], columns: tuple[Column, ...]) -> pd.DataFrame:
    """Rows as a frame with the schema's columns and types; absent values become NA."""
    rows = list(rows)
    data = {c.name: pd.Series([row.get(c.name) for row in rows], dtype=_DTYPES[c.kind]) for c in columns}
    return pd.DataFrame(data)


def columns_table(columns: Iterable[Column]) -> str:
    """The columns of a file as a Markdown table."""
    rows = [f"| `{c.name}` | {c.kind} | {c.meaning} |" for c in columns]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows])


def with_tables(page: str) -> str:
    """A Markdown page with every file's table between `<!-- columns of FILE -->` and `<!-- end -->`.

    Raises ValueError where a file has no such place.
    """
    for name, columns in FILES.items():
        start = f"<!-- columns of {name} -->\n"
        before, marker, rest = page.partition(start)
        _, end, after = rest.partition("<!-- end -->")
        if not (marker and end):
            raise ValueError(f"no place for the columns of {name}")
        page = f"{before}{start}\n{columns_table(columns)}\n\n{end}{after}"
    return page


def main() -> None:
    """Write the tables into `results/README.md`."""
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python -m bench.results.schema --write")
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
