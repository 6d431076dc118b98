"""Findings about processor cores, memory and disk."""

from __future__ import annotations

import math

from ddp_bench.bench.doctor.readings import Cpu, Disk, HostReadings, Memory
from ddp_bench.bench.doctor.rules import SEVERITY, Finding, Status, figures, gib, graded, judged, unknown
from ddp_bench.bench.findings.trust import MOST_BUSY, MOST_STEAL
from ddp_bench.bench.resolve import BATCH_BY_MEMORY

CORES_PER_GPU = 2
"""A rank on a GPU keeps one core busy launching kernels, and NCCL's proxy thread beside it (NCCL user guide,
"Environment variables": the proxy progresses network and shared-memory transfers from the CPU)."""

BUSY_BAD = 0.25
"""Share of the cores in other programs: five times the gate's default threshold."""

STEAL_BAD = 0.10
"""Share of time that went to other guests: twice the gate's default threshold."""

SELF_SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose "powersave" still follows the load (Linux admin-guide/pm, intel_pstate and amd-pstate, active
mode); under any other driver "powersave" is the lowest frequency, always (admin-guide/pm/cpufreq)."""

RANK_BYTES = 2**30
"""Host memory of one rank: 0.7 GiB with a CUDA build of torch imported, 0.9 GiB training ResNet-18 (measured,
resident set). Less than this per device and ranks are killed; less than twice leaves no page cache."""

PRESSURE_CAUTION_PCT, PRESSURE_BAD_PCT = 5.0, 25.0
"""Share of the last 10 s in which some task waited for memory (Linux accounting/psi, "some avg10"): the
gate's default threshold, and five times it."""

SHM_BYTES = 64 * 2**20
"""Docker's default size of /dev/shm (docker run reference, --shm-size), less than two batches."""

IMAGE_BYTES = 3 * 224 * 224 * 4
"""Of `bench.run`'s default batch on a GPU, float32."""

BATCHES_IN_FLIGHT = 2 * 2
"""`--data-workers` 2 times DataLoader's default prefetch_factor 2 (torch.utils.data)."""

DISK_BAD_BYTES, DISK_CAUTION_BYTES = 100 * 2**20, 2 * 2**30
"""Own rule: tables, journal and page of a run stay below 100 MiB; with --trace about 10 MiB per case and
rank, so a sweep of 20 cases on 8 ranks writes 1.6 GiB."""


def resource_findings(machine: HostReadings) -> list[Finding]:
    """Judge cores, memory and disk."""
    cpu, memory = machine.cpu, machine.memory
    return [
        cores(machine),
        governor(cpu),
        turbo(cpu, on_cpu=not machine.num_gpus),
        load(machine),
        steal(cpu),
        numa(cpu),
        free_memory(machine),
        pressure(memory),
        swap(memory),
        *([] if machine.num_gpus else [huge_pages(memory)]),
        shared_memory(machine),
        disk(machine.disk),
    ]


def cores(machine: HostReadings) -> Finding:
    """Judge the cores this process may use against those present, and against what the devices need."""
    usable = machine.usable_cores
    if usable is None:
        return unknown("cores")
    text = f"{figures(usable)} of {machine.cpu.present or '?'} usable"
    problems = [_quota(machine, text), _too_few(machine, usable, text), _hardware_threads(machine, text)]
    found = [problem for problem in problems if problem is not None]
    return max(found, key=lambda f: SEVERITY.index(f.status), default=Finding("cores", "ok", text))


def _quota(machine: HostReadings, text: str) -> Finding | None:
    """Find a container's quota below the cores it sees: sched-bwc in the Linux scheduler documents."""
    quota, allowed = machine.cpu.quota, machine.cpu.allowed
    if quota is None or allowed is None or quota >= allowed:
        return None
    what = f"{text}, {allowed} visible: the container is stopped for part of each period beyond its quota"
    advice = "raise the container's CPU limit (docker --cpus, Kubernetes limits.cpu)"
    if quota >= 1 and not machine.num_gpus:
        advice += f", or stay within it with --gpus up to {int(quota)}"
    return Finding("cores", "bad" if quota < 1 else "caution", what, advice)


def _too_few(machine: HostReadings, usable: float, text: str) -> Finding | None:
    if not machine.num_gpus:
        what, advice = f"{text}: nothing can be scaled on it", "allow two cores or more (taskset, --cpus)"
        return Finding("cores", "caution", what, advice) if usable < 2 else None
    status = _room(usable, machine.num_gpus)
    what = f"{text}, {CORES_PER_GPU * machine.num_gpus} wanted for {machine.num_gpus} GPU(s)"
    advice = "ask for more cores (Slurm --cpus-per-task, docker --cpus) or use fewer GPUs"
    return judged("cores", status, what, advice)


def _hardware_threads(machine: HostReadings, text: str) -> Finding | None:
    allowed, physical = machine.cpu.allowed, machine.cpu.allowed_physical
    if machine.num_gpus or allowed is None or physical is None or physical >= allowed:
        return None
    what = f"{text}, hardware threads of {physical} cores: two devices can share one core"
    advice = f"--gpus up to {physical}, under taskset with one thread of each core (lscpu -e)"
    return Finding("cores", "caution", what, advice)


def _room(num_cores: float, num_gpus: int) -> Status:
    """Grade whether so many cores can feed so many GPUs."""
    if num_cores < num_gpus:
        return "bad"
    return "caution" if num_cores < CORES_PER_GPU * num_gpus else "ok"


def _hidden(name: str, cpu: Cpu) -> Finding:
    return unknown(name, "not shown in this virtual machine") if cpu.virtual else unknown(name)


def governor(cpu: Cpu) -> Finding:
    """Judge the frequency governor; only "performance" keeps one frequency target."""
    name = "governor"
    if not cpu.governors:
        return _hidden(name, cpu)
    text = f"{'/'.join(cpu.governors)}{f' ({cpu.driver})' if cpu.driver else ''}"
    if cpu.governors == ("performance",):
        return Finding(name, "ok", text)
    advice = "sudo cpupower frequency-set -g performance; on a laptop also plug it in"
    if "powersave" in cpu.governors and cpu.driver is not None and cpu.driver not in SELF_SCALING_DRIVERS:
        return Finding(name, "bad", f"{text}: held at the lowest frequency", advice)
    return Finding(name, "caution", f"{text}: frequency follows the load, so blocks differ", advice)


def turbo(cpu: Cpu, *, on_cpu: bool) -> Finding:
    """Judge turbo: where cores stand in for devices, one busy core runs faster than many do."""
    name = "turbo"
    if cpu.turbo is None:
        return _hidden(name, cpu)
    if cpu.turbo and on_cpu:
        return Finding(
            name,
            "caution",
            "on: one busy core runs faster than all do, so scaling looks worse than it is",
            "in /sys/devices/system/cpu: 1 into intel_pstate/no_turbo, or 0 into cpufreq/boost, as root",
        )
    return Finding(name, "ok", "on" if cpu.turbo else "off")


def load(machine: HostReadings) -> Finding:
    """Judge the cores that other programs use now, against what the devices need."""
    name, cpu, usable = "load", machine.cpu, machine.usable_cores
    if cpu.busy_share is None or cpu.allowed is None or usable is None:
        return unknown(name)
    busy = cpu.busy_share * cpu.allowed
    text = f"{figures(busy)} of {cpu.allowed} cores busy over {figures(cpu.sample_s or 0)} s"
    if cpu.load_1min is not None:
        text += f", load average {cpu.load_1min:.2f} over 1 min"
    if machine.num_gpus:
        status = _room(cpu.allowed - busy, machine.num_gpus)
    else:
        status = graded(cpu.busy_share, caution=MOST_BUSY, bad=BUSY_BAD)
    if status == "ok" and cpu.load_1min is not None and cpu.load_1min > cpu.allowed:
        status = "caution"
    return judged(name, status, text, "stop other programs (top shows them), or wait")


def steal(cpu: Cpu) -> Finding:
    """Judge the time that other guests of the same host took."""
    if cpu.steal_share is None:
        return unknown("steal")
    ever = cpu.steal_share_since_boot
    text = f"{cpu.steal_share:.1%} over {figures(cpu.sample_s or 0)} s"
    text += "" if ever is None else f", {ever:.1%} since start-up"
    status = graded(max(cpu.steal_share, ever or 0.0), caution=MOST_STEAL, bad=STEAL_BAD)
    text += "" if status == "ok" else ": other virtual machines take this one's cores"
    return judged(
        "steal", status, text, "use a dedicated or larger machine, or more rounds; compare by ratios only"
    )


def numa(cpu: Cpu) -> Finding:
    """Judge whether the kernel moves pages between NUMA nodes (sysctl/kernel, numa_balancing)."""
    if cpu.nodes is None:
        return unknown("NUMA")
    count = len(cpu.nodes)
    if count < 2:
        return Finding("NUMA", "ok", "1 node")
    used = [node for node in cpu.nodes if node.num_allowed]
    text = f"{count} nodes, cores allowed on {len(used)}"
    if cpu.numa_balancing:
        return Finding(
            "NUMA",
            "caution",
            f"{text}; the kernel moves pages between them while steps run",
            "sudo sysctl kernel.numa_balancing=0",
        )
    return Finding("NUMA", "ok", text)


def free_memory(machine: HostReadings) -> Finding:
    """Judge available memory, or the container's limit where that is less, against one rank per device."""
    memory = machine.memory
    if memory.available_bytes is None:
        return unknown("memory")
    text = f"{gib(memory.available_bytes)} available"
    text += f" of {gib(memory.total_bytes)}" if memory.total_bytes else ""
    room: float = memory.available_bytes
    if memory.limit_bytes is not None and memory.limit_bytes < (memory.total_bytes or math.inf):
        text += f", container limit {gib(memory.limit_bytes)}"
        room = min(room, memory.limit_bytes)
    count = machine.num_devices or 1
    status = graded(-room, caution=-2 * RANK_BYTES * count, bad=-RANK_BYTES * count)
    text += "" if status == "ok" else f"; {count} ranks need {gib(RANK_BYTES * count)} and more"
    advice = "free memory or raise the container's limit (docker --memory), or use fewer devices"
    return judged("memory", status, text, advice)


def pressure(memory: Memory) -> Finding:
    """Judge the time lost waiting for memory."""
    if memory.pressure_pct is None:
        return unknown("memory stalls")
    status = graded(memory.pressure_pct, caution=PRESSURE_CAUTION_PCT, bad=PRESSURE_BAD_PCT)
    advice = "stop programs that use much memory (top, then M)"
    return judged("memory stalls", status, f"{memory.pressure_pct:.1f}% of the last 10 s", advice)


def swap(memory: Memory) -> Finding:
    """Judge swap: pages put away once do no harm, reading them back does."""
    if memory.swap_used_bytes is None:
        return unknown("swap")
    status: Status = "caution" if memory.swapped_in_bytes else "ok"
    text = f"{gib(memory.swap_used_bytes)} in use"
    text += f", {gib(memory.swapped_in_bytes)} being read back" if memory.swapped_in_bytes else ""
    return judged("swap", status, text, "free memory; what is in swap comes back when it is next used")


def huge_pages(memory: Memory) -> Finding:
    """Judge whether ranks on CPU cores get memory that makes every launch equally fast."""
    name = "huge pages"
    if memory.huge_pages is None:
        return unknown(name)
    if memory.huge_pages == "never":
        return Finding(
            name,
            "caution",
            "never: launches of one program differ by percents, by the pages each gets",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        )
    return Finding(name, "ok", f"{memory.huge_pages}: bench.run's ranks on CPU cores use them")


def shared_memory(machine: HostReadings) -> Finding:
    """Judge /dev/shm: DataLoader workers, which a run of `--data FOLDER` has, hand over batches in it."""
    free, total = machine.memory.shm_free_bytes, machine.memory.shm_total_bytes
    if free is None or total is None:
        return unknown("shared memory")
    least_mib = min((gpu.total_mib or 0 for gpu in machine.gpus or ()), default=0)
    batch = next(size for least_gib, size in BATCH_BY_MEMORY if least_mib >= 1024 * least_gib)
    wanted = (machine.num_devices or 1) * BATCHES_IN_FLIGHT * batch * IMAGE_BYTES
    text = f"{gib(free)} free of {gib(total)}"
    if free > max(wanted, SHM_BYTES):
        return Finding("shared memory", "ok", text)
    return Finding(
        "shared memory",
        "caution",
        f"{text}; loader workers with default batches fill {gib(wanted)}",
        f"docker run --shm-size={math.ceil(2 * wanted / 2**30)}g or --ipc=host; else --data-workers 0",
    )


def disk(place: Disk) -> Finding:
    """Judge the room for results."""
    if place.writable is False:
        return Finding("disk", "bad", f"{place.path} cannot be written to", "name another folder with --out")
    if place.free_bytes is None:
        return unknown("disk", f"{place.path}: not readable here")
    status = graded(-place.free_bytes, caution=-DISK_CAUTION_BYTES, bad=-DISK_BAD_BYTES)
    advice = "free space, or name a folder elsewhere with --out"
    return judged("disk", status, f"{gib(place.free_bytes)} free for {place.path}", advice)
