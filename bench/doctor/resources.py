"""Checks of processor cores and memory. They change nothing."""

from __future__ import annotations

import math
import os
import re
import shutil

from .. import machine
from ..cli import speaker
from ..machine import CPUS, read_number, read_text
from ..resolve import BATCH_BY_MEMORY
from ..sharing import MOST_BUSY, MOST_STEAL
from .host import (
    SEVERITY,
    UNKNOWN,
    Answer,
    Check,
    Host,
    Status,
    attempt,
    figures,
    graded,
    judged,
)

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
"""Of a run's default batch on a GPU, float32."""

BATCHES_IN_FLIGHT = 2 * 2
"""`--data-workers` 2 times DataLoader's default prefetch_factor 2 (torch.utils.data)."""


def gib(value_bytes: float) -> str:
    """Write bytes as `1.5 GiB`, or `64 MiB` below one GiB."""
    size_mib = value_bytes / 2**20
    return f"{size_mib / 1024:.1f} GiB" if size_mib >= 1024 else f"{size_mib:.0f} MiB"


def cores(host: Host) -> Answer:
    """Check the cores this process may use against those present, and against what the devices need."""
    present = host.cpu.keep("present", os.cpu_count())
    allowed = host.cpu.keep("allowed", len(host.allowed) or None)
    topology = [host.root / CPUS / f"cpu{core}/topology" for core in host.allowed]
    siblings = {read_text(folder / "thread_siblings_list") for folder in topology}
    physical = None if None in siblings else len(siblings) or None
    host.cpu.keep("allowed_physical", physical)
    usable = host.usable_cores
    if usable is None or allowed is None:
        return UNKNOWN
    text, found = f"{figures(usable)} of {present or '?'} usable", list[Answer]()
    if host.quota is not None and host.quota < allowed:
        # sched-bwc in the Linux scheduler documents.
        what = f"{text}, {allowed} visible: the container is stopped for part of each period beyond its quota"
        advice = "raise the container's CPU limit (docker --cpus, Kubernetes limits.cpu)"
        if host.quota >= 1 and not host.num_gpus:
            advice += f", or stay within it with --gpus up to {int(host.quota)}"
        found.append(Answer("bad" if host.quota < 1 else "caution", what, advice))
    if host.num_gpus:
        what = f"{text}, {CORES_PER_GPU * host.num_gpus} wanted for {host.num_gpus} GPU(s)"
        advice = "ask for more cores (Slurm --cpus-per-task, docker --cpus) or use fewer GPUs"
        found.append(judged(_room(usable, host.num_gpus), what, advice))
    elif usable < 2:
        what, advice = f"{text}: nothing can be scaled on it", "allow two cores or more (taskset, --cpus)"
        found.append(Answer("caution", what, advice))
    if not host.num_gpus and physical is not None and physical < allowed:
        what = f"{text}, hardware threads of {physical} cores: two devices can share one core"
        advice = f"--gpus up to {physical}, under taskset with one thread of each core (lscpu -e)"
        found.append(Answer("caution", what, advice))
    return max(found, key=lambda f: SEVERITY.index(f.status), default=Answer("ok", text))


def _room(num_cores: float, num_gpus: int) -> Status:
    """Grade whether so many cores can feed so many GPUs."""
    if num_cores < num_gpus:
        return "bad"
    return "caution" if num_cores < CORES_PER_GPU * num_gpus else "ok"


def _hidden(host: Host) -> Answer:
    return Answer("unknown", "not shown in this virtual machine") if host.virtual else UNKNOWN


def governor(host: Host) -> Answer:
    """Check the frequency governor; only "performance" keeps one frequency target."""
    governors = host.cpu.keep("governors", machine.governors(host.root))
    drivers = sorted((host.root / CPUS).glob("cpu[0-9]*/cpufreq/scaling_driver"))
    driver = host.cpu.keep("driver", read_text(drivers[0]) if drivers else None)
    if not governors:
        return _hidden(host)
    text = f"{'/'.join(governors)}{f' ({driver})' if driver else ''}"
    if governors == ("performance",):
        return Answer("ok", text)
    advice = "sudo cpupower frequency-set -g performance; on a laptop also plug it in"
    if "powersave" in governors and driver is not None and driver not in SELF_SCALING_DRIVERS:
        return Answer("bad", f"{text}: held at the lowest frequency", advice)
    return Answer("caution", f"{text}: frequency follows the load, so blocks differ", advice)


def turbo(host: Host) -> Answer:
    """Check turbo: where cores stand in for devices, one busy core runs faster than many do."""
    cpus = host.root / CPUS
    no_turbo, boost = read_number(cpus / "intel_pstate/no_turbo"), read_number(cpus / "cpufreq/boost")
    is_on = no_turbo == 0 if no_turbo is not None else boost == 1 if boost is not None else None
    if host.cpu.keep("turbo", is_on) is None:
        return _hidden(host)
    if is_on and not host.num_gpus:
        return Answer(
            "caution",
            "on: one busy core runs faster than all do, so scaling looks worse than it is",
            "in /sys/devices/system/cpu: 1 into intel_pstate/no_turbo, or 0 into cpufreq/boost, as root",
        )
    return Answer("ok", "on" if is_on else "off")


def load(host: Host) -> Answer:
    """Check the cores that other programs use now, against what the devices need."""
    share, num_cores = host.cpu.keep("busy_share", host.shares.busy), len(host.allowed)
    average = host.cpu.keep("load_1min", attempt(lambda: os.getloadavg()[0]))
    if share is None or not num_cores:
        return UNKNOWN
    busy = share * num_cores
    text = f"{figures(busy)} of {num_cores} cores busy over {figures(host.sample_s)} s"
    text += "" if average is None else f", load average {average:.2f} over 1 min"
    if host.num_gpus:
        status = _room(num_cores - busy, host.num_gpus)
    else:
        status = graded(share, caution=MOST_BUSY, bad=BUSY_BAD)
    if status == "ok" and average is not None and average > num_cores:
        status = "caution"
    return judged(status, text, "stop other programs (top shows them), or wait")


def steal(host: Host) -> Answer:
    """Check the time that other guests of the same host took."""
    now = host.cpu.keep("steal_share", host.shares.steal)
    ever = host.cpu.keep("steal_share_since_boot", host.shares.steal_since_boot)
    if now is None or ever is None:
        return UNKNOWN
    text = f"{now:.1%} over {figures(host.sample_s)} s, {ever:.1%} since start-up"
    status = graded(max(now, ever), caution=MOST_STEAL, bad=STEAL_BAD)
    text += "" if status == "ok" else ": other virtual machines take this one's cores"
    advice = "use a dedicated or larger machine, or more rounds; compare by ratios only"
    return judged(status, text, advice)


def numa(host: Host) -> Answer:
    """Check whether the kernel moves pages between NUMA nodes (sysctl/kernel, numa_balancing)."""
    nodes = [
        {"number": number, "num_cores": len(cores), "num_allowed": len(cores & host.allowed)}
        for number, cores in host.nodes.items()
    ]
    host.cpu.keep("nodes", nodes or None)
    balancing = read_number(host.root / "proc/sys/kernel/numa_balancing")
    host.cpu.keep("numa_balancing", None if balancing is None else balancing > 0)
    if not nodes:
        return UNKNOWN
    if len(nodes) < 2:
        return Answer("ok", "1 node")
    text = f"{len(nodes)} nodes, cores allowed on {sum(node['num_allowed'] > 0 for node in nodes)}"
    if balancing:
        text += "; the kernel moves pages between them while steps run"
        return Answer("caution", text, "sudo sysctl kernel.numa_balancing=0")
    return Answer("ok", text)


def free_memory(host: Host) -> Answer:
    """Check available memory, or the container's limit where that is less, against one rank per device."""
    total = host.memory.keep("total_bytes", host.room and int(host.room.total))
    available = host.memory.keep("available_bytes", host.room and int(host.room.available))
    limit = host.memory.keep("limit_bytes", machine.memory_limit_bytes(host.root))
    if total is None or available is None:
        return UNKNOWN
    text, room = f"{gib(available)} available of {gib(total)}", float(available)
    if limit is not None and limit < total:
        text, room = f"{text}, container limit {gib(limit)}", min(room, limit)
    wanted = RANK_BYTES * host.num_devices
    status = graded(-room, caution=-2 * wanted, bad=-wanted)
    text += "" if status == "ok" else f"; {host.num_devices} ranks need {gib(wanted)} and more"
    advice = "free memory or raise the container's limit (docker --memory), or use fewer devices"
    return judged(status, text, advice)


def pressure(host: Host) -> Answer:
    """Check the time lost waiting for memory."""
    stalls = re.search(r"^some avg10=([0-9.]+)", read_text(host.root / "proc/pressure/memory") or "")
    share = host.memory.keep("pressure_pct", float(stalls[1]) if stalls else None)
    if share is None:
        return UNKNOWN
    status = graded(share, caution=PRESSURE_CAUTION_PCT, bad=PRESSURE_BAD_PCT)
    advice = "stop programs that use much memory (top, then M)"
    return judged(status, f"{share:.1f}% of the last 10 s", advice)


def swap(host: Host) -> Answer:
    """Check swap: pages put away once do no harm, reading them back does."""
    used = host.memory.keep("swap_used_bytes", host.swap and int(host.swap.used))
    read_back = host.memory.keep("swapped_in_bytes", host.swapped_in)
    if used is None:
        return UNKNOWN
    text = f"{gib(used)} in use" + (f", {gib(read_back)} being read back" if read_back else "")
    advice = "free memory; what is in swap comes back when it is next used"
    return judged("caution" if read_back else "ok", text, advice)


def huge_pages(host: Host) -> Answer | None:
    """Check whether ranks on CPU cores get memory that makes every launch equally fast."""
    pages = host.memory.keep("huge_pages", machine.huge_pages(host.root))
    if host.num_gpus:
        return None
    if pages is None:
        return UNKNOWN
    if pages == "never":
        return Answer(
            "caution",
            "never: launches of one program differ by percents, by the pages each gets",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        )
    return Answer("ok", f"{pages}: {speaker('run')}'s ranks on CPU cores use them")


def shared_memory(host: Host) -> Answer:
    """Check /dev/shm: DataLoader workers, which a run of `--data FOLDER` has, hand over batches in it."""
    room = attempt(lambda: shutil.disk_usage(host.root / "dev/shm"))
    host.memory.keep("shm_total_bytes", room and room.total)
    host.memory.keep("shm_free_bytes", room and room.free)
    if room is None:
        return UNKNOWN
    least_mib = min((gpu.memory_mib("total") or 0 for gpu in host.gpus or ()), default=0)
    batch = next(size for least_gib, size in BATCH_BY_MEMORY if least_mib >= 1024 * least_gib)
    wanted = host.num_devices * BATCHES_IN_FLIGHT * batch * IMAGE_BYTES
    text = f"{gib(room.free)} free of {gib(room.total)}"
    if room.free > max(wanted, SHM_BYTES):
        return Answer("ok", text)
    return Answer(
        "caution",
        f"{text}; loader workers with default batches fill {gib(wanted)}",
        f"docker run --shm-size={math.ceil(2 * wanted / 2**30)}g or --ipc=host; else --data-workers 0",
    )


RESOURCE_CHECKS: dict[str, Check] = {
    "cores": cores,
    "governor": governor,
    "turbo": turbo,
    "load": load,
    "steal": steal,
    "NUMA": numa,
    "memory": free_memory,
    "memory stalls": pressure,
    "swap": swap,
    "huge pages": huge_pages,
    "shared memory": shared_memory,
}
