"""Checks of processor cores, memory and libraries. They change nothing, and create no CUDA context."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Mapping

import psutil

from ..common.cli import format_command, get_message_prefix
from ..machine import host as machine
from ..machine.host import CPUS, read_number, read_text
from ..machine.load import MAX_BUSY, MAX_STEAL
from .host import UNKNOWN, Check, CheckResult, Host, Status, find_worst, grade_value, make_result, try_reading

CORES_PER_GPU = 2
"""A rank on a GPU keeps one core busy launching kernels, and NCCL's proxy thread beside it (NCCL user guide,
"Environment variables": the proxy progresses network and shared-memory transfers from the CPU)."""

MIN_BUSY_BAD = 0.25
"""Share of the cores in other programs: five times the gate's default threshold."""

MIN_STEAL_BAD = 0.10
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

LOADER_BYTES = 2 * 2 * 64 * 3 * 224 * 224 * 4
"""Shared memory of a rank with 2 loader workers: each keeps 2 batches (DataLoader's prefetch_factor) of 64
float32 images of 224 pixels. Docker gives a container 64 MiB (docker run reference, --shm-size)."""

REINSTALL = "install torch and torchvision together, from one index: pip install -U torch torchvision"

SLOW_SETTINGS: tuple[tuple[str, tuple[str, ...], Status], ...] = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "bad"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), "bad"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "bad"),
    ("TORCH_DISTRIBUTED_DEBUG", ("INFO",), "caution"),
    ("NCCL_DEBUG", ("INFO", "TRACE"), "caution"),
    ("NCCL_P2P_DISABLE", ("1",), "caution"),
    ("NCCL_SHM_DISABLE", ("1",), "caution"),
    ("NCCL_IB_DISABLE", ("1",), "caution"),
)
"""Name, values, how grave. The bad ones make every launch wait, every allocation a cudaMalloc, every
collective checked by another (PyTorch notes "CUDA environment variables" and "Distributed: debugging"); the
others switch a transport off or write logs (NCCL user guide, "Environment variables")."""


def format_gib(value_bytes: float) -> str:
    """Write bytes as `1.5 GiB`, or `64 MiB` below one GiB."""
    size_mib = value_bytes / 2**20
    return f"{size_mib / 1024:.1f} GiB" if size_mib >= 1024 else f"{size_mib:.0f} MiB"


def check_cores(host: Host) -> CheckResult:
    """Check the cores this process may use against those present, and against what the devices need."""
    allowed, usable = len(host.allowed), host.usable_cores
    if usable is None:
        return UNKNOWN
    topology = [host.root / CPUS / f"cpu{core}/topology" for core in host.allowed]
    siblings = {read_text(folder / "thread_siblings_list") for folder in topology}
    physical = allowed if None in siblings else len(siblings)
    text, found = f"{round(usable, 2):g} of {os.cpu_count()} usable", list[CheckResult]()
    if host.quota is not None and host.quota < allowed:
        # sched-bwc in the Linux scheduler documents.
        what = f"{text}, {allowed} visible: the container is stopped for part of each period beyond its quota"
        advice = f"docker update --cpus {allowed} CONTAINER, or raise limits.cpu of Kubernetes"
        if host.quota >= 1 and not host.num_gpus:
            advice += f", or stay within it with --gpus up to {int(host.quota)}"
        found.append(CheckResult("bad" if host.quota < 1 else "caution", what, advice))
    if host.num_gpus:
        what = f"{text}, {CORES_PER_GPU * host.num_gpus} wanted for {host.num_gpus} GPU(s)"
        advice = "ask for more cores (Slurm --cpus-per-task, docker --cpus) or use fewer GPUs"
        found.append(make_result(_grade_room(usable, host.num_gpus), what, advice))
    elif usable < 2:
        what, advice = f"{text}: nothing can be scaled on it", "allow two cores or more (taskset, --cpus)"
        found.append(CheckResult("caution", what, advice))
    if not host.num_gpus and physical < allowed:
        what = f"{text}, hardware threads of {physical} cores: two devices can share one core"
        advice = f"{format_command('run', '--gpus', str(physical))} takes one thread of each core"
        found.append(CheckResult("caution", what, advice))
    worst = find_worst(answer.status for answer in found)
    return next((answer for answer in found if answer.status == worst), CheckResult("ok", text))


def _grade_room(num_cores: float, num_gpus: int) -> Status:
    """Grade whether so many cores can feed so many GPUs."""
    if num_cores < num_gpus:
        return "bad"
    return "caution" if num_cores < CORES_PER_GPU * num_gpus else "ok"


def check_governor(host: Host) -> CheckResult:
    """Check the frequency governor; only "performance" keeps one frequency target."""
    governors = machine.read_governors(host.root)
    if not governors:
        return UNKNOWN
    driver = read_text(host.root / CPUS / "cpu0/cpufreq/scaling_driver")
    text = f"{'/'.join(governors)}{f' ({driver})' if driver else ''}"
    if governors == ("performance",):
        return CheckResult("ok", text)
    advice = "sudo cpupower frequency-set -g performance; on a laptop also plug it in"
    if "powersave" in governors and driver is not None and driver not in SELF_SCALING_DRIVERS:
        return CheckResult("bad", f"{text}: held at the lowest frequency", advice)
    return CheckResult("caution", f"{text}: frequency follows the load, so blocks differ", advice)


def check_turbo(host: Host) -> CheckResult:
    """Check turbo: where cores stand in for devices, one busy core runs faster than many do."""
    cpus = host.root / CPUS
    no_turbo, boost = read_number(cpus / "intel_pstate/no_turbo"), read_number(cpus / "cpufreq/boost")
    is_on = no_turbo == 0 if no_turbo is not None else boost == 1 if boost is not None else None
    if is_on is None:
        return UNKNOWN
    text = "on: one busy core runs faster than all do, so scaling looks worse than it is"
    advice = "in /sys/devices/system/cpu: 1 into intel_pstate/no_turbo, or 0 into cpufreq/boost, as root"
    if is_on and not host.num_gpus:
        return CheckResult("caution", text, advice)
    return CheckResult("ok", "on" if is_on else "off")


def check_load(host: Host) -> CheckResult:
    """Check the cores that other programs use now, against what the devices need."""
    average, now = try_reading(lambda: os.getloadavg()[0]), host.load
    if now is None or not now.cores:
        return UNKNOWN
    text = f"{round(now.others, 2):g} of {now.cores} cores busy over {round(now.seconds, 2):g} s"
    text += "" if average is None else f", load average {average:.2f} over 1 min"
    if host.num_gpus:
        status = _grade_room(now.cores - now.others, host.num_gpus)
    else:
        status = grade_value(now.others / now.cores, caution=MAX_BUSY, bad=MIN_BUSY_BAD)
    if status == "ok" and average is not None and average > now.cores:
        status = "caution"
    return make_result(status, text, "stop other programs (top shows them), or wait")


def check_steal(host: Host) -> CheckResult:
    """Check the time that other guests of the same host took."""
    if host.load is None or not host.load.cores:
        return UNKNOWN
    share = host.load.steal / host.load.cores
    status = grade_value(share, caution=MAX_STEAL, bad=MIN_STEAL_BAD)
    text = f"{share:.1%} of the cores' time went to other virtual machines"
    advice = "use a dedicated or larger machine, or more rounds; compare by ratios only"
    return make_result(status, text, advice)


def check_numa(host: Host) -> CheckResult:
    """Check whether the kernel moves pages between NUMA nodes (sysctl/kernel, numa_balancing)."""
    if not host.nodes:
        return UNKNOWN
    if len(host.nodes) == 1:
        return CheckResult("ok", "1 node")
    num_allowed = sum(not cores.isdisjoint(host.allowed) for cores in host.nodes.values())
    text = f"{len(host.nodes)} nodes, cores allowed on {num_allowed}"
    if read_number(host.root / "proc/sys/kernel/numa_balancing"):
        text += "; the kernel moves pages between them while steps run"
        return CheckResult("caution", text, "sudo sysctl kernel.numa_balancing=0")
    return CheckResult("ok", text)


def check_free_memory(host: Host) -> CheckResult:
    """Check available memory, or the container's limit where that is less, against one rank per device."""
    memory, limit = try_reading(psutil.virtual_memory), machine.read_memory_limit_bytes(host.root)
    if memory is None:
        return UNKNOWN
    text = f"{format_gib(memory.available)} available of {format_gib(memory.total)}"
    room = float(memory.available)
    if limit is not None and limit < memory.total:
        text, room = f"{text}, container limit {format_gib(limit)}", min(room, limit)
    wanted = RANK_BYTES * host.num_devices
    status = grade_value(-room, caution=-2 * wanted, bad=-wanted)
    text += "" if status == "ok" else f"; {host.num_devices} ranks need {format_gib(wanted)} and more"
    advice = "free memory or raise the container's limit (docker --memory), or use fewer devices"
    return make_result(status, text, advice)


def check_shared_memory(room: tuple[int, int, int] | None, num_ranks: int) -> CheckResult:
    """Check /dev/shm, where loader workers put batches; `room` is total, used and free bytes."""
    if room is None:
        return UNKNOWN
    (total, _, free), wanted = room, num_ranks * LOADER_BYTES
    text, size = f"{format_gib(free)} free of {format_gib(total)}", math.ceil(2 * wanted / 2**30)
    if free >= wanted:
        return CheckResult("ok", text)
    text += f"; loader workers of {num_ranks} ranks need {format_gib(wanted)}, or they end with a bus error"
    advice = f"docker run --shm-size={size}g, or sudo mount -o remount,size={size}g /dev/shm"
    return CheckResult("caution", text, f"{advice}; else --data-workers 0")


def check_pressure(host: Host) -> CheckResult:
    """Check the time lost waiting for memory."""
    stalls = re.search(r"^some avg10=([0-9.]+)", read_text(host.root / "proc/pressure/memory") or "")
    if stalls is None:
        return UNKNOWN
    share = float(stalls[1])
    status = grade_value(share, caution=PRESSURE_CAUTION_PCT, bad=PRESSURE_BAD_PCT)
    advice = "stop programs that use much memory (top, then M)"
    return make_result(status, f"{share:.1f}% of the last 10 s", advice)


def check_huge_pages(host: Host) -> CheckResult | None:
    """Check whether ranks on CPU cores get memory that makes every launch equally fast."""
    pages = machine.read_huge_pages(host.root)
    if host.num_gpus:
        return None
    if pages is None:
        return UNKNOWN
    if pages == "never":
        return CheckResult(
            "caution",
            "never: launches of one program differ by percents, by the pages each gets",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        )
    return CheckResult("ok", f"{pages}: {get_message_prefix('run')}'s ranks on CPU cores use them")


def check_threads(env: Mapping[str, str], gpus: int, cores: float | None) -> CheckResult:
    """Check the OpenMP and MKL settings that every rank would inherit."""
    pinned = [key for key in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY") if env.get(key)]
    if pinned:
        text = ", ".join(f"{key}={env[key]}" for key in pinned)
        return CheckResult("caution", f"{text}: all ranks on the same cores", f"unset {' '.join(pinned)}")
    given = [env.get(key, "").split(",")[0].strip() for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    most = max((int(value) for value in given if value.isdecimal()), default=0)
    if not most:
        return CheckResult(
            "ok", f"OMP_NUM_THREADS unset: {get_message_prefix('run')} and torchrun give each rank 1"
        )
    if not gpus:
        return CheckResult("ok", f"{most} set; a CPU core standing in for a GPU runs 1 all the same")
    text = f"{most} per rank x {gpus} GPU(s)"
    if cores is not None and most * gpus > cores:
        fits = max(int(cores) // gpus, 1)
        over = f"{text} on {round(cores, 2):g} cores: ranks push each other off their cores"
        return CheckResult("caution", over, f"export OMP_NUM_THREADS={fits} MKL_NUM_THREADS={fits}")
    return CheckResult("ok", text)


def check_torch_build(host: Host) -> CheckResult:
    """Check whether torch loads and sees the GPUs that the driver shows."""
    torch, num_gpus = host.torch, len(host.gpus or ())
    if host.torch_error:
        return CheckResult("bad", f"does not load: {host.torch_error}", REINSTALL)
    cuda, nccl = torch.version.cuda, try_reading(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    built = f"CUDA {cuda}, NCCL {nccl or '?'}" if cuda else "built without CUDA"
    text = f"{torch.__version__}, Python {platform.python_version()}, {built}"
    if num_gpus and not cuda:
        return CheckResult("bad", f"{text}: it cannot use the {num_gpus} GPU(s) here", REINSTALL)
    if num_gpus and host.num_cuda_devices == 0:
        text += f": it sees none of the {num_gpus} GPU(s) that the driver shows"
        advice = "python -c 'import torch; torch.cuda.init()' says why, such as a driver too old for its CUDA"
        return CheckResult("bad", text, advice)
    return CheckResult("ok", text)


def check_settings(env: Mapping[str, str]) -> CheckResult:
    """Name environment variables for debugging that would be measured along with the step."""
    told = {key: value.strip().upper() for key, value in env.items()}
    found = {key: status for key, values, status in SLOW_SETTINGS if told.get(key) in values}
    if not found:
        return CheckResult("ok", "none that slow a step down")
    text = ", ".join(f"{key}={env[key]}" for key in found)
    return CheckResult(find_worst(found.values()), f"{text}: slower steps", f"unset {' '.join(found)}")


RESOURCE_CHECKS: dict[str, Check] = {
    "cores": check_cores,
    "governor": check_governor,
    "turbo": check_turbo,
    "load": check_load,
    "steal": check_steal,
    "NUMA": check_numa,
    "memory": check_free_memory,
    "shared memory": lambda host: check_shared_memory(host.shared_memory, host.num_devices),
    "memory stalls": check_pressure,
    "huge pages": check_huge_pages,
    "threads": lambda host: check_threads(host.env, host.num_gpus, host.usable_cores),
    "torch": check_torch_build,
    "settings": lambda host: check_settings(host.env),
}
