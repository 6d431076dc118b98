"""Findings about memory, swap, shared memory, disk and threads. Pure."""

from __future__ import annotations

import math

from bench.doctor.finding import Finding, figures, gib, graded, unknown
from bench.doctor.machine import Disk, HostReadings, Memory

RANK_BYTES = 2**30
"""Host memory of one rank: 0.7 GiB with a CUDA build of torch imported, 0.9 GiB training ResNet-18 (measured,
resident set). Less than this per device and ranks are killed; less than twice leaves no page cache."""

PRESSURE_CAUTION_PCT, PRESSURE_BAD_PCT = 5.0, 25.0
"""Share of the last 10 s in which some task waited for memory (Linux accounting/psi, "some avg10"): the
gate's default threshold, and five times it."""

SWAP_CAUTION_SHARE = 0.01
"""Swap in use, as a share of memory. Own rule: pages put away once do no harm; reading them back does."""

SHM_BAD_BYTES = 64 * 2**20
"""Docker's default size of /dev/shm (docker run reference, --shm-size), less than two batches."""

BATCH_BYTES = 64 * 3 * 224 * 224 * 4
"""`bench.run`'s default batch on a GPU, float32."""

BATCHES_IN_FLIGHT = 2 * 2
"""`--data-workers` 2 times DataLoader's default prefetch_factor 2 (torch.utils.data)."""

DISK_BAD_BYTES, DISK_CAUTION_BYTES = 100 * 2**20, 2 * 2**30
"""Own rule: tables, journal and page of a run stay below 100 MiB; with --trace about 10 MiB per case and
rank, so a sweep of 20 cases on 8 ranks writes 1.6 GiB."""


def host_findings(machine: HostReadings) -> list[Finding]:
    """Lines about memory, swap, huge pages, /dev/shm, results disk and thread settings."""
    memory = machine.memory
    return [
        free_memory(machine),
        pressure(memory),
        swap(memory),
        *([] if machine.num_gpus else [huge_pages(memory)]),
        shared_memory(machine),
        disk(machine.disk),
        threads(machine),
    ]


def free_memory(machine: HostReadings) -> Finding:
    """Available memory, or the container's limit where that is less, against one rank per device."""
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
    if status == "ok":
        return Finding("memory", status, text)
    return Finding(
        "memory",
        status,
        f"{text}; {count} ranks need {gib(RANK_BYTES * count)} and more",
        "free memory or raise the container's limit (docker --memory), or use fewer devices",
    )


def pressure(memory: Memory) -> Finding:
    """Time lost waiting for memory."""
    if memory.pressure_pct is None:
        return unknown("memory stalls")
    status = graded(memory.pressure_pct, caution=PRESSURE_CAUTION_PCT, bad=PRESSURE_BAD_PCT)
    advice = "stop programs that use much memory (top, then M)" if status != "ok" else ""
    return Finding("memory stalls", status, f"{memory.pressure_pct:.1f}% of the last 10 s", advice)


def swap(memory: Memory) -> Finding:
    """Swap in use, and whether pages are being read back right now."""
    if memory.swap_used_bytes is None:
        return unknown("swap")
    text = f"{gib(memory.swap_used_bytes)} in use" if memory.swap_used_bytes else "none in use"
    advice = "free memory; what is in swap comes back when it is next used"
    if memory.swapped_in_bytes:
        return Finding("swap", "bad", f"{text}, {gib(memory.swapped_in_bytes)} being read back", advice)
    if memory.total_bytes and memory.swap_used_bytes >= SWAP_CAUTION_SHARE * memory.total_bytes:
        return Finding("swap", "caution", text, advice)
    return Finding("swap", "ok", text)


def huge_pages(memory: Memory) -> Finding:
    """Whether ranks on CPU cores get memory that makes every launch equally fast."""
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
    """The shared-memory file system: DataLoader workers hand over batches in it, NCCL talks through it."""
    free, total = machine.memory.shm_free_bytes, machine.memory.shm_total_bytes
    if free is None or total is None:
        return unknown("shared memory")
    wanted = (machine.num_devices or 1) * BATCHES_IN_FLIGHT * BATCH_BYTES
    text = f"{gib(free)} free of {gib(total)}"
    if free > max(wanted, SHM_BAD_BYTES):
        return Finding("shared memory", "ok", text)
    return Finding(
        "shared memory",
        "bad" if free <= SHM_BAD_BYTES else "caution",
        f"{text}; loader workers with default batches fill {gib(wanted)}",
        f"docker run --shm-size={math.ceil(2 * wanted / 2**30)}g or --ipc=host; else --data-workers 0",
    )


def disk(place: Disk) -> Finding:
    """Room for results."""
    if place.writable is False:
        return Finding("disk", "bad", f"{place.path} cannot be written to", "name another folder with --out")
    if place.free_bytes is None:
        return unknown("disk", f"{place.path}: not readable here")
    status = graded(-place.free_bytes, caution=-DISK_CAUTION_BYTES, bad=-DISK_BAD_BYTES)
    advice = "free space, or name a folder elsewhere with --out" if status != "ok" else ""
    return Finding("disk", status, f"{gib(place.free_bytes)} free for {place.path}", advice)


def threads(machine: HostReadings) -> Finding:
    """OpenMP and MKL settings that every rank would inherit."""
    name, env = "threads", machine.env
    pinned = [key for key in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY") if env.get(key)]
    if pinned:
        what = ", ".join(f"{key}={env[key]}" for key in pinned)
        return Finding(
            name, "caution", f"{what}: every rank is pinned to the same cores", f"unset {' '.join(pinned)}"
        )
    most = 0
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = env.get(key)
        if not value:
            continue
        first = value.split(",")[0].strip()
        if not first.isdecimal() or int(first) < 1:
            return Finding(name, "caution", f"{key}={value} is no number of threads", f"export {key}=1")
        most = max(most, int(first))
    if not most:
        return Finding(name, "ok", "OMP_NUM_THREADS unset: bench.run and torchrun give each rank 1")
    if not machine.num_gpus:
        return Finding(name, "ok", f"{most} set; a CPU core standing in for a GPU runs 1 all the same")
    text = f"{most} per rank x {machine.num_gpus} GPU(s)"
    if machine.usable_cores is not None and most * machine.num_gpus > machine.usable_cores:
        fits = max(int(machine.usable_cores) // machine.num_gpus, 1)
        over = f"{text} on {figures(machine.usable_cores)} cores: ranks push each other off their cores"
        return Finding(name, "caution", over, f"export OMP_NUM_THREADS={fits} MKL_NUM_THREADS={fits}")
    return Finding(name, "ok", text)
