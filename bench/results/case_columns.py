"""The columns of cases.csv, and by file those of all results files.

A value comes, by the column's name, from the `detail` of blocks (`bench/measure`), from the facts of a
prepared case (`facts_of` in `bench/run/case_runner.py`), or else from `case_rows` in `aggregate.py`.
"""

from __future__ import annotations

from ..common.numbers import singular
from ..plan.case_settings import MODE_SETTINGS, STEP_SETTINGS
from ..plan.modes import MODES
from ..plan.settings import IMAGES, MOST_DEVICES, MOST_UNITS, OWN_PRECISIONS, PRECISIONS
from .columns import (
    ESTIMATORS,
    EXPOSED_COMM,
    OTHER_FILES,
    REASON_CODES,
    STATUSES,
    UNIT,
    Column,
    Metric,
    count_column,
    setting_column,
    text_column,
    with_ends,
)

IDENTITY: tuple[Column, ...] = (
    text_column(
        "case_id", "readable name of the case plus a hash of every setting that defines it", needed=True
    ),
    text_column("status", "`ok`, `skipped`, `oom`, `failed` or `timeout`", needed=True, among=STATUSES),
    Column("reason", "text", "why the status is not `ok`; empty otherwise"),
    text_column(
        "reason_code",
        "kind of reason: `plan` (known beforehand), `equal_layout` (as another case), `not_reached`, or "
        "`unused_parameters` (DDP waits for their gradients); empty for any other",
        among=REASON_CODES,
    ),
    text_column(
        "mode",
        "`single`, `dp` (nn.DataParallel), `ddp`, `replicate`, `fsdp` (FSDP2), `partition` or `pipeline`",
        needed=True,
        among=MODES,
    ),
    text_column("impl", "`torch`, or `cpu_standin` where DP's stages ran on CPU cores"),
    text_column("device_type", "`cuda` or `cpu`; on `cpu` a device is one core", among=("cuda", "cpu")),
    text_column("device_name", "GPU or CPU model of rank 0"),
    text_column(
        "backend",
        "process-group backend: `nccl`, `nccl2` or, also of pipelines, `nccl-lazy` (torch ≥ 2.14), `gloo`; "
        "empty without one",
    ),
    count_column(
        "num_devices", "devices the case trains on (DDP: world size)", needed=True, most=MOST_DEVICES
    ),
    count_column("num_nodes", "machines those devices are on", most=MOST_DEVICES),
    text_column("link", "rate of the link between the hosts of a lab; empty on a real network"),
    Column("oversubscribed", "bool", "more devices than physical ones on a machine: shared cores or GPUs"),
    text_column("arch", "model architecture, or the user's workload"),
    count_column("image_size", "height and width of an image, in pixels"),
    count_column("batch_per_device", "samples, which are rows of the batch, per device and micro-batch"),
    count_column("global_batch", "samples per optimizer step over all devices", needed=True),
    UNIT,
    count_column("units_per_sample", "how many of `unit` a sample holds", needed=True, most=MOST_UNITS),
    text_column(
        "scaling", "`weak` fixes the batch per device, `strong` the global batch", among=("weak", "strong")
    ),
    text_column(
        "precision",
        "`fp32`, `tf32`, `bf16` or `fp16` (the last two under autocast); without autocast, of parameters in "
        "another type that one: `fp64`, `pure bf16` or `pure fp16`",
        among=(*PRECISIONS, *OWN_PRECISIONS.values()),
    ),
    *(setting_column(setting) for setting in STEP_SETTINGS),
    Column("data", "text", "`device`, `host`, or the folder the images come from"),
    *(setting_column(setting) for setting in MODE_SETTINGS),
)
"""Columns of a case: known before it is measured, equal when it is measured again."""

CAP_MIB = Column("cap_mib", "float", "`bucket_cap_mb` as a number, to sort by; empty for `default` and lists")
"""Beside `bucket_cap_mb`, from which it follows: no part of what a case is."""

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
        "relative; rounding alone where the loss is a mean over rows of equal weight; empty where random",
    ),
    Column(
        "update_error",
        "float",
        "of the proof: parameters after 2 steps against eager training of the plain module, relative to the "
        "update; empty where rounding is too large to tell",
    ),
    text_column(
        "not_proved",
        "of the proof: why the case is neither proved nor wrong; else empty",
    ),
    text_column("proved_by", "what would prove a case that `not_proved` speaks of; else empty"),
    count_column(
        "num_buckets", "DDP buckets after the rebuild; with the Python reducer, compiled all-reduces"
    ),
    text_column("bucket_bytes", "bytes of each bucket in all-reduce order, `/`-separated"),
    text_column("layers_by_device", "`partition`, `pipeline`: layers of each device, `/`-separated"),
    *with_ends(
        "step_ms",
        "typical step of the longest rank, fitted over rounds: see docs/measuring.md",
        above=0,
        kind=Metric,
        label="step",
        gated=False,
    ),
    *with_ends(
        "images_per_s",
        "units per second (images for image models): `global_batch` x `units_per_sample` / `step_ms`, the "
        "typical rate",
        above=0,
        kind=Metric,
        label="throughput",
        higher_is_better=True,
    ),
    Column(
        "images_per_s_sustained",
        "float",
        "units of all timed blocks / time of their longest ranks: slow steps included",
        above=0,
    ),
    Column("step_ms_p50", "float", "median step time, all ranks and timed steps", above=0),
    Column("step_ms_p75", "float", "75th percentile of the step time", above=0),
    Column("step_ms_p95", "float", "95th percentile of the step time", above=0),
    Column("step_ms_p99", "float", "99th percentile, where there are 100 steps or more", above=0),
    Column("ranked", "bool", "whether its speed-up compares: it shares no devices and is no stand-in for DP"),
    *with_ends(
        "speedup",
        "`images_per_s` over that of `single` with as large a batch, compiled alike",
        above=0,
        kind=Metric,
        label="speed-up",
        higher_is_better=True,
        written="{:.3f}\N{MULTIPLICATION SIGN}",
    ),
    *with_ends(
        "efficiency",
        "speed-up / number of devices",
        above=0,
        kind=Metric,
        label="efficiency",
        higher_is_better=True,
        gated=False,  # its change is that of speed-up
        written="{:.1%}",
    ),
    *with_ends("forward_ms", "forward and loss per step, from the anatomy pass"),
    *with_ends("backward_ms", "backward per step, from the anatomy pass; includes exposed communication"),
    *with_ends("optimizer_ms", "optimizer step and `zero_grad`, from the anatomy pass"),
    *with_ends("data_ms", "fetching the batch, from the anatomy pass"),
    *with_ends(
        "comm_ms", "what a step sends back to back, no compute: DDP's buffers, then the recorded bucket sizes"
    ),
    *with_ends(
        "buffers_ms", "the part of `comm_ms` that broadcasts DDP's buffers; empty where it sends none"
    ),
    *with_ends("no_sync_step_ms", "step time of the same case under `no_sync`: the compute"),
    *with_ends(
        EXPOSED_COMM,
        "step minus step under `no_sync`: time communication adds",
        kind=Metric,
        label="exposed communication",
        written="{:,.2f} ms",
        in_parts_of="step_ms",
    ),
    text_column(
        "exposed_by",
        "how `exposed_comm_ms` is estimated: `no_sync` of a run (empty in older ones), `probes` of a watched "
        "training, whose buckets were held back; the gate compares only like with like",
        among=ESTIMATORS,
    ),
    *with_ends(
        "hidden_pct",
        "100 x (1 - exposed / comm); below 0 where it adds more than it takes alone",
    ),
    *with_ends("overlap_trace_pct", "time both compute and communication run / communication, trace"),
    *with_ends("overlap_window_pct", "DDP logger: its communication window inside the backward"),
    *with_ends("compute_slowdown", "time to the last gradient beside communication / without it"),
    *with_ends("bubble_pct", "`partition`, `pipeline`: share of the stages' time in which they wait"),
    *with_ends("anatomy_slowdown_pct", "how much slower the instrumented step is than the timed one"),
    Metric(
        "peak_mem_mib",
        "float",
        "most memory in use by this case's tensors, worst device; empty on CPU cores",
        above=0,
        label="peak memory",
        written="{:,.0f} MiB",
        least_change=1.0,  # MiB: allocators and the C library round by about as much
    ),
    Column(
        "reserved_mem_mib",
        "float",
        "most GPU memory that the allocator held for this case, in use or kept, worst device; empty on a CPU",
        above=0,
    ),
    text_column(
        "mem_by_device_mib", "as `peak_mem_mib`, of each of the case's devices in their order, `/`-separated"
    ),
    count_column(
        "device_allocs",
        "times that timed steps, those under `no_sync` included, asked a GPU's driver for memory: of all "
        "blocks and ranks; empty on a CPU",
        first=0,
    ),
    *with_ends("sm_clock_mhz", "SM clock in timed blocks, of the slowest GPU of the case"),
    *with_ends("power_w", "power in timed blocks, all GPUs of the case together"),
    *with_ends("joules_per_image", "`power_w` x step / units of the step: per image for image models"),
    Column("temperature_c", "float", "highest temperature of a GPU of the case in a timed block"),
    Column(
        "throttled_pct",
        "float",
        "share of samples with clocks held down by heat or power, of the worst GPU, mean over blocks",
    ),
    text_column("throttle_reasons", "by what, in NVML's words, the most frequent first"),
    *with_ends("rank_skew_ms", "slowest minus fastest rank's own work per step (under `no_sync`)"),
    count_column(
        "slowest_rank",
        "the rank whose own work most often took longest: the one others wait for",
        first=0,
        most=MOST_DEVICES,
    ),
    *with_ends("dp_scatter_ms", "DP: splitting the batch over the devices"),
    *with_ends("dp_replicate_ms", "DP: copying the model to every device"),
    *with_ends("dp_apply_ms", "DP: the replicas' forward"),
    *with_ends("dp_gather_ms", "DP: collecting the outputs on device 0"),
    *with_ends("dp_backward_ms", "DP: the replicas' backward (on GPUs with the reduction)"),
    *with_ends("dp_reduce_ms", "DP: adding the replicas' gradients on device 0 (empty on GPUs)"),
    *with_ends("dp_device0_pct", "DP: share of the step in which only device 0 works"),
    Column(
        "dp_device0_mem_ratio",
        "float",
        "DP: `peak_mem_mib` of device 0 / mean of the other devices'; empty on a CPU",
        above=0,
    ),
    count_column("num_rounds", "rounds with a timed block of this case", first=0),
    count_column("num_blocks", "blocks of this case, of all phases", first=0),
    *with_ends(
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
    count_column(
        "num_graphs", "graphs that torch.compile made; DDPOptimizer splits one at the buckets; empty if eager"
    ),
    count_column(
        "graph_breaks", "places where dynamo could not go on in one graph; empty for eager cases", first=0
    ),
    text_column("run_id", "names the run, whatever becomes of its folder"),
    text_column("started_at", "when the run began, UTC"),
    text_column("torch_version", "PyTorch that was measured"),
)

_BEHIND_CAP = 1 + [column.name for column in IDENTITY].index("bucket_cap_mb")

CASES: tuple[Column, ...] = (*IDENTITY[:_BEHIND_CAP], CAP_MIB, *IDENTITY[_BEHIND_CAP:], *MEASURED)

FILES: dict[str, tuple[Column, ...]] = {"cases.csv": CASES, **OTHER_FILES}

METRICS: dict[str, Metric] = {column.name: column for column in CASES if isinstance(column, Metric)}
"""The columns of cases.csv in which one direction is better, by name."""

GATED = {name: metric for name, metric in METRICS.items() if metric.gated}


def units_of(unit: str = IMAGES) -> dict[str, str]:
    """The unit of every column of every file; rates count `unit`, such as `tokens`."""
    counted = {f"{IMAGES}/s": f"{unit}/s", "J/image": f"J/{singular(unit)}"}
    columns = (column for of_file in FILES.values() for column in of_file)
    return {column.name: counted.get(column.unit, column.unit) for column in columns}
