"""The columns of every results file: one definition for the writer, the reader and the documentation.

`python -m ddp_bench.bench.results.schema --write` puts the tables of columns into `results/README.md`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_bench.bench import cli
from ddp_bench.bench.axes import DDP_SETTINGS, PIPELINE_SETTINGS, STEP_SETTINGS
from ddp_bench.bench.settings import IMAGES, MODES, MOST_DEVICES, MOST_UNITS, PRECISIONS

if TYPE_CHECKING:
    import pandas as pd

STATUSES = ("ok", "skipped", "oom", "failed", "timeout")
"""Every planned case ends in exactly one of these."""

EXPOSED_COMM = "exposed_comm_ms"
"""The column of what communication adds to a step, by which findings, page and summary name it."""

PHASES = ("warmup", "timed", "no_sync", "comm", "anatomy", "trace", "calibration", "sustained")
"""What a block measured; only `timed` blocks make throughput."""


MOST, LEAST = 1e15, 1e-15
"""Largest and, but for 0, smallest magnitude of a number; none beyond was measured, and it might overflow."""


_UNITS: tuple[tuple[str, str], ...] = (
    (r"(.*_)?images_per_s(_.*)?", f"{IMAGES}/s"),
    (r"joules_per_image", "J/image"),
    (r".*_gb_per_s", "GB/s"),
    (r".*_ms(_p\d+)?", "ms"),
    (r".*_s", "s"),
    (r".*_mib", "MiB"),
    (r".*_pct", "%"),
    (r".*_mhz", "MHz"),
    (r".*_w", "W"),
    (r"temperature_c", "°C"),
    (r"(.*_)?bytes", "bytes"),
    (r"image_size", "pixels"),
    (r"batch_per_device|global_batch", "samples"),
    (r"accumulate|micro_batches", "micro-batches"),
    (r"num_params", "parameters"),
    (r"num_samples", "repetitions"),
    (r"num_(nodes|devices|buckets|rounds|blocks|steps|graphs)", r"\1"),
    (r"graph_breaks", "breaks"),
)
"""Names carry their units: by patterns of whole names, the first that fits; ratios and texts have none."""


@dataclass(frozen=True)
class Shown:
    """How the terminal's summary shows a column."""

    heading: str
    """Empty for the rate, which stands under its unit."""
    form: str
    """`rate` and `interval` have one, `ratio`, `percent` and `number` are without."""
    factor: float = 1.0


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
    repeated: bool = False
    """Whether rounds repeat it, so that it has an interval: columns of its ends follow."""
    public: bool = False
    """Whether a text may be handed on: it names neither a person nor a machine. Numbers always may."""
    summary: Shown | None = None

    @property
    def unit(self) -> str:
        """The unit; empty for ratios, indices and plain text. Rates count images, until one knows better."""
        plain = re.sub(r"_(low|high)$", "", self.name)
        found = ((re.fullmatch(pattern, plain), unit) for pattern, unit in _UNITS)
        return next((match.expand(unit) for match, unit in found if match is not None), "")

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


@dataclass(frozen=True, kw_only=True)
class Metric(Column):
    """A column in which one direction is better: what the gate judges and what other tools are given."""

    label: str
    brief: str
    """What it is, for those who see no table of columns."""
    higher_is_better: bool = False
    written: str = ""
    """How one value is written, as a format; empty for a rate, whose unit is the case's."""
    gated: bool = True
    exported: int = 0
    """Its place among what other tools are given; 0 for none."""
    in_parts_of: str = ""
    """The column that a change is held against, where the metric itself may be near 0; empty: itself."""
    least_change: float = 0.0
    """Differences below this, in its own unit, are none."""

    @property
    def is_rate(self) -> bool:
        """Whether it counts what a case trains on, by second."""
        return self.unit == f"{IMAGES}/s"

    @property
    def absolute(self) -> bool:
        """Whether it depends on the machine; a ratio inside one run does so less."""
        return bool(self.unit)


def _text(name: str, meaning: str, *, needed: bool = False, among: tuple[str, ...] = ()) -> Column:
    """A text that may be handed on."""
    return Column(name, "text", meaning, needed=needed, among=among, public=True)


def _interval(
    name: str, meaning: str, *, above: float = -MOST, kind: type[Column] = Column, **more: Any
) -> tuple[Column, Column, Column]:
    return (
        kind(name, "float", meaning, above=above, repeated=True, **more),
        Column(f"{name}_low", "float", f"lower end of the 95% interval of `{name}`"),
        Column(f"{name}_high", "float", f"upper end of the 95% interval of `{name}`"),
    )


def _setting(setting: Field[Any]) -> Column:
    kind = {bool: "bool", int: "int"}.get(type(setting.default), "text")
    least = 0 if setting.metadata["parse"] is cli.whole_number else 1
    above = least - 1 if kind == "int" else -MOST
    return Column(setting.name, kind, setting.metadata["column"], above=above, public=True)


def _count(
    name: str,
    meaning: str,
    *,
    needed: bool = False,
    first: int = 1,
    most: float = MOST,
) -> Column:
    return Column(name, "int", meaning, needed=needed, above=first - 1, most=most)


UNIT = _text("unit", "what `images_per_s` counts: `images`, or the workload's own, as `tokens`", needed=True)


IDENTITY: tuple[Column, ...] = (
    _text(
        "case_id",
        "readable name of the case plus a hash of every setting that defines it",
        needed=True,
    ),
    _text("status", "`ok`, `skipped`, `oom`, `failed` or `timeout`", needed=True, among=STATUSES),
    Column("reason", "text", "why the status is not `ok`; empty otherwise"),
    _text(
        "mode",
        "`single`, `dp` (nn.DataParallel), `ddp`, `fsdp` (FSDP2), `partition` or `pipeline`",
        needed=True,
        among=MODES,
    ),
    _text("impl", "`torch`, or `cpu_standin` where DP's stages ran on CPU cores"),
    _text("device_type", "`cuda` or `cpu`; on `cpu` a device is one core", among=("cuda", "cpu")),
    _text("device_name", "GPU or CPU model of rank 0"),
    _text("backend", "process-group backend of the gradients, `nccl` or `gloo`; empty without one"),
    _count("num_devices", "devices the case trains on (DDP: world size)", needed=True, most=MOST_DEVICES),
    _count("num_nodes", "machines those devices are on", most=MOST_DEVICES),
    _text("link", "rate of the link between the hosts of a lab; empty on a real network"),
    Column("oversubscribed", "bool", "more devices than physical ones on a machine: shared cores or GPUs"),
    _text("arch", "model architecture, or the user's workload"),
    _count("image_size", "height and width of an image, in pixels"),
    _count("batch_per_device", "samples, which are rows of the batch, per device and micro-batch"),
    _count("global_batch", "samples per optimizer step over all devices", needed=True),
    UNIT,
    _count("units_per_sample", "how many of `unit` a sample holds", needed=True, most=MOST_UNITS),
    _text(
        "scaling",
        "`weak` fixes the batch per device, `strong` the global batch",
        among=("weak", "strong"),
    ),
    _text(
        "precision",
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
    _text("bucket_bytes", "bytes of each bucket in all-reduce order, `/`-separated"),
    _text("layers_by_device", "`partition`, `pipeline`: layers of each device, `/`-separated"),
    *_interval(
        "step_ms",
        "typical step of the longest rank, fitted over rounds: see docs/measuring.md",
        above=0,
        summary=Shown("step ms", "number"),
        kind=Metric,
        label="step",
        brief="one optimizer step of the slowest rank",
        gated=False,
        exported=2,
    ),
    *_interval(
        "images_per_s",
        "units per second (images for image models): `global_batch` x `units_per_sample` / `step_ms`, the "
        "typical rate",
        above=0,
        summary=Shown("", "rate"),
        kind=Metric,
        label="throughput",
        brief="throughput of all devices",
        higher_is_better=True,
        exported=1,
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
    *_interval(
        "speedup",
        "`images_per_s` over that of `single`, compiled alike",
        above=0,
        summary=Shown("speed-up", "ratio"),
        kind=Metric,
        label="speed-up",
        brief="throughput over that of one device without a wrapper",
        higher_is_better=True,
        written="{:.3f}x",
        exported=4,
    ),
    *_interval(
        "efficiency",
        "speed-up / number of devices",
        above=0,
        summary=Shown("eff.", "percent", factor=100.0),
        kind=Metric,
        label="efficiency",
        brief="speed-up over number of devices",
        higher_is_better=True,
        written="{:.1%}",
    ),
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
    *_interval(
        EXPOSED_COMM,
        "step minus step under `no_sync`: time communication adds",
        summary=Shown("exposed ms", "interval"),
        kind=Metric,
        label="exposed communication",
        brief="time that communication adds to the step",
        written="{:,.2f} ms",
        exported=3,
        in_parts_of="step_ms",
    ),
    *_interval(
        "hidden_pct",
        "100 x (1 - exposed / comm); below 0 where it adds more than it takes alone",
        summary=Shown("hidden", "percent"),
    ),
    *_interval("overlap_trace_pct", "time both compute and communication run / communication, trace"),
    *_interval("overlap_window_pct", "DDP logger: its communication window inside the backward"),
    *_interval("compute_slowdown", "time to the last gradient beside communication / without it"),
    *_interval("bubble_pct", "`partition`, `pipeline`: share of the stages' time in which they wait"),
    *_interval("bubble_of_stages_pct", "the same by the schedule, from the measured times of the stages"),
    *_interval("anatomy_slowdown_pct", "how much slower the instrumented step is than the timed one"),
    Metric(
        "peak_mem_mib",
        "float",
        "most memory in use by this case's tensors, worst device; empty on CPU cores",
        above=0,
        label="peak memory",
        brief="most memory in use, worst device",
        written="{:,.0f} MiB",
        exported=5,
        least_change=1.0,  # MiB: allocators and the C library round by about as much
    ),
    Column(
        "reserved_mem_mib",
        "float",
        "most GPU memory that the allocator held for this case, in use or kept, worst device; empty on a CPU",
        above=0,
    ),
    _text(
        "mem_by_device_mib",
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
    _text("throttle_reasons", "by what, in NVML's words, the most frequent first"),
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
    _text("run_id", "names the run, whatever becomes of its folder"),
    _text("started_at", "when the run began, UTC"),
    _text("torch_version", "PyTorch that was measured"),
)

CASES: tuple[Column, ...] = IDENTITY + MEASURED

BLOCKS: tuple[Column, ...] = (
    _text("case_id", "the case, as in cases.csv", needed=True),
    _text(
        "phase",
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
    _text("steps_ms", "each step's duration, space-separated"),
    _text(
        "detail",
        "JSON: further durations of this phase, in ms per step; of timed blocks what each GPU did",
    ),
)

BUCKETS: tuple[Column, ...] = (
    _text("case_id", "the case, as in cases.csv", needed=True),
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
    _text("backend", "`nccl` or `gloo`"),
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
    _text("case_id", "the case, as in cases.csv", needed=True),
    _text("reference_id", "the case it is compared with", needed=True),
    _text("metric", "what is compared: `images_per_s`", needed=True),
    UNIT,
    *_interval("ratio", "the case's over the reference's; the intervals of a run hold at once", above=0),
    Column("margin", "float", "what counts as equal, a fraction, fixed before the run", above=0),
    _text(
        "answer",
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

METRICS: dict[str, Metric] = {column.name: column for column in CASES if isinstance(column, Metric)}
"""The columns of cases.csv in which one direction is better, by name."""

GATED = {name: metric for name, metric in METRICS.items() if metric.gated}

EXPORTED = {
    metric.name: metric
    for metric in sorted(METRICS.values(), key=lambda one: one.exported)
    if metric.exported
}

README = Path(__file__).resolve().parents[2] / "results" / "README.md"
"""Explains the files to people."""

_DTYPES: dict[str, Any] = {"text": "string", "int": "Int64", "bool": "boolean"}


def units_of(unit: str = IMAGES) -> dict[str, str]:
    """The unit of every column of every file; rates count `unit`, such as `tokens`."""
    counted = {f"{IMAGES}/s": f"{unit}/s", "J/image": f"J/{unit.removesuffix('s')}"}
    columns = (column for of_file in FILES.values() for column in of_file)
    return {column.name: counted.get(column.unit, column.unit) for column in columns}


def typed(values: Sequence[Any], kind: str) -> Any:
    """A column of a frame; None becomes NA."""
    import numpy as np  # as pandas it takes long, and `--help` needs the names alone
    import pandas as pd

    return np.array(values, dtype=np.float64) if kind == "float" else pd.array(values, dtype=_DTYPES[kind])


def typed_frame(rows: Iterable[Mapping[str, Any]], columns: tuple[Column, ...]) -> pd.DataFrame:
    """Rows as a frame with the schema's columns and types; absent values become NA."""
    import pandas as pd

    rows = list(rows)
    return pd.DataFrame({c.name: typed([row.get(c.name) for row in rows], c.kind) for c in columns})


def records(cases: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as mappings from column to cell; a missing cell that is no number is None.

    Not `DataFrame.to_dict`, which looks every column up by itself for every row.
    """
    import pandas as pd

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
