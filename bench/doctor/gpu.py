"""Checks of GPUs, one line per question for all of them, and of the links between them, by NVML.

What a GPU does not report (NVML_ERROR_NOT_SUPPORTED) is None. Sets nothing.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pynvml

from ..machine.gpus import FAULTS, ClockReason, describe_pair, is_mig, read_clock_reasons
from ..machine.host import format_ranges, read_number
from .host import SEVERITY, UNKNOWN, Check, CheckResult, Gpu, Host, Status, make_result

MIN_BUSY_CAUTION_PCT = 5
"""GPU time that others may take before it can pass for a regression: the gate's default threshold."""

MIN_UNSEEN_CAUTION_MIB = 1024
"""Memory in use without a process to show for it, about two CUDA contexts: below, a driver's own rounding."""

SHARE_GPU = "sudo nvidia-smi -c DEFAULT"


def check_each_gpu(check: Callable[[Host, Gpu], CheckResult]) -> Check:
    """Make a check of every GPU: equal answers together, the gravest first, whose advice is the line's."""

    def check_all(host: Host) -> CheckResult | None:
        groups: dict[CheckResult, list[tuple[int, float | None]]] = defaultdict(list)
        for gpu in host.gpus or ():
            answer = check(host, gpu)
            groups[replace(answer, value=None)].append((gpu.index, answer.value))
        order = sorted(groups.items(), key=lambda group: -SEVERITY.index(group[0].status))
        parts = []
        for answer, members in order:
            shown = answer.text.replace(
                "{}", format_range([value for _, value in members if value is not None])
            )
            which = format_ranges([index for index, _ in members])
            parts.append(shown if len(order) == 1 else f"GPU {which}: {shown}")
        advice = next((answer.advice for answer, _ in order if answer.advice), "")
        return CheckResult(order[0][0].status, "; ".join(parts), advice) if order else None

    return check_all


def format_range(values: Sequence[float]) -> str:
    """Write `41-47`, or `41` where all agree."""
    if not values:
        return "?"
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}-{high}"


def check_models(host: Host) -> CheckResult:
    """Name the GPUs, and check whether they are equal, whole and real ones."""
    gpus = host.gpus
    if not gpus:
        return _explain_no_gpus(host)
    counts = Counter(gpu.name for gpu in gpus)
    text = ", ".join(f"{count} x {name}" for name, count in counts.items())
    if host.num_gpus_present > len(gpus):
        text += f" ({len(gpus)} of {host.num_gpus_present} visible)"
    if len(counts) > 1:
        return CheckResult("caution", f"{text}: the slowest sets the pace", "choose equal ones")
    if any(is_mig(gpu.handle) for gpu in gpus):
        mig = f"{text}, split by MIG: a part of a GPU, beside others' parts"
        return CheckResult("caution", mig, "measure on whole GPUs, with MIG mode off")
    virtual = pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
    if any(gpu.ask("nvmlDeviceGetVirtualizationMode") == virtual for gpu in gpus):
        shared = f"{text}, virtual: others can share it, and readings are hidden"
        return CheckResult("caution", shared, "compare by ratios only, or use a passed-through GPU")
    return CheckResult("ok", text)


def _explain_no_gpus(host: Host) -> CheckResult:
    seen = host.num_gpus
    if host.gpus is None:
        text = f"NVIDIA's driver library answers: {host.gpu_error}"
        if seen:
            return CheckResult("unknown", f"{text}; torch sees {seen} CUDA device(s)")
        return CheckResult("bad", text, "nvidia-smi says more; after a driver update, reboot")
    if seen:
        return CheckResult("unknown", f"torch sees {seen} device(s), NVIDIA's driver library none")
    if host.num_gpus_present:
        hidden = f"CUDA_VISIBLE_DEVICES hides all {host.num_gpus_present}: devices are CPU cores"
        return CheckResult("caution", hidden, "unset CUDA_VISIBLE_DEVICES to measure on GPUs")
    return CheckResult("ok", "no CUDA device: devices are CPU cores")


def check_use(_: Host, gpu: Gpu) -> CheckResult:
    """Check whether anyone else uses the GPU."""
    others = _read_others_memory(gpu)
    # Without what the driver keeps for itself: version 1 of this reading counts it as used.
    memory = gpu.ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
    used_mib = None if memory is None else int(memory.used) // 2**20
    rates = gpu.ask("nvmlDeviceGetUtilizationRates")
    busy_pct = None if rates is None else int(rates.gpu)
    busy = "share of time unknown" if busy_pct is None else "{}% busy"
    working = busy_pct is not None and busy_pct >= MIN_BUSY_CAUTION_PCT
    if others:
        who = ", ".join(f"{pid} ({size // 2**20} MiB)" if size else f"{pid}" for pid, size in others.items())
        advice = (
            "wait for it, or use other GPUs (CUDA_VISIBLE_DEVICES); ps -o user,cmd -p PID shows whose it is"
        )
        status: Status = "bad" if working else "caution"
        return CheckResult(status, f"used by process {who}, {busy}", advice, busy_pct)
    elsewhere = "ask who else runs on this GPU: another container or virtual machine can"
    if working:
        return CheckResult("bad", "{}% busy, by a process not visible from here", elsewhere, busy_pct)
    if used_mib is not None and used_mib >= MIN_UNSEEN_CAUTION_MIB:
        text = "{} MiB in use by a process not visible from here"
        return CheckResult("caution", text, elsewhere, used_mib)
    if others is None and busy_pct is None:
        return UNKNOWN
    return CheckResult("ok", f"no other process, {busy}", value=busy_pct)


def _read_others_memory(gpu: Gpu) -> dict[int, int | None] | None:
    """Read the memory in bytes of processes other than this one that compute or draw, by number."""
    kinds = ("Compute", "Graphics")
    lists = [gpu.ask(f"nvmlDeviceGet{kind}RunningProcesses") for kind in kinds]
    if all(found is None for found in lists):
        return None
    used = {entry.pid: entry.usedGpuMemory for found in lists for entry in found or ()}
    used.pop(os.getpid(), None)
    return used


def check_clocks(_: Host, gpu: Gpu) -> CheckResult:
    """Check the SM clock by what holds it down."""
    clock = gpu.ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)
    most = gpu.ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM)
    reasons = read_clock_reasons(gpu.handle)
    if clock is None:
        return UNKNOWN
    text = f"{{}} of {most or '?'} MHz"
    if reasons is None:
        return CheckResult("unknown", f"{text}, why not readable here", value=clock)
    held = f"{text}, held down by {', '.join(sorted(reasons - {ClockReason.IDLE}))}"
    if reasons & FAULTS:
        advice = "look at cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        return CheckResult("bad", held, advice, clock)
    if ClockReason.POWER_CAP in reasons:
        return CheckResult("caution", held, "raise the power limit, see the line GPU power", clock)
    if reasons - {ClockReason.IDLE}:  # the others are someone's choice
        advice = "compare only runs at these clocks; for the default: sudo nvidia-smi -rac and -rgc"
        return CheckResult("caution", held, advice, clock)
    return CheckResult("ok", f"{text}{', idle' if ClockReason.IDLE in reasons else ''}", value=clock)


def check_power(_: Host, gpu: Gpu) -> CheckResult:
    """Check the enforced power limit against the maker's default; the half watt is for rounding."""
    limit_mw = gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
    default_mw = gpu.ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if limit_mw is None or default_mw is None:
        return UNKNOWN
    limit_w, default_w = limit_mw / 1000, default_mw / 1000
    default = f"default {default_w:.0f} W"
    if limit_w < default_w - 0.5:
        advice = f"sudo nvidia-smi -pl {default_w:.0f}; else compare only runs with this limit"
        return CheckResult("caution", f"capped at {{}} W, {default}", advice, limit_w)
    return CheckResult("ok", f"limit {{}} W, {default}", value=limit_w)


def compute_mode(host: Host, gpu: Gpu) -> CheckResult:
    """Check whether several processes may use the GPU, as ranks and DP in turn do."""
    mode = gpu.ask("nvmlDeviceGetComputeMode")
    if mode is None:
        return UNKNOWN
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return CheckResult("bad", "PROHIBITED: no process may use it", SHARE_GPU)
    if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and not host.has_mps:
        only = "EXCLUSIVE_PROCESS: one process at a time, so DP cannot be measured beside DDP"
        return CheckResult("caution", only, SHARE_GPU)
    return CheckResult("ok", "several processes may use it")


def check_memory_errors(_: Host, gpu: Gpu) -> CheckResult:
    """Check errors since the driver was loaded, but for corrected ones: they need no action."""
    ecc = gpu.ask("nvmlDeviceGetEccMode")
    which = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    remapped = gpu.ask("nvmlDeviceGetRemappedRows")
    if (remapped and remapped[3]) or gpu.ask("nvmlDeviceGetTotalEccErrors", *which):
        advice = "drain the machine and reset the GPU; replace it if they come back"
        return CheckResult("bad", "memory errors that ECC could not correct", advice)
    if ecc is None:
        return CheckResult("unknown", "ECC not reported by this GPU")
    return CheckResult("ok", f"none, ECC {'on' if ecc[0] else 'off'}")


def check_links(host: Host) -> CheckResult | None:
    """Check how GPUs reach each other: the slowest link sets the pace of an all-reduce.

    NVLink is fastest, then PCIe, then host memory, the only way between GeForce cards without NVLink.
    """
    gpus = host.gpus
    if not gpus:
        return None
    if len(gpus) == 1:
        return CheckResult("ok", "one GPU: nothing to link")
    both = itertools.combinations(gpus, 2)
    pairs = [describe_pair(a.index, b.index, a.handle, b.handle) for a, b in both]
    if any(not pair.nvlink and pair.peer_access is None for pair in pairs):
        return UNKNOWN
    ways = Counter("NVLink" if p.nvlink else "PCIe" if p.peer_access else "host memory" for p in pairs)
    text = ", ".join(f"{count} of {len(pairs)} pairs by {way}" for way, count in ways.items())
    by_design = all("GeForce" in gpu.name for gpu in gpus)
    is_slow = len(ways) > 1 or ("host memory" in ways and not by_design)
    advice = "choose equal links (nvidia-smi topo -m, CUDA_VISIBLE_DEVICES), or turn PCIe ACS and IOMMU off"
    return make_result("caution" if is_slow else "ok", text, advice)


def check_affinity(host: Host, gpu: Gpu) -> CheckResult:
    """Check whether this process may use cores on the GPU's own NUMA node, that of its PCI slot."""
    pci, node = gpu.ask("nvmlDeviceGetPciInfo"), None
    if pci is not None:
        # NVML writes the PCI domain with eight digits, the kernel with four.
        slot = host.root / "sys/bus/pci/devices" / str(pci.busId).lower()[-12:]
        node = read_number(slot / "numa_node")
    if len(host.nodes) == 1:
        return CheckResult("ok", "one NUMA node")
    if node not in host.nodes or not host.allowed:  # -1 where the firmware does not say
        return UNKNOWN
    if not host.nodes[node] & host.allowed:
        advice = (
            "allow cores of every GPU's node (Slurm: --gpus-per-node with --cpus-per-task, or "
            "--exclusive; docker: --cpuset-cpus)"
        )
        return CheckResult("caution", f"on NUMA node {node}, where no core is allowed", advice)
    return CheckResult("ok", f"on NUMA node {node}")


GPU_CHECKS: dict[str, Check] = {
    "GPUs": check_models,
    "GPU use": check_each_gpu(check_use),
    "GPU clocks": check_each_gpu(check_clocks),
    "GPU power": check_each_gpu(check_power),
    "GPU compute mode": check_each_gpu(compute_mode),
    "GPU memory errors": check_each_gpu(check_memory_errors),
    "GPU links": check_links,
    "GPU affinity": check_each_gpu(check_affinity),
}
