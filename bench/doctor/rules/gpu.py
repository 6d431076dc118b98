"""Findings about GPUs, one line per question for all of them, and about the links between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_bench.bench.clock_reasons import CHOICES, FAULTS, ClockReason
from ddp_bench.bench.doctor.readings import Gpu, HostReadings
from ddp_bench.bench.doctor.rules import SEVERITY, Finding, Status, judged, unknown, worst
from ddp_bench.bench.sysfs import ranges

BUSY_CAUTION_PCT = 5
"""GPU time that others may take before it can pass for a regression: the gate's default threshold."""

UNSEEN_CAUTION_MIB = 1024
"""Memory in use without a process to show for it, about two CUDA contexts: below, a driver's own rounding."""

MARGIN_CAUTION_C = 10
"""Degrees to thermal slow-down on a GPU that should be idle. Own rule: training adds tens of degrees."""


@dataclass(frozen=True)
class GpuFinding:
    """One GPU's answer to one question; `{}` in `text` stands for `value`: equal answers share a line."""

    status: Status
    text: str
    advice: str = ""
    value: float | None = None


NOT_READABLE = GpuFinding("unknown", "not readable here")


def gpu_findings(machine: HostReadings) -> list[Finding]:
    """Judge the GPUs, their links and the cores next to them; one line where there is no GPU."""
    name, gpus = "GPUs", machine.gpus
    if gpus is None and machine.gpu_error is None:
        return [unknown(name)]
    if gpus is None:
        seen = f"; torch sees {machine.num_gpus} CUDA device(s)" if machine.num_gpus else ""
        text = f"NVIDIA's driver library answers: {machine.gpu_error}{seen}"
        advice = "" if machine.num_gpus else "nvidia-smi says more; after a driver update, reboot"
        return [Finding(name, "unknown" if machine.num_gpus else "bad", text, advice)]
    if not gpus and machine.num_gpus:
        return [unknown(name, f"torch sees {machine.num_gpus} device(s), NVIDIA's driver library none")]
    if not gpus and machine.num_gpus_present:
        hidden = f"CUDA_VISIBLE_DEVICES hides all {machine.num_gpus_present}: devices are CPU cores"
        return [Finding(name, "caution", hidden, "unset CUDA_VISIBLE_DEVICES to measure on GPUs")]
    if not gpus:
        return [Finding(name, "ok", "no CUDA device: devices are CPU cores")]
    rules: dict[str, Callable[[Gpu], GpuFinding]] = {
        "GPU use": use,
        "GPU clocks": clocks,
        "GPU power": power,
        "GPU memory errors": memory_errors,
        "GPU heat": heat,
        "GPU persistence": persistence,
    }
    each = (per_gpu(name, gpus, rule) for name, rule in rules.items())
    return [models(machine, gpus), *each, links(machine, gpus), affinity(machine, gpus)]


def per_gpu(name: str, gpus: Sequence[Gpu], rule: Callable[[Gpu], GpuFinding]) -> Finding:
    """Make one line for all GPUs: equal answers together, the gravest first, whose advice is the line's."""
    groups: dict[tuple[Status, str, str], list[tuple[int, float | None]]] = defaultdict(list)
    for gpu in gpus:
        verdict = rule(gpu)
        groups[verdict.status, verdict.text, verdict.advice].append((gpu.index, verdict.value))
    order = sorted(groups.items(), key=lambda group: -SEVERITY.index(group[0][0]))
    parts = []
    for (_, text, _), members in order:
        shown = text.replace("{}", span([value for _, value in members if value is not None]))
        parts.append(shown if len(order) == 1 else f"GPU {ranges([index for index, _ in members])}: {shown}")
    advice = next((key[2] for key, _ in order if key[2]), "")
    return Finding(name, worst(key[0] for key in groups), "; ".join(parts), advice)


def span(values: Sequence[float]) -> str:
    """Write `41-47`, or `41` where all agree."""
    if not values:
        return "?"
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}-{high}"


def models(machine: HostReadings, gpus: Sequence[Gpu]) -> Finding:
    """Name the GPUs, and judge whether they are equal, whole and real ones."""
    counts = Counter(gpu.name or "name unknown" for gpu in gpus)
    text = ", ".join(f"{count} x {name}" for name, count in counts.items())
    if machine.num_gpus_present is not None and machine.num_gpus_present > len(gpus):
        text += f" ({len(gpus)} of {machine.num_gpus_present} visible)"
    if len(counts) > 1:
        return Finding("GPUs", "caution", f"{text}: the slowest sets the pace", "choose equal ones")
    if any(gpu.mig for gpu in gpus):
        mig = f"{text}, split by MIG: a part of a GPU, beside others' parts"
        return Finding("GPUs", "caution", mig, "measure on whole GPUs, with MIG mode off")
    if any(gpu.virtual for gpu in gpus):
        shared = f"{text}, virtual: others can share it, and readings are hidden"
        return Finding("GPUs", "caution", shared, "compare by ratios only, or use a passed-through GPU")
    return Finding("GPUs", "ok", text)


def use(gpu: Gpu) -> GpuFinding:
    """Judge whether anyone else uses the GPU."""
    busy = "share of time unknown" if gpu.busy_pct is None else "{}% busy"
    if gpu.processes:
        who = ", ".join(f"{p.pid}{f' ({p.used_mib} MiB)' if p.used_mib else ''}" for p in gpu.processes)
        working = gpu.busy_pct is not None and gpu.busy_pct >= BUSY_CAUTION_PCT
        text = f"used by process {who}, {busy}"
        advice = (
            "wait for it, or use other GPUs (CUDA_VISIBLE_DEVICES); ps -o user,cmd -p PID shows whose it is"
        )
        return GpuFinding("bad" if working else "caution", text, advice, gpu.busy_pct)
    elsewhere = "ask who else runs on this GPU: another container or virtual machine can"
    if gpu.busy_pct is not None and gpu.busy_pct >= BUSY_CAUTION_PCT:
        return GpuFinding("bad", "{}% busy, by a process not visible from here", elsewhere, gpu.busy_pct)
    if gpu.used_mib is not None and gpu.used_mib >= UNSEEN_CAUTION_MIB:
        return GpuFinding(
            "caution", "{} MiB in use by a process not visible from here", elsewhere, gpu.used_mib
        )
    if gpu.processes is None and gpu.busy_pct is None:
        return NOT_READABLE
    return GpuFinding("ok", f"no other process, {busy}", value=gpu.busy_pct)


def clocks(gpu: Gpu) -> GpuFinding:
    """Judge the SM clock by what holds it down."""
    if gpu.sm_clock_mhz is None:
        return NOT_READABLE
    text = f"{{}} of {gpu.max_sm_clock_mhz or '?'} MHz"
    if gpu.clock_reasons is None:
        return GpuFinding("unknown", f"{text}, why not readable here", value=gpu.sm_clock_mhz)
    held = f"{text}, held down by {', '.join(sorted(gpu.clock_reasons - {ClockReason.IDLE}))}"
    if gpu.clock_reasons & FAULTS:
        advice = "look at cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        return GpuFinding("bad", held, advice, gpu.sm_clock_mhz)
    if ClockReason.POWER_CAP in gpu.clock_reasons:
        return GpuFinding("caution", held, "raise the power limit, see the line GPU power", gpu.sm_clock_mhz)
    if gpu.clock_reasons & CHOICES:
        advice = "compare only runs at these clocks; for the default: sudo nvidia-smi -rac and -rgc"
        return GpuFinding("caution", held, advice, gpu.sm_clock_mhz)
    idle = ", idle" if ClockReason.IDLE in gpu.clock_reasons else ""
    return GpuFinding("ok", f"{text}{idle}", value=gpu.sm_clock_mhz)


def power(gpu: Gpu) -> GpuFinding:
    """Judge the enforced power limit against the maker's default; the half watt is for rounding."""
    if gpu.power_limit_w is None or gpu.default_power_limit_w is None:
        return NOT_READABLE
    default = f"default {gpu.default_power_limit_w:.0f} W"
    if gpu.power_limit_w < gpu.default_power_limit_w - 0.5:
        advice = (
            f"sudo nvidia-smi -pl {gpu.default_power_limit_w:.0f}; else compare only runs with this limit"
        )
        return GpuFinding("caution", f"capped at {{}} W, {default}", advice, gpu.power_limit_w)
    return GpuFinding("ok", f"limit {{}} W, {default}", value=gpu.power_limit_w)


def memory_errors(gpu: Gpu) -> GpuFinding:
    """Judge errors since the driver was loaded, but for corrected ones: they need no action."""
    if gpu.uncorrected_errors or gpu.remap_failed:
        advice = "drain the machine and reset the GPU; replace it if they come back"
        return GpuFinding("bad", "memory errors that ECC could not correct", advice)
    if gpu.ecc is None:
        return GpuFinding("unknown", "ECC not reported by this GPU")
    return GpuFinding("ok", f"none, ECC {'on' if gpu.ecc else 'off'}")


def heat(gpu: Gpu) -> GpuFinding:
    """Judge the temperature by the degrees left to thermal slow-down, both from NVML."""
    if gpu.temperature_c is None:
        return NOT_READABLE
    if gpu.margin_c is None:
        return GpuFinding("unknown", "{} C, slow-down temperature not readable here", value=gpu.temperature_c)
    advice = "look at fans and airflow, or let it cool"
    if gpu.margin_c <= 0:
        return GpuFinding("bad", "{} C, at thermal slow-down", advice, gpu.temperature_c)
    if gpu.margin_c <= MARGIN_CAUTION_C:
        text = f"{{}} C, within {MARGIN_CAUTION_C} C of thermal slow-down"
        return GpuFinding("caution", text, advice, gpu.temperature_c)
    return GpuFinding("ok", "{} C", value=gpu.temperature_c)


def persistence(gpu: Gpu) -> GpuFinding:
    """Judge persistence: without it the driver unloads an idle GPU (NVIDIA, "Driver Persistence")."""
    if gpu.persistence is None:
        return NOT_READABLE
    if gpu.persistence:
        return GpuFinding("ok", "on")
    advice = "sudo nvidia-smi -pm 1, or run nvidia-persistenced"
    return GpuFinding("caution", "off: the driver unloads between runs, and settings with it", advice)


def links(machine: HostReadings, gpus: Sequence[Gpu]) -> Finding:
    """Judge how GPUs reach each other: the slowest link sets the pace of an all-reduce.

    NVLink is fastest, then PCIe, then host memory, the only way between GeForce cards without NVLink.
    """
    name, pairs = "GPU links", machine.pairs
    if len(gpus) == 1:
        return Finding(name, "ok", "one GPU: nothing to link")
    if not pairs or any(not pair.nvlink and pair.peer_access is None for pair in pairs):
        return unknown(name)
    ways = Counter("NVLink" if p.nvlink else "PCIe" if p.peer_access else "host memory" for p in pairs)
    text = ", ".join(f"{count} of {len(pairs)} pairs by {way}" for way, count in ways.items())
    by_design = all("GeForce" in (gpu.name or "") for gpu in gpus)
    is_slow = len(ways) > 1 or ("host memory" in ways and not by_design)
    advice = "choose equal links (nvidia-smi topo -m, CUDA_VISIBLE_DEVICES), or turn PCIe ACS and IOMMU off"
    return judged(name, "caution" if is_slow else "ok", text, advice)


def affinity(machine: HostReadings, gpus: Sequence[Gpu]) -> Finding:
    """Judge whether this process may use cores on each GPU's own NUMA node."""
    nodes = machine.cpu.nodes

    def near(gpu: Gpu) -> GpuFinding:
        if nodes is None or (gpu.numa_node is None and len(nodes) > 1):
            return NOT_READABLE
        if len(nodes) < 2:
            return GpuFinding("ok", "one NUMA node")
        node = next((node for node in nodes if node.number == gpu.numa_node), None)
        if node is None or node.num_allowed is None:
            return NOT_READABLE
        if not node.num_allowed:
            advice = (
                "allow cores of every GPU's node (Slurm: --gpus-per-node with --cpus-per-task, or "
                "--exclusive; docker: --cpuset-cpus)"
            )
            return GpuFinding("caution", f"on NUMA node {node.number}, where no core is allowed", advice)
        return GpuFinding("ok", f"on NUMA node {node.number}")

    return per_gpu("GPU affinity", gpus, near)
