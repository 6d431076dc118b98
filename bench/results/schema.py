"""The columns of every results file: one definition for the writer, the reader and the documentation.

`python -m ddp_bench.bench.results.schema --write` puts the tables of columns into `results/README.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddp_bench.bench import cli
from ddp_bench.bench.axes import DDP_SETTINGS, PIPELINE_SETTINGS, STEP_SETTINGS
from ddp_bench.bench.settings import MODES, MOST_DEVICES, MOST_UNITS, PRECISIONS

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

STATUSES = ("ok", "skipped", "oom", "failed", "timeout")
"""Every planned case ends in exactly one of these."""

PHASES = ("warmup", "timed", "no_sync", "comm", "anatomy", "trace", "calibration", "sustained")
"""What a block measured; only `timed` blocks make throughput."""


MOST, LEAST = 1e15, 1e-15
"""Largest and, but for 0, smallest magnitude of a number; none beyond was measured, and it might overflow."""


_TYPES: dict[str, tuple[type, ...]] = {"text": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


@dataclass(frozen=True)
class Column:
    """One column of a results file, and what its cells may hold."""

    name: str
    kind: str
    """`text`, `int`, `float` or `bool`."""
    meaning: str
    needed: bool = False
    """Whether every table has the column, and every row a value."""
    above: float = -MOST
    most: float = MOST
    among: tuple[str, ...] = ()
    """The texts that there are; none for any."""

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to check in a cell."""
        return self.needed or bool(self.among) or self.kind in ("int", "float")

    @property
    def allowed(self) -> str:
        """What the cells may hold, in words."""
        if self.among:
            return f"one of {', '.join(self.among)}"
        if self.kind in ("text", "bool"):
            return "given"
        return f"a number above {self.above:g}" if self.above > -MOST else "a possible number"

    def allows(self, value: Any) -> bool:
        """Whether a cell may hold `value`; None is an empty one."""
        if value is None:
            return not self.needed
        if type(value) not in _TYPES[self.kind]:
            return False
        if self.kind in ("int", "float"):
            return bool(self.above < value <= self.most and (value == 0 or abs(value) >= LEAST))
        return not self.among or value in self.among

    def refused(self, values: Sequence[str | None] | FloatArray, missing: BoolArray) -> BoolArray:
        """Whether each of the values of a column, numbers or texts, is one that it must not hold.

        `missing` says which of them are empty cells.
        """
        bad = np.zeros(len(missing), dtype=bool)
        if self.kind in ("int", "float"):
            found = np.asarray(values)
            bad = ~((found > self.above) & (found <= self.most) & ((found == 0) | (abs(found) >= LEAST)))
        elif self.among:
            bad = np.array([value not in self.among for value in values], dtype=bool)
        return (missing & self.needed) | (bad & ~missing)


def _interval(
    name: str, meaning: str, *, above: float = -MOST, most: float = MOST
) -> tuple[Column, Column, Column]:
    return (
        Column(name, "float", meaning, above=above, most=most),
        Column(f"{name}_low", "float", f"lower end of the 95% interval of `{name}`"),
        Column(f"{name}_high", "float", f"upper end of the 95% interval of `{name}`"),
    )


def _setting(setting: Field[Any]) -> Column:
    kind = {bool: "bool", int: "int"}.get(type(setting.default), "text")
    least = 0 if setting.metadata["parse"] is cli.whole_number else 1
    above = least - 1 if kind == "int" else -MOST
    return Column(setting.name, kind, setting.metadata["column"], above=above)


def _count(
    name: str,
    meaning: str,
    *,
    needed: bool = False,
    first: int = 1,
    most: float = MOST,
) -> Column:
    return Column(name, "int", meaning, needed=needed, above=first - 1, most=most)


UNIT = Column(
    "unit", "text", "what `images_per_s` counts: `images`, or the workload's own, as `tokens`", needed=True
)


IDENTITY: tuple[Column, ...] = (
    Column(
        "case_id",
        "text",
        "readable name of the case plus a hash of every setting that defines it",
        needed=True,
    ),
    Column("status", "text", "`ok`, `skipped`, `oom`, `failed` or `timeout`", needed=True, among=STATUSES),
    Column("reason", "text", "why the status is not `ok`; empty otherwise"),
    Column(
        "mode",
        "text",
        "`single`, `dp` (nn.DataParallel), `ddp`, `fsdp` (FSDP2), `partition` or `pipeline`",
        needed=True,
        among=MODES,
    ),
    Column("impl", "text", "`torch`, or `cpu_standin` where DP's stages ran on CPU cores"),
    Column("device_type", "text", "`cuda` or `cpu`; on `cpu` a device is one core", among=("cuda", "cpu")),
    Column("device_name", "text", "GPU or CPU model of rank 0"),
    Column("backend", "text", "process-group backend of the gradients, `nccl` or `gloo`; empty without one"),
    _count("num_devices", "devices the case trains on (DDP: world size)", needed=True, most=MOST_DEVICES),
    _count("num_nodes", "machines those devices are on", most=MOST_DEVICES),
    Column("link", "text", "rate of the link between the hosts of a lab; empty on a real network"),
    Column("oversubscribed", "bool", "more devices than physical ones on a machine: shared cores or GPUs"),
    Column("arch", "text", "model architecture, or the user's workload"),
    _count("image_size", "height and width of an image, in pixels"),
    _count("batch_per_device", "samples, which are rows of the batch, per device and micro-batch"),
    _count("global_batch", "samples per optimizer step over all devices", needed=True),
    UNIT,
    _count("units_per_sample", "how many of `unit` a sample holds", needed=True, most=MOST_UNITS),
    Column(
        "scaling",
        "text",
        "`weak` fixes the batch per device, `strong` the global batch",
        among=("weak", "strong"),
    ),
    Column(
        "precision",
        "text",
        "`fp32`, `tf32`, `bf16` or `fp16` (the last two under autocast)",
        among=PRECISIONS,
    ),
    *(_setting(setting) for setting in STEP_SETTINGS),
    Column("data", "text", "`device`, `host`, or the folder the images come from"),
    *(_setting(setting) for setting in (*DDP_SETTINGS, *PIPELINE_SETTINGS)),
)
"""What a case is: known before it is measured, equal when it is measured again."""

MEASURED: tuple[Column, ...] = (
    Column(
        "gradient_error",
        "float",
        "of the proof: gradients against the plain module's of the same parts of a batch, relative",
    ),
    Column(
        "split_effect",
        "float",
        "of the proof: gradient of the parts into which the case splits a batch against that of the whole, "
        "relative; rounding alone where the loss is a mean over rows of equal weight",
    ),
    Column(
        "update_error",
        "float",
        "of the proof: parameters after 2 steps against eager training of the plain module, relative to the "
        "update; empty where rounding is too large to tell",
    ),
    _count("num_buckets", "DDP buckets after the rebuild; with the Python reducer, compiled all-reduces"),
    Column("bucket_bytes", "text", "bytes of each bucket in all-reduce order, `/`-separated"),
    Column("layers_by_device", "text", "`partition`, `pipeline`: layers of each device, `/`-separated"),
    *_interval(
        "step_ms", "typical step of the longest rank, fitted over rounds: see docs/measuring.md", above=0
    ),
    *_interval(
        "images_per_s",
        "units per second (images for image models): `global_batch` x `units_per_sample` / `step_ms`, the "
        "typical rate",
        above=0,
    ),
    Column(
        "images_per_s_sustained",
        "float",
        "units of all timed blocks / time of their longest ranks: slow steps included",
        above=0,
    ),
    *_interval(
        "steady_images_per_s",
        "units per second in the last half of `--sustain`: the mean over its blocks",
        above=0,
    ),
    *_interval(
        "steady_change_pct", "`steady_images_per_s` against the first tenth of `--sustain`; above 0 is faster"
    ),
    Column("step_ms_p50", "float", "median step time, all ranks and timed steps", above=0),
    Column("step_ms_p75", "float", "75th percentile of the step time", above=0),
    Column("step_ms_p95", "float", "95th percentile of the step time", above=0),
    *_interval("speedup", "`images_per_s` over that of `single`, compiled alike", above=0),
    *_interval("efficiency", "speed-up / number of devices", above=0),
    *_interval("forward_ms", "forward and loss per step, from the anatomy pass"),
    *_interval("backward_ms", "backward per step, from the anatomy pass; includes exposed communication"),
    *_interval("optimizer_ms", "optimizer step and `zero_grad`, from the anatomy pass"),
    *_interval("data_ms", "fetching the batch, from the anatomy pass"),
    *_interval(
        "comm_ms", "what a step sends back to back, no compute: DDP's buffers, then the recorded bucket sizes"
    ),
    *_interval(
        "buffers_ms", "the part of `comm_ms` that broadcasts DDP's buffers; empty where it sends none"
    ),
    *_interval("no_sync_step_ms", "step time of the same case under `no_sync`: the compute"),
    *_interval("exposed_comm_ms", "step minus step under `no_sync`: time communication adds"),
    *_interval("hidden_pct", "100 x (1 - exposed / comm); below 0 where it adds more than it takes alone"),
    *_interval("overlap_trace_pct", "time both compute and communication run / communication, trace"),
    *_interval("overlap_window_pct", "DDP logger: its communication window inside the backward"),
    *_interval("compute_slowdown", "time to the last gradient beside communication / without it"),
    *_interval("bubble_pct", "`partition`, `pipeline`: share of the stages' time in which they wait"),
    *_interval("bubble_of_stages_pct", "the same by the schedule, from the measured times of the stages"),
    *_interval("anatomy_slowdown_pct", "how much slower the instrumented step is than the timed one"),
    Column(
        "peak_mem_mib",
        "float",
        "most memory in use by this case's tensors, worst device; empty on CPU cores",
        above=0,
    ),
    Column(
        "reserved_mem_mib",
        "float",
        "most GPU memory that the allocator held for this case, in use or kept, worst device; empty on a CPU",
        above=0,
    ),
    Column(
        "mem_by_device_mib",
        "text",
        "as `peak_mem_mib`, of each of the case's devices in their order, `/`-separated",
    ),
    _count(
        "device_allocs",
        "times that timed steps, `no_sync` and `--sustain` included, asked a GPU's driver for memory: of all "
        "blocks and ranks; empty on a CPU",
        first=0,
    ),
    *_interval("sm_clock_mhz", "SM clock in timed blocks, of the slowest GPU of the case"),
    *_interval("power_w", "power in timed blocks, all GPUs of the case together"),
    *_interval("joules_per_image", "`power_w` x step / units of the step: per image for image models"),
    Column("temperature_c", "float", "highest temperature of a GPU of the case in a timed block"),
    Column(
        "throttled_pct",
        "float",
        "share of samples with clocks held down by heat or power, of the worst GPU, mean over blocks",
    ),
    Column("throttle_reasons", "text", "by what, in NVML's words, the most frequent first"),
    *_interval("rank_skew_ms", "slowest minus fastest rank's own work per step (under `no_sync`)"),
    _count(
        "slowest_rank",
        "the rank whose own work most often took longest: the one others wait for",
        first=0,
        most=MOST_DEVICES,
    ),
    *_interval("dp_scatter_ms", "DP: splitting the batch over the devices"),
    *_interval("dp_replicate_ms", "DP: copying the model to every device"),
    *_interval("dp_apply_ms", "DP: the replicas' forward"),
    *_interval("dp_gather_ms", "DP: collecting the outputs on device 0"),
    *_interval("dp_backward_ms", "DP: the replicas' backward (on GPUs with the reduction)"),
    *_interval("dp_reduce_ms", "DP: adding the replicas' gradients on device 0 (empty on GPUs)"),
    *_interval("dp_device0_pct", "DP: share of the step in which only device 0 works"),
    Column(
        "dp_device0_mem_ratio",
        "float",
        "DP: `peak_mem_mib` of device 0 / mean of the other devices'; empty on a CPU",
        above=0,
    ),
    _count("num_rounds", "rounds with a timed block of this case", first=0),
    _count("num_blocks", "blocks of this case, of all phases", first=0),
    *_interval(
        "vs_ddp_default",
        "`images_per_s` over that of DDP's default on as many devices; all of a run hold at once",
        above=0,
    ),
    Column(
        "compile_s",
        "float",
        "seconds that torch.compile took on rank 0, backward included, with its caches as found; "
        "empty for eager cases",
        above=0,
    ),
    _count(
        "num_graphs", "graphs that torch.compile made; DDPOptimizer splits one at the buckets; empty if eager"
    ),
    _count(
        "graph_breaks", "places where dynamo could not go on in one graph; empty for eager cases", first=0
    ),
    Column("prefetch", "bool", "whether the next batch was copied to the GPU during the step"),
    Column("cap_mib", "float", "`bucket_cap_mb` as a number; empty for `default` and for lists"),
    Column("run_id", "text", "names the run, whatever becomes of its folder"),
    Column("started_at", "text", "when the run began, UTC"),
    Column("torch_version", "text", "PyTorch that was measured"),
)

CASES: tuple[Column, ...] = IDENTITY + MEASURED

BLOCKS: tuple[Column, ...] = (
    Column("case_id", "text", "the case, as in cases.csv", needed=True),
    Column(
        "phase",
        "text",
        "`warmup`, `timed`, `no_sync`, `comm`, `anatomy`, `trace`, `calibration` or `sustained`",
        needed=True,
        among=PHASES,
    ),
    _count(
        "round",
        "1, 2, ...; 0 for warm-up before the first round and a GPU's trace after the last; "
        "of `sustained` the block's number",
        needed=True,
        first=0,
    ),
    _count("position", "place of the block in its round's random order, from 0", first=0),
    _count("rank", "global rank that took the times", needed=True, first=0, most=MOST_DEVICES),
    Column("host", "text", "host of the rank"),
    Column("started_s", "float", "start, in seconds since the run began"),
    _count("num_steps", "steps in the block", needed=True),
    Column("block_ms", "float", "duration of the block on this rank", needed=True, above=0),
    Column("steps_ms", "text", "each step's duration, space-separated"),
    Column(
        "detail",
        "text",
        "JSON: further durations of this phase, in ms per step; of timed blocks what each GPU did",
    ),
)

BUCKETS: tuple[Column, ...] = (
    Column("case_id", "text", "the case, as in cases.csv", needed=True),
    _count("rank", "global rank", first=0, most=MOST_DEVICES),
    _count("bucket", "index in all-reduce order, from 0", first=0),
    _count("bytes", "gradient bytes in the bucket"),
    _count("num_params", "parameters in the bucket"),
    *_interval("ready_ms", "last gradient ready, since the start of the backward, from the anatomy pass"),
    *_interval("launch_ms", "all-reduce launched: DDP does so once this bucket and all before it are ready"),
    *_interval("start_ms", "all-reduce taken up by gloo or NCCL, from the trace pass"),
    *_interval("done_ms", "all-reduce done, from the trace pass"),
)

ALLREDUCE: tuple[Column, ...] = (
    _count("num_devices", "ranks of the all-reduce", needed=True, most=MOST_DEVICES),
    Column("backend", "text", "`nccl` or `gloo`"),
    _count("bytes", "message size", needed=True),
    *_interval(
        "time_ms",
        "an all-reduce of that size, longest rank, median over repetitions, each of up to 8 in a row",
        above=0,
    ),
    Column("busbw_gb_per_s", "float", "bus bandwidth, bytes / time x 2 (n - 1) / n, in 10^9 bytes/s"),
    _count("num_samples", "repetitions"),
)

COMPARISONS: tuple[Column, ...] = (
    Column("case_id", "text", "the case, as in cases.csv", needed=True),
    Column("reference_id", "text", "the case it is compared with", needed=True),
    Column("metric", "text", "what is compared: `images_per_s`", needed=True),
    UNIT,
    *_interval("ratio", "the case's over the reference's; the intervals of a run hold at once", above=0),
    Column("margin", "float", "what counts as equal, a fraction, fixed before the run", above=0),
    Column(
        "answer",
        "text",
        "`faster`, `slower`, `no difference` above the margin, `unresolved` or `too few rounds`",
    ),
    _count("num_rounds", "rounds of the case with fewer", first=0),
)

FILES: dict[str, tuple[Column, ...]] = {
    "cases.csv": CASES,
    "blocks.csv": BLOCKS,
    "buckets.csv": BUCKETS,
    "allreduce.csv": ALLREDUCE,
    "comparisons.csv": COMPARISONS,
}

README = Path(__file__).resolve().parents[2] / "results" / "README.md"
"""Explains the files to people."""

_DTYPES: dict[str, Any] = {"text": "string", "int": "Int64", "bool": "boolean"}


def typed(values: Sequence[Any], kind: str) -> Any:
    """A column of a frame; None becomes NA."""
    return np.array(values, dtype=np.float64) if kind == "float" else pd.array(values, dtype=_DTYPES[kind])


def typed_frame(rows: Iterable[Mapping[str, Any]], columns: tuple[Column, ...]) -> pd.DataFrame:
    """Rows as a frame with the schema's columns and types; absent values become NA."""
    rows = list(rows)
    return pd.DataFrame({c.name: typed([row.get(c.name) for row in rows], c.kind) for c in columns})


def records(cases: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as mappings from column to cell; a missing cell that is no number is None.

    Not `DataFrame.to_dict`, which looks every column up by itself for every row.
    """
    names = list(cases.columns)
    return [
        {name: None if cell is pd.NA else cell for name, cell in zip(names, row, strict=True)}
        for row in cases.astype(object).to_numpy().tolist()
    ]


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
        raise SystemExit("usage: python -m ddp_bench.bench.results.schema --write")
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
