"""Readings of machines that are not at hand, as the doctor would have taken them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from ddp_bench.bench.clock_reasons import ClockReason
from ddp_bench.bench.doctor.readings import (
    Cpu,
    Disk,
    Gpu,
    HostNetwork,
    HostReadings,
    Interface,
    Memory,
    NumaNode,
    Port,
    Software,
)
from ddp_bench.bench.gpus import GpuPair

GIB = 2**30
LOOPBACK = Interface(name="lo", is_up=True, is_loopback=True, addresses=("127.0.0.1", "::1"))
ETH0 = Interface(name="eth0", is_up=True, is_loopback=False, addresses=("192.0.2.7",), speed_mbit_per_s=10000)

H100 = Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    virtual=False,
    mig=False,
    numa_node=0,
    processes=(),
    busy_pct=0,
    used_mib=4,
    total_mib=81559,
    sm_clock_mhz=345,
    max_sm_clock_mhz=1980,
    clock_reasons=frozenset({ClockReason.IDLE}),
    power_limit_w=700.0,
    default_power_limit_w=700.0,
    ecc=True,
    uncorrected_errors=0,
    remap_failed=False,
    temperature_c=31,
    margin_c=56,
    persistence=True,
)


def nvlink_pairs(count: int) -> tuple[GpuPair, ...]:
    return tuple(
        GpuPair(first=a, second=b, nvlink=True, peer_access=True, path="SYS")
        for a, b in itertools.combinations(range(count), 2)
    )


def h100_box() -> HostReadings:
    """Eight H100 joined by NVSwitch, two sockets, InfiniBand, nothing else running."""
    return HostReadings(
        cpu=Cpu(
            present=112,
            allowed=112,
            allowed_physical=112,
            quota=math.inf,
            virtual=False,
            governors=("performance",),
            driver="intel_pstate",
            turbo=True,
            sample_s=0.5,
            busy_share=0.004,
            steal_share=0.0,
            steal_share_since_boot=0.0,
            load_1min=0.4,
            nodes=(
                NumaNode(number=0, num_cores=56, num_allowed=56),
                NumaNode(number=1, num_cores=56, num_allowed=56),
            ),
            numa_balancing=False,
        ),
        memory=Memory(
            total_bytes=2048 * GIB,
            available_bytes=1990 * GIB,
            limit_bytes=math.inf,
            swap_used_bytes=0,
            swapped_in_bytes=0,
            pressure_pct=0.0,
            shm_total_bytes=1024 * GIB,
            shm_free_bytes=1024 * GIB,
            huge_pages="madvise",
        ),
        disk=Disk(path="results", free_bytes=900 * GIB, writable=True),
        network=HostNetwork(
            interfaces=(LOOPBACK, ETH0),
            default_route="eth0",
            host_addresses=("192.0.2.7",),
            ports=(Port(name="mlx5_0", active=True, rate="400 Gb/sec (4X NDR)"),),
        ),
        software=Software(
            python="3.12.3",
            torch="2.11.0+cu128",
            torch_cuda="12.8",
            nccl="2.27.5",
            num_cuda_devices=8,
            torchvision="0.26.0",
            torchvision_needs="torch==2.11.0",
            driver="570.86.15",
            driver_cuda="12.8",
        ),
        gpus=tuple(replace(H100, index=i, numa_node=i // 4, temperature_c=29 + i) for i in range(8)),
        num_gpus_present=8,
        pairs=nvlink_pairs(8),
    )


def laptop() -> HostReadings:
    """No GPU, four cores with two hardware threads each, Intel, on battery."""
    box = h100_box()
    return replace(
        box,
        cpu=replace(
            box.cpu,
            present=8,
            allowed=8,
            allowed_physical=4,
            governors=("powersave",),
            busy_share=0.02,
            nodes=(NumaNode(number=0, num_cores=8, num_allowed=8),),
        ),
        memory=replace(box.memory, total_bytes=16 * GIB, available_bytes=9 * GIB),
        network=replace(box.network, ports=(), host_addresses=("127.0.1.1",)),
        software=replace(
            box.software, torch="2.11.0+cpu", torch_cuda="", nccl=None, num_cuda_devices=0, driver=None
        ),
        gpus=(),
        num_gpus_present=0,
        pairs=(),
    )


def container() -> HostReadings:
    """Of eight cores and 64 GiB 2.5 and 3 may be used; Docker's default /dev/shm; a disk that is full."""
    box = laptop()
    return replace(
        box,
        cpu=replace(box.cpu, quota=2.5, allowed_physical=8, governors=None, turbo=None, virtual=True),
        memory=replace(
            box.memory,
            total_bytes=64 * GIB,
            available_bytes=50 * GIB,
            limit_bytes=3 * GIB,
            shm_total_bytes=64 * 2**20,
            shm_free_bytes=64 * 2**20,
        ),
        disk=replace(box.disk, free_bytes=50 * 2**20),
    )


def virtual_gpu() -> HostReadings:
    """One vGPU in a virtual machine: NVML answers its name and little else."""
    box = h100_box()
    hidden = Gpu(index=0, name="GRID A100-10C", virtual=True, processes=(), used_mib=0)
    return replace(box, gpus=(hidden,), num_gpus_present=1, pairs=(), cpu=replace(box.cpu, nodes=None))


def with_gpu(machine: HostReadings, index: int, **changes: object) -> HostReadings:
    """The machine with one GPU changed."""
    assert machine.gpus is not None
    gpus = [replace(gpu, **changes) if gpu.index == index else gpu for gpu in machine.gpus]  # type: ignore[arg-type]
    return replace(machine, gpus=tuple(gpus))
