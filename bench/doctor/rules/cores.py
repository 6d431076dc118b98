"""Findings about processor cores: how many, how fast, who else uses them. Pure."""

from __future__ import annotations

from bench.doctor.finding import SEVERITY, Finding, Status, figures, graded, unknown
from bench.doctor.machine import Cpu, HostReadings

CORES_PER_GPU = 2
"""A rank on a GPU keeps one core busy launching kernels, and NCCL's proxy thread beside it (NCCL user guide,
"Environment variables": the proxy progresses network and shared-memory transfers from the CPU)."""

BUSY_CAUTION, BUSY_BAD = 0.05, 0.25
"""Share of the cores that other programs use while every core stands in for a device. 5% is the gate's
default threshold: a load of that size can pass for a regression; 25% is five times it."""

STEAL_CAUTION, STEAL_BAD = 0.02, 0.10
"""Share of time the hypervisor gave to other guests (proc(5), "steal"). 2% is `--precision-target`'s
default, so such a share is as large as the interval wanted; 10% is twice the gate's default threshold."""

SELF_SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose "powersave" still follows the load (Linux admin-guide/pm, intel_pstate and amd-pstate, active
mode); under any other driver "powersave" is the lowest frequency, always (admin-guide/pm/cpufreq)."""


def core_findings(machine: HostReadings) -> list[Finding]:
    """Lines about cores, frequency, load, steal and NUMA."""
    cpu = machine.cpu
    return [
        cores(machine),
        governor(cpu),
        turbo(cpu, on_cpu=not machine.num_gpus),
        load(machine),
        steal(cpu),
        numa(cpu),
    ]


def cores(machine: HostReadings) -> Finding:
    """Cores this process may use against those present, and against what the devices need."""
    usable = machine.usable_cores
    if usable is None:
        return unknown("cores")
    text = f"{figures(usable)} of {machine.cpu.present or '?'} usable"
    problems = [_quota(machine, text), _too_few(machine, usable, text), _hardware_threads(machine, text)]
    found = [problem for problem in problems if problem is not None]
    return max(found, key=lambda f: SEVERITY.index(f.status), default=Finding("cores", "ok", text))


def _quota(machine: HostReadings, text: str) -> Finding | None:
    """A container's quota below the cores it sees: sched-bwc in the Linux scheduler documents."""
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
    return Finding("cores", status, what, advice if status != "ok" else "")


def _hardware_threads(machine: HostReadings, text: str) -> Finding | None:
    allowed, physical = machine.cpu.allowed, machine.cpu.allowed_physical
    if machine.num_gpus or allowed is None or physical is None or physical >= allowed:
        return None
    what = f"{text}, hardware threads of {physical} cores: two devices can share one core"
    advice = f"--gpus up to {physical}, under taskset with one thread of each core (lscpu -e)"
    return Finding("cores", "caution", what, advice)


def _room(num_cores: float, num_gpus: int) -> Status:
    """Whether so many cores can feed so many GPUs."""
    if num_cores < num_gpus:
        return "bad"
    return "caution" if num_cores < CORES_PER_GPU * num_gpus else "ok"


def governor(cpu: Cpu) -> Finding:
    """The frequency governor; only "performance" keeps one frequency target."""
    name = "governor"
    if not cpu.governors:
        hidden = "not shown in this virtual machine" if cpu.virtual else "not readable here"
        return unknown(name, hidden)
    text = f"{'/'.join(cpu.governors)}{f' ({cpu.driver})' if cpu.driver else ''}"
    if cpu.governors == ("performance",):
        return Finding(name, "ok", text)
    advice = "sudo cpupower frequency-set -g performance; on a laptop also plug it in"
    if "powersave" in cpu.governors and cpu.driver is not None and cpu.driver not in SELF_SCALING_DRIVERS:
        return Finding(name, "bad", f"{text}: held at the lowest frequency", advice)
    return Finding(name, "caution", f"{text}: frequency follows the load, so blocks differ", advice)


def turbo(cpu: Cpu, *, on_cpu: bool) -> Finding:
    """Turbo: where cores stand in for devices, one busy core runs faster than many do."""
    name = "turbo"
    if cpu.turbo is None:
        return unknown(name, "not shown in this virtual machine" if cpu.virtual else "not readable here")
    if cpu.turbo and on_cpu:
        return Finding(
            name,
            "caution",
            "on: one busy core runs faster than all do, so scaling looks worse than it is",
            "in /sys/devices/system/cpu: 1 into intel_pstate/no_turbo, or 0 into cpufreq/boost, as root",
        )
    return Finding(name, "ok", "on" if cpu.turbo else "off")


def load(machine: HostReadings) -> Finding:
    """Cores that other programs use now, against what the devices need."""
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
        status = graded(cpu.busy_share, caution=BUSY_CAUTION, bad=BUSY_BAD)
    if status == "ok" and cpu.load_1min is not None and cpu.load_1min > cpu.allowed:
        status = "caution"
    return Finding(
        name, status, text, "stop other programs (top shows them), or wait" if status != "ok" else ""
    )


def steal(cpu: Cpu) -> Finding:
    """Time that other guests of the same host took."""
    if cpu.steal_share is None:
        return unknown("steal")
    ever = cpu.steal_share_since_boot
    text = f"{cpu.steal_share:.1%} over {figures(cpu.sample_s or 0)} s"
    text += "" if ever is None else f", {ever:.1%} since start-up"
    status = graded(max(cpu.steal_share, ever or 0.0), caution=STEAL_CAUTION, bad=STEAL_BAD)
    if status == "ok":
        return Finding("steal", status, text)
    return Finding(
        "steal",
        status,
        f"{text}: other virtual machines take this one's cores",
        "use a dedicated or larger machine, or more rounds; compare by ratios only",
    )


def numa(cpu: Cpu) -> Finding:
    """NUMA nodes, and whether the kernel moves pages between them (sysctl/kernel, numa_balancing)."""
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
