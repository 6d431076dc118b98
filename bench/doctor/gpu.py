"""Checks of GPUs, one line per question for all of them, and of the links between them, by NVML.

What a GPU does not report (NVML_ERROR_NOT_SUPPORTED) is None. Sets nothing.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pynvml

from ..machine.gpus import FAULTS, ClockReason, clock_reasons, is_mig
from ..machine.host import ranges, read_number
from .host import SEVERITY, UNKNOWN, Answer, Check, Gpu, Host, Status, judged

BUSY_CAUTION_PCT = 5
"""GPU time that others may take before it can pass for a regression: the gate's default threshold."""

UNSEEN_CAUTION_MIB = 1024
"""Memory in use without a process to show for it, about two CUDA contexts: below, a driver's own rounding."""

SHARE_GPU = "sudo nvidia-smi -c DEFAULT"


def per_gpu(check: Callable[[Host, Gpu], Answer]) -> Check:
    """Make a check of every GPU: equal answers together, the gravest first, whose advice is the line's."""

    def checked(host: Host) -> Answer | None:
        groups: dict[Answer, list[tuple[int, float | None]]] = defaultdict(list)
        for gpu in host.gpus or ():
            answer = check(host, gpu)
            groups[replace(answer, value=None)].append((gpu.index, answer.value))
        order = sorted(groups.items(), key=lambda group: -SEVERITY.index(group[0].status))
        parts = []
        for answer, members in order:
            shown = answer.text.replace("{}", span([value for _, value in members if value is not None]))
            which = ranges([index for index, _ in members])
            parts.append(shown if len(order) == 1 else f"GPU {which}: {shown}")
        advice = next((answer.advice for answer, _ in order if answer.advice), "")
        return Answer(order[0][0].status, "; ".join(parts), advice) if order else None

    return checked


def span(values: Sequence[float]) -> str:
    """Write `41-47`, or `41` where all agree."""
    if not values:
        return "?"
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}-{high}"


def models(host: Host) -> Answer:
    """Name the GPUs, and check whether they are equal, whole and real ones."""
    gpus = host.gpus
    if not gpus:
        return _without_gpus(host)
    counts = Counter(gpu.name for gpu in gpus)
    text = ", ".join(f"{count} x {name}" for name, count in counts.items())
    if host.num_gpus_present > len(gpus):
        text += f" ({len(gpus)} of {host.num_gpus_present} visible)"
    if len(counts) > 1:
        return Answer("caution", f"{text}: the slowest sets the pace", "choose equal ones")
    if any(is_mig(gpu.handle) for gpu in gpus):
        mig = f"{text}, split by MIG: a part of a GPU, beside others' parts"
        return Answer("caution", mig, "measure on whole GPUs, with MIG mode off")
    virtual = pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
    if any(gpu.ask("nvmlDeviceGetVirtualizationMode") == virtual for gpu in gpus):
        shared = f"{text}, virtual: others can share it, and readings are hidden"
        return Answer("caution", shared, "compare by ratios only, or use a passed-through GPU")
    return Answer("ok", text)


def _without_gpus(host: Host) -> Answer:
    seen = host.num_gpus
    if host.gpus is None:
        text = f"NVIDIA's driver library answers: {host.gpu_error}"
        if seen:
            return Answer("unknown", f"{text}; torch sees {seen} CUDA device(s)")
        return Answer("bad", text, "nvidia-smi says more; after a driver update, reboot")
    if seen:
        return Answer("unknown", f"torch sees {seen} device(s), NVIDIA's driver library none")
    if host.num_gpus_present:
        hidden = f"CUDA_VISIBLE_DEVICES hides all {host.num_gpus_present}: devices are CPU cores"
        return Answer("caution", hidden, "unset CUDA_VISIBLE_DEVICES to measure on GPUs")
    return Answer("ok", "no CUDA device: devices are CPU cores")


def use(_: Host, gpu: Gpu) -> Answer:
    """Check whether anyone else uses the GPU."""
    others = _others(gpu)
    # Without what the driver keeps for itself: version 1 of this reading counts it as used.
    memory = gpu.ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
    used_mib = None if memory is None else int(memory.used) // 2**20
    rates = gpu.ask("nvmlDeviceGetUtilizationRates")
    busy_pct = None if rates is None else int(rates.gpu)
    busy = "share of time unknown" if busy_pct is None else "{}% busy"
    working = busy_pct is not None and busy_pct >= BUSY_CAUTION_PCT
    if others:
        who = ", ".join(f"{pid} ({size // 2**20} MiB)" if size else f"{pid}" for pid, size in others.items())
        advice = (
            "wait for it, or use other GPUs (CUDA_VISIBLE_DEVICES); ps -o user,cmd -p PID shows whose it is"
        )
        status: Status = "bad" if working else "caution"
        return Answer(status, f"used by process {who}, {busy}", advice, busy_pct)
    elsewhere = "ask who else runs on this GPU: another container or virtual machine can"
    if working:
        return Answer("bad", "{}% busy, by a process not visible from here", elsewhere, busy_pct)
    if used_mib is not None and used_mib >= UNSEEN_CAUTION_MIB:
        text = "{} MiB in use by a process not visible from here"
        return Answer("caution", text, elsewhere, used_mib)
    if others is None and busy_pct is None:
        return UNKNOWN
    return Answer("ok", f"no other process, {busy}", value=busy_pct)


def _others(gpu: Gpu) -> dict[int, int | None] | None:
    """The memory in bytes of processes other than this one that compute or draw, by number."""
    kinds = ("Compute", "Graphics")
    lists = [gpu.ask(f"nvmlDeviceGet{kind}RunningProcesses") for kind in kinds]
    if all(found is None for found in lists):
        return None
    used = {entry.pid: entry.usedGpuMemory for found in lists for entry in found or ()}
    used.pop(os.getpid(), None)
    return used


def clocks(_: Host, gpu: Gpu) -> Answer:
    """Check the SM clock by what holds it down."""
    clock = gpu.ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)
    most = gpu.ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM)
    reasons = clock_reasons(gpu.handle)
    if clock is None:
        return UNKNOWN
    text = f"{{}} of {most or '?'} MHz"
    if reasons is None:
        return Answer("unknown", f"{text}, why not readable here", value=clock)
    held = f"{text}, held down by {', '.join(sorted(reasons - {ClockReason.IDLE}))}"
    if reasons & FAULTS:
        advice = "look at cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        return Answer("bad", held, advice, clock)
    if ClockReason.POWER_CAP in reasons:
        return Answer("caution", held, "raise the power limit, see the line GPU power", clock)
    if reasons - {ClockReason.IDLE}:  # the others are someone's choice
        advice = "compare only runs at these clocks; for the default: sudo nvidia-smi -rac and -rgc"
        return Answer("caution", held, advice, clock)
    return Answer("ok", f"{text}{', idle' if ClockReason.IDLE in reasons else ''}", value=clock)


def power(_: Host, gpu: Gpu) -> Answer:
    """Check the enforced power limit against the maker's default; the half watt is for rounding."""
    limit_mw = gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
    default_mw = gpu.ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if limit_mw is None or default_mw is None:
        return UNKNOWN
    limit_w, default_w = limit_mw / 1000, default_mw / 1000
    default = f"default {default_w:.0f} W"
    if limit_w < default_w - 0.5:
        advice = f"sudo nvidia-smi -pl {default_w:.0f}; else compare only runs with this limit"
        return Answer("caution", f"capped at {{}} W, {default}", advice, limit_w)
    return Answer("ok", f"limit {{}} W, {default}", value=limit_w)


def compute_mode(host: Host, gpu: Gpu) -> Answer:
    """Check whether several processes may use the GPU, as ranks and DP in turn do."""
    mode = gpu.ask("nvmlDeviceGetComputeMode")
    if mode is None:
        return UNKNOWN
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return Answer("bad", "PROHIBITED: no process may use it", SHARE_GPU)
    if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and not host.has_mps:
        only = "EXCLUSIVE_PROCESS: one process at a time, so DP cannot be measured beside DDP"
        return Answer("caution", only, SHARE_GPU)
    return Answer("ok", "several processes may use it")


def memory_errors(_: Host, gpu: Gpu) -> Answer:
    """Check errors since the driver was loaded, but for corrected ones: they need no action."""
    ecc = gpu.ask("nvmlDeviceGetEccMode")
    which = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    remapped = gpu.ask("nvmlDeviceGetRemappedRows")
    if (remapped and remapped[3]) or gpu.ask("nvmlDeviceGetTotalEccErrors", *which):
        advice = "drain the machine and reset the GPU; replace it if they come back"
        return Answer("bad", "memory errors that ECC could not correct", advice)
    if ecc is None:
        return Answer("unknown", "ECC not reported by this GPU")
    return Answer("ok", f"none, ECC {'on' if ecc[0] else 'off'}")


def links(host: Host) -> Answer | None:
    """Check how GPUs reach each other: the slowest link sets the pace of an all-reduce.

    NVLink is fastest, then PCIe, then host memory, the only way between GeForce cards without NVLink.
    """
    gpus, pairs = host.gpus, host.pairs
    if not gpus:
        return None
    if len(gpus) == 1:
        return Answer("ok", "one GPU: nothing to link")
    if not pairs or any(not pair.nvlink and pair.peer_access is None for pair in pairs):
        return UNKNOWN
    ways = Counter("NVLink" if p.nvlink else "PCIe" if p.peer_access else "host memory" for p in pairs)
    text = ", ".join(f"{count} of {len(pairs)} pairs by {way}" for way, count in ways.items())
    by_design = all("GeForce" in gpu.name for gpu in gpus)
    is_slow = len(ways) > 1 or ("host memory" in ways and not by_design)
    advice = "choose equal links (nvidia-smi topo -m, CUDA_VISIBLE_DEVICES), or turn PCIe ACS and IOMMU off"
    return judged("caution" if is_slow else "ok", text, advice)


def affinity(host: Host, gpu: Gpu) -> Answer:
    """Check whether this process may use cores on the GPU's own NUMA node, that of its PCI slot."""
    pci, node = gpu.ask("nvmlDeviceGetPciInfo"), None
    if pci is not None:
        # NVML writes the PCI domain with eight digits, the kernel with four.
        slot = host.root / "sys/bus/pci/devices" / str(pci.busId).lower()[-12:]
        node = read_number(slot / "numa_node")
    if len(host.nodes) == 1:
        return Answer("ok", "one NUMA node")
    if node not in host.nodes or not host.allowed:  # -1 where the firmware does not say
        return UNKNOWN
    if not host.nodes[node] & host.allowed:
        advice = (
            "allow cores of every GPU's node (Slurm: --gpus-per-node with --cpus-per-task, or "
            "--exclusive; docker: --cpuset-cpus)"
        )
        return Answer("caution", f"on NUMA node {node}, where no core is allowed", advice)
    return Answer("ok", f"on NUMA node {node}")


GPU_CHECKS: dict[str, Check] = {
    "GPUs": models,
    "GPU use": per_gpu(use),
    "GPU clocks": per_gpu(clocks),
    "GPU power": per_gpu(power),
    "GPU compute mode": per_gpu(compute_mode),
    "GPU memory errors": per_gpu(memory_errors),
    "GPU links": links,
    "GPU affinity": per_gpu(affinity),
}
