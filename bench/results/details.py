"""Details that explain the speed of a case: memory, GPUs, ranks, DataParallel's stages."""

from __future__ import annotations

from statistics import fmean

from ..common.numbers import TIMES
from ..plan.settings import MAX_DEVICES
from .columns import (
    Column,
    Metric,
    declare_count_column,
    declare_interval_columns,
    declare_number_column,
    declare_text_column,
)

DETAILS: tuple[Column, ...] = (
    Metric(
        "peak_mem_mib",
        "float",
        "most memory in use by this case's tensors, worst device; empty on CPU cores",
        above=0,
        shown="Peak memory = in tensors, on the device that needs most, without what libraries take "
        "(CUDA, NCCL, oneDNN)",
        written="{:,.0f} MiB",
        min_change=1.0,  # MiB: allocators and the C library round by about as much
    ),
    declare_number_column(
        "reserved_mem_mib",
        "most GPU memory that the allocator held for this case, in use or kept, worst device; empty on a CPU",
        above=0,
        shown="Reserved memory = what torch's allocator held for the tensors",
    ),
    declare_text_column(
        "mem_by_device_mib", "as `peak_mem_mib`, of each of the case's devices in their order, `/`-separated"
    ),
    declare_count_column(
        "device_allocs",
        "times that timed steps, those under `no_sync` included, asked a GPU's driver for memory: of all "
        "blocks and ranks; empty on a CPU",
        first=0,
        value=lambda _, times: sum(times.device_allocs) if times.device_allocs else None,
    ),
    *declare_interval_columns(
        "sm_clock_mhz",
        "SM clock in timed blocks, of the slowest GPU of the case",
        of_gpus=min,
        shown="SM clock",
    ),
    *declare_interval_columns("power_w", "power in timed blocks, all GPUs of the case together", of_gpus=sum),
    *declare_interval_columns(
        "joules_per_image",
        "`power_w` x step / units of the step: per image for image models",
        value=lambda case, times: {
            r: watts / case.compute_rate(times.get_steps()[r])
            for r, watts in times.get_values("power_w").items()
            if r in times.get_steps()
        },
        shown="Energy",
    ),
    declare_number_column(
        "temperature_c",
        "highest temperature of a GPU of the case in a timed block",
        value=lambda _, times: max(times.get_values("temperature_c").values(), default=None),
        of_gpus=max,
        shown="Temperature, highest",
    ),
    declare_number_column(
        "throttled_pct",
        "share of samples with clocks held down by heat or power, of the worst GPU, mean over blocks",
        value=lambda _, times: (
            fmean(found.values()) if (found := times.get_values("throttled_pct")) else None
        ),
        of_gpus=max,
        shown="Slowed (% of samples)",
    ),
    declare_text_column(
        "throttle_reasons",
        "by what, in NVML's words, the most frequent first",
        value=lambda _, times: times.name_throttle_reasons(),
        shown="Slowed by",
    ),
    *declare_interval_columns(
        "rank_skew_ms",
        "slowest minus fastest rank's own work per step (under `no_sync`)",
        shown="Rank skew = slowest minus fastest rank's own work; the others wait for the slowest",
    ),
    declare_count_column(
        "slowest_rank",
        "the rank whose own work most often took longest: the one others wait for",
        first=0,
        most=MAX_DEVICES,
        value=lambda _, times: times.find_slowest_rank(),
    ),
    *declare_interval_columns("dp_scatter_ms", "DP: splitting the batch over the devices"),
    *declare_interval_columns("dp_replicate_ms", "DP: copying the model to every device"),
    *declare_interval_columns("dp_apply_ms", "DP: the replicas' forward"),
    *declare_interval_columns("dp_gather_ms", "DP: collecting the outputs on device 0"),
    *declare_interval_columns("dp_backward_ms", "DP: the replicas' backward (on GPUs with the reduction)"),
    *declare_interval_columns(
        "dp_reduce_ms", "DP: adding the replicas' gradients on device 0 (empty on GPUs)"
    ),
    *declare_interval_columns(
        "dp_device0_pct",
        "DP: share of the step in which only device 0 works",
        ends=(0, 100),
        shown="Only device 0 works = time under DataParallel when only device 0 works (all stages except "
        "apply and backward)",
    ),
    declare_number_column(
        "dp_device0_mem_ratio",
        "DP: `peak_mem_mib` of device 0 / mean of the other devices'; empty on a CPU",
        above=0,
        shown=f"Memory of device 0 / mean of the others ({TIMES})",
    ),
    declare_count_column(
        "num_rounds",
        "rounds with a timed block of this case",
        first=0,
        value=lambda _, times: len(times.get_steps()),
        shown="Rounds = how often a case was measured, in turns with the others",
    ),
    declare_count_column(
        "num_blocks",
        "blocks of this case, of all phases",
        first=0,
        value=lambda _, times: sum(map(len, times.step_ms.values())),
    ),
    *declare_interval_columns(
        "vs_ddp_default",
        "throughput over that of DDP's default on as many devices, with simultaneous 95% intervals",
        above=0,
        shown=f"Against DDP's default ({TIMES}) =",
    ),
)
