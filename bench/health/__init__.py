"""From readings to findings: is this machine fit to measure on, and what to do where it is not. Pure."""

from __future__ import annotations

from bench.health.cores import core_findings
from bench.health.finding import Finding, Status, worst
from bench.health.gpu import gpu_findings
from bench.health.host import host_findings
from bench.health.links import link_findings
from bench.health.network import network_findings
from bench.health.software import software_findings
from bench.health.vitals import Machine

__all__ = ["Finding", "Machine", "Status", "diagnose", "worst"]


def diagnose(machine: Machine) -> list[Finding]:
    """Every line of the doctor, in reading order: GPUs, cores, memory, network, software."""
    return [
        *gpu_findings(machine),
        *link_findings(machine),
        *core_findings(machine),
        *host_findings(machine),
        *network_findings(machine),
        *software_findings(machine),
    ]
