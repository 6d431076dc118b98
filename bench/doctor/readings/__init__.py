"""What was read of a machine. None means that it could not be read, `math.inf` that there is no limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_bench.bench.clock_reasons import ClockReason
from ddp_bench.bench.manifest import GpuPair


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """A part of memory and the cores next to it."""

    number: int
    num_cores: int
    num_allowed: int | None


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """Cores (logical, as the operating system counts them), how fast they run and who uses them.

    `busy_share` and `steal_share` are fractions of the allowed cores' time over `sample_s`.
    """

    present: int | None = None
    allowed: int | None = None
    allowed_physical: int | None = None
    quota: float | None = None
    virtual: bool | None = None
    governors: tuple[str, ...] | None = None
    driver: str | None = None
    turbo: bool | None = None
    sample_s: float | None = None
    busy_share: float | None = None
    steal_share: float | None = None
    steal_share_since_boot: float | None = None
    load_1min: float | None = None
    nodes: tuple[NumaNode, ...] | None = None
    numa_balancing: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Host memory; `limit_bytes` is the container's, `pressure_pct` the share of time some task stalled.

    `huge_pages` is when the kernel lends transparent ones: always, madvise or never.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: float | None = None
    swap_used_bytes: int | None = None
    swapped_in_bytes: int | None = None
    pressure_pct: float | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    huge_pages: str | None = None


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Where results would be written."""

    path: str
    free_bytes: int | None = None
    writable: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface; link-local addresses left out."""

    name: str
    is_up: bool
    is_loopback: bool
    addresses: tuple[str, ...] = ()
    speed_mbit_per_s: int | None = None


@dataclass(frozen=True, kw_only=True)
class Port:
    """An InfiniBand or RoCE port."""

    name: str
    active: bool | None = None
    rate: str | None = None


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """Interfaces, and what this host's name resolves to (empty: to nothing)."""

    interfaces: tuple[Interface, ...] | None = None
    default_route: str | None = None
    host_addresses: tuple[str, ...] | None = None
    ports: tuple[Port, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Software:
    """Versions; an `_error` is the first line of why it does not load. `torch_cuda` is empty without CUDA."""

    python: str | None = None
    torch: str | None = None
    torch_error: str | None = None
    torch_cuda: str | None = None
    nccl: str | None = None
    num_cuda_devices: int | None = None
    torchvision: str | None = None
    torchvision_error: str | None = None
    torchvision_needs: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process with a context on the GPU, other than this one."""

    pid: int
    used_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. `used_mib` leaves out what the driver keeps; `margin_c` is left until thermal slow-down."""

    index: int
    name: str | None = None
    uuid: str | None = None
    virtual: bool | None = None
    mig: bool | None = None
    numa_node: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    busy_pct: int | None = None
    used_mib: int | None = None
    total_mib: int | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    clock_reasons: frozenset[ClockReason] | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    ecc: bool | None = None
    uncorrected_errors: int | None = None
    remap_failed: bool | None = None
    temperature_c: int | None = None
    margin_c: int | None = None
    persistence: bool | None = None


@dataclass(frozen=True, kw_only=True)
class HostReadings:
    """Everything read. `gpus` are those that CUDA_VISIBLE_DEVICES leaves; empty where there is no driver."""

    cpu: Cpu = field(default_factory=Cpu)
    memory: Memory = field(default_factory=Memory)
    disk: Disk = field(default_factory=lambda: Disk(path="results"))
    network: HostNetwork = field(default_factory=HostNetwork)
    software: Software = field(default_factory=Software)
    gpus: tuple[Gpu, ...] | None = None
    num_gpus_present: int | None = None
    gpu_error: str | None = None
    pairs: tuple[GpuPair, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_gpus(self) -> int:
        """GPUs that training would use, as far as anything could tell."""
        return len(self.gpus or ()) or self.software.num_cuda_devices or 0

    @property
    def usable_cores(self) -> float | None:
        """Cores this process may use: its affinity, or the container's quota where that is less."""
        if self.cpu.allowed is None:
            return None
        return min(self.cpu.allowed, self.cpu.quota if self.cpu.quota is not None else self.cpu.allowed)

    @property
    def num_devices(self) -> int | None:
        """Ranks that `bench.run` would start by default at most: GPUs, else usable cores."""
        if self.num_gpus:
            return self.num_gpus
        return None if self.usable_cores is None else max(int(self.usable_cores), 1)
