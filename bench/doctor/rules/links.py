"""Findings about how GPUs reach each other and the cores. Pure."""

from __future__ import annotations

from collections import Counter

from bench.doctor.finding import Finding, unknown
from bench.doctor.machine import Gpu, GpuPair, HostReadings
from bench.doctor.rules.gpu import NOT_READABLE, GpuFinding, per_gpu, ranges, span

PATHS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between sockets",
}
"""Abbreviations of `nvidia-smi topo -m`, by its own legend."""


def link_findings(machine: HostReadings) -> list[Finding]:
    """Lines about links between GPUs and about the cores next to them; none without GPUs."""
    if not machine.gpus:
        return []
    return [links(machine.gpus, machine.pairs), affinity(machine)]


def links(gpus: tuple[Gpu, ...], pairs: tuple[GpuPair, ...] | None) -> Finding:
    """NVLink between every pair is what DDP's all-reduce wants; PCIe and host memory are slower ways.

    Bus bandwidth of all-reduce, published: A100 pair 208 GB/s by NVLink, 20 GB/s by PCIe.
    """
    name = "GPU links"
    if len(gpus) == 1:
        return Finding(name, "ok", "one GPU: nothing to link")
    if not pairs:
        return unknown(name)
    counts = Counter(way(pair) for pair in pairs)
    text = ", ".join(f"{count} of {len(pairs)} pairs {how}" for how, count in counts.items())
    if any("not readable" in how for how in counts):
        return unknown(name, text)
    if all(pair.nvlink for pair in pairs):
        return _nvlinks(name, gpus, len(pairs))
    advice = "expect communication to show; choose GPUs joined by NVLink where some are (nvidia-smi topo -m)"
    if not all(pair.nvlink or pair.peer_access for pair in pairs):
        advice = "expected on GeForce cards; else turn PCIe ACS and IOMMU off (NCCL, Troubleshooting)"
    return Finding(name, "caution", text, advice)


def _nvlinks(name: str, gpus: tuple[Gpu, ...], num_pairs: int) -> Finding:
    numbers = {gpu.index: gpu.num_nvlinks for gpu in gpus if gpu.num_nvlinks is not None}
    text = f"all {num_pairs} pairs by NVLink"
    text += f", {span(list(numbers.values()))} links each" if numbers else ""
    few = [index for index, number in numbers.items() if number < max(numbers.values())]
    if not few:
        return Finding(name, "ok", text)
    uneven = f"{text}: GPU {ranges(few)} has fewer than the others"
    return Finding(name, "caution", uneven, "nvidia-smi nvlink -s shows the links that are down")


def way(pair: GpuPair) -> str:
    """How one pair is joined, in words."""
    if pair.nvlink:
        return "by NVLink"
    if pair.peer_access is None:
        return "not readable here"
    through = f" through {PATHS.get(pair.path, pair.path)}" if pair.path else ""
    return f"by PCIe{through}" if pair.peer_access else f"by host memory, no peer access{through}"


def affinity(machine: HostReadings) -> Finding:
    """Whether this process may use cores on each GPU's own NUMA node."""
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
            advice = "allow cores of every GPU's node (numactl, Slurm --gpus-per-task with --cpus-per-gpu)"
            return GpuFinding("caution", f"on NUMA node {node.number}, where no core is allowed", advice)
        return GpuFinding("ok", f"on NUMA node {node.number}")

    return per_gpu("GPU affinity", machine.gpus or (), near)
