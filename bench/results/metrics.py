"""What is measured of a case: an entry for each metric, from which all else that is said of it follows.

A value comes from the entry's formula or function, else from the `detail` of blocks (`bench/measure`) by its
name, else from the facts of a prepared case (`bench/run/case_facts.py`).
"""

from __future__ import annotations

from statistics import fmean

from ..common.numbers import TIMES
from ..plan.settings import MOST_DEVICES
from .columns import (
    ESTIMATORS,
    EXPOSED_COMM,
    Column,
    Metric,
    count_column,
    number_column,
    text_column,
    with_ends,
)
from .formula import SINGLE, Formula

MEASURED: tuple[Column, ...] = (
    *with_ends(
        "step_ms",
        "typical step of the longest rank, fitted over rounds: see docs/measuring.md",
        kind=Metric,
        above=0,
        formula=Formula(lambda _, ms: ms),
        gated=False,
    ),
    *with_ends(
        "images_per_s",
        "units per second (images for image models): `global_batch` x `units_per_sample` / `step_ms`, the "
        "typical rate",
        kind=Metric,
        above=0,
        formula=Formula(lambda case, ms: case.rate(ms)),
        shown="Throughput = global batch over the step of the slowest rank",
        higher_is_better=True,
    ),
    number_column(
        "images_per_s_sustained",
        "units of all timed blocks / time of their longest ranks: slow steps included",
        above=0,
        value=lambda case, times: case.rate(times.timed_ms) * times.num_steps,
        shown="Throughput, pauses included",
    ),
    *(
        number_column(
            f"step_ms_p{percent}",
            meaning,
            above=0,
            value=lambda _, times, percent=percent: times.percentile_ms(percent),
            shown=shown,
        )
        for percent, shown, meaning in (
            (50, "Step, median", "median step time, all ranks and timed steps"),
            (75, "", "75th percentile of the step time"),
            (95, "Step, p95", "95th percentile of the step time"),
            (99, "Step, p99", "99th percentile, where there are 100 steps or more"),
        )
    ),
    Column(
        "ranked",
        "bool",
        "whether its speed-up compares: it shares no devices and is no stand-in for DP",
        value=lambda case, _: case.is_ranked,
    ),
    *with_ends(
        "speedup",
        "`images_per_s` over that of `single` with as large a batch, compiled alike",
        kind=Metric,
        above=0,
        formula=Formula(lambda case, ms, single_ms: case.speedup_of(ms, single_ms), ("timed", SINGLE)),
        shown=f"Speed-up ({TIMES}) = throughput over that of “single”, the plain module on one device",
        higher_is_better=True,
        written="{:.3f}" + TIMES,
    ),
    *with_ends(
        "efficiency",
        "speed-up / devices",
        kind=Metric,
        above=0,
        formula=Formula(
            lambda case, ms, single_ms: case.speedup_of(ms, single_ms) / case.num_devices,
            ("timed", SINGLE),
            when=lambda case: case.has_efficiency,
        ),
        shown="Efficiency (%) =",
        higher_is_better=True,
        gated=False,  # its change is that of speed-up
        written="{:.1%}",
    ),
    *with_ends("forward_ms", "forward and loss per step, from the anatomy pass"),
    *with_ends("backward_ms", "backward per step, from the anatomy pass; includes exposed communication"),
    *with_ends("optimizer_ms", "optimizer step and `zero_grad`, from the anatomy pass"),
    *with_ends("data_ms", "fetching the batch, from the anatomy pass"),
    *with_ends(
        "comm_ms",
        "what a step sends, DDP's buffers and then its buckets, back to back with no compute beside it",
        formula=Formula(lambda _, ms: ms, ("comm",)),
        shown="Communication alone =",
    ),
    *with_ends(
        "buffers_ms",
        "the part of `comm_ms` that broadcasts DDP's buffers; empty where it sends none",
        shown="Buffers = the part of it that broadcasts DDP's buffers",
    ),
    *with_ends(
        "no_sync_step_ms",
        "the step under no_sync: compute, optimizer and batch",
        formula=Formula(lambda _, ms: ms, ("no_sync",)),
        shown="Step without synchronising =",
    ),
    *with_ends(
        EXPOSED_COMM,
        "time that communication adds to a step: the step minus the same step without "
        "synchronising, in the same round",
        kind=Metric,
        formula=Formula(lambda _, ms, local_ms: ms - local_ms, ("timed", "no_sync"), is_log=False),
        shown="Exposed =",
        called="exposed communication",
        written="{:,.2f} ms",
        in_parts_of="step_ms",
    ),
    text_column(
        "exposed_by",
        "how `exposed_comm_ms` is estimated: `no_sync` of a run (empty in older ones), `probes` of a watched "
        "training, whose buckets were held back; the gate compares only like with like",
        among=ESTIMATORS,
        shown="Exposed by = how it was estimated. no_sync: the step without synchronising is one under "
        "no_sync; probes: it is one whose buckets were held back until the last was ready, less what they "
        "then took",
    ),
    *with_ends(
        "hidden_pct",
        "100 x (1 - exposed / comm); below 0 where it adds more than it takes alone",
        formula=Formula(
            lambda _, ms, local_ms, comm_ms: 100 * (1 - (ms - local_ms) / comm_ms),
            ("timed", "no_sync", "comm"),
            is_log=False,
            # SyncBatchNorm's messages are exposed, and not among the buckets that `comm_ms` is of.
            when=lambda case: case.setting("sync_batchnorm") != "True",
            needs_interval=True,
        ),
        shown=f"Overlap = 100 {TIMES} (1 - exposed / communication alone); none where it adds more "
        "than it takes alone, all where it adds nothing, empty where it is not known to 50 points",
    ),
    *with_ends(
        "overlap_trace_pct",
        "time in which both compute and communication run, over the time communication runs, per "
        "rank; unlike “Overlap” it counts compute that communication slows, and waiting for other ranks",
        ends=(0, 100),
        shown="Overlap, trace =",
    ),
    *with_ends(
        "overlap_window_pct",
        "DDP's own logger: the part of its communication window that lies inside the backward",
        ends=(0, 100),
        shown="Overlap, DDP window =",
    ),
    *with_ends(
        "compute_slowdown",
        "time to the last gradient beside communication, over the same time without it",
        shown=f"Compute slow-down ({TIMES}) =",
    ),
    *with_ends(
        "bubble_pct",
        "`partition`, `pipeline`: share of the stages' time in which they wait",
        shown="Bubble = the share of the stages' time in which they wait for each other",
    ),
    *with_ends(
        "anatomy_slowdown_pct",
        "how much slower the instrumented step is than the timed one",
        value=lambda _, times: {
            r: 100 * (ms / times.steps()[r] - 1)
            for r, ms in times.steps("anatomy").items()
            if r in times.steps()
        },
        shown="Cost of instruments = how much slower they make the step",
    ),
    Metric(
        "peak_mem_mib",
        "float",
        "most memory in use by this case's tensors, worst device; empty on CPU cores",
        above=0,
        shown="Peak memory = in tensors, on the device that needs most, without what libraries take "
        "(CUDA, NCCL, oneDNN)",
        written="{:,.0f} MiB",
        least_change=1.0,  # MiB: allocators and the C library round by about as much
    ),
    number_column(
        "reserved_mem_mib",
        "most GPU memory that the allocator held for this case, in use or kept, worst device; empty on a CPU",
        above=0,
        shown="Reserved memory = what torch's allocator held for the tensors",
    ),
    text_column(
        "mem_by_device_mib", "as `peak_mem_mib`, of each of the case's devices in their order, `/`-separated"
    ),
    count_column(
        "device_allocs",
        "times that timed steps, those under `no_sync` included, asked a GPU's driver for memory: of all "
        "blocks and ranks; empty on a CPU",
        first=0,
        value=lambda _, times: sum(times.device_allocs) if times.device_allocs else None,
    ),
    *with_ends(
        "sm_clock_mhz",
        "SM clock in timed blocks, of the slowest GPU of the case",
        of_gpus=min,
        shown="SM clock",
    ),
    *with_ends("power_w", "power in timed blocks, all GPUs of the case together", of_gpus=sum),
    *with_ends(
        "joules_per_image",
        "`power_w` x step / units of the step: per image for image models",
        value=lambda case, times: {
            r: watts / case.rate(times.steps()[r])
            for r, watts in times.of("power_w").items()
            if r in times.steps()
        },
        shown="Energy",
    ),
    number_column(
        "temperature_c",
        "highest temperature of a GPU of the case in a timed block",
        value=lambda _, times: max(times.of("temperature_c").values(), default=None),
        of_gpus=max,
        shown="Temperature, highest",
    ),
    number_column(
        "throttled_pct",
        "share of samples with clocks held down by heat or power, of the worst GPU, mean over blocks",
        value=lambda _, times: fmean(found.values()) if (found := times.of("throttled_pct")) else None,
        of_gpus=max,
        shown="Slowed (% of samples)",
    ),
    text_column(
        "throttle_reasons",
        "by what, in NVML's words, the most frequent first",
        value=lambda _, times: times.throttle_reasons(),
        shown="Slowed by",
    ),
    *with_ends(
        "rank_skew_ms",
        "slowest minus fastest rank's own work per step (under `no_sync`)",
        shown="Rank skew = slowest minus fastest rank's own work; the others wait for the slowest",
    ),
    count_column(
        "slowest_rank",
        "the rank whose own work most often took longest: the one others wait for",
        first=0,
        most=MOST_DEVICES,
        value=lambda _, times: times.slowest_rank(),
    ),
    *with_ends("dp_scatter_ms", "DP: splitting the batch over the devices"),
    *with_ends("dp_replicate_ms", "DP: copying the model to every device"),
    *with_ends("dp_apply_ms", "DP: the replicas' forward"),
    *with_ends("dp_gather_ms", "DP: collecting the outputs on device 0"),
    *with_ends("dp_backward_ms", "DP: the replicas' backward (on GPUs with the reduction)"),
    *with_ends("dp_reduce_ms", "DP: adding the replicas' gradients on device 0 (empty on GPUs)"),
    *with_ends(
        "dp_device0_pct",
        "DP: share of the step in which only device 0 works",
        ends=(0, 100),
        shown="Only device 0 works = under DataParallel, outside apply and backward",
    ),
    number_column(
        "dp_device0_mem_ratio",
        "DP: `peak_mem_mib` of device 0 / mean of the other devices'; empty on a CPU",
        above=0,
        shown=f"Memory of device 0 / mean of the others ({TIMES})",
    ),
    count_column(
        "num_rounds",
        "rounds with a timed block of this case",
        first=0,
        value=lambda _, times: len(times.steps()),
        shown="Rounds = how often a case was measured, in turns with the others",
    ),
    count_column(
        "num_blocks",
        "blocks of this case, of all phases",
        first=0,
        value=lambda _, times: sum(map(len, times.step_ms.values())),
    ),
    *with_ends(
        "vs_ddp_default",
        "throughput over that of DDP's default on as many devices; the intervals hold all at once",
        above=0,
        shown=f"Against DDP's default ({TIMES}) =",
    ),
    number_column(
        "compile_s",
        "seconds that torch.compile took on rank 0, backward included, with its caches as found; "
        "empty for eager cases",
        above=0,
        shown="Compiling",
    ),
    count_column(
        "num_graphs", "graphs that torch.compile made; DDPOptimizer splits one at the buckets; empty if eager"
    ),
    count_column(
        "graph_breaks", "places where dynamo could not go on in one graph; empty for eager cases", first=0
    ),
)
