"""From readings to findings: is this machine fit to measure on, and what to do where it is not. Pure."""

from __future__ import annotations

from bench.doctor.finding import Finding, Status, worst
from bench.doctor.machine import HostReadings
from bench.doctor.rules.cores import core_findings
from bench.doctor.rules.gpu import gpu_findings
from bench.doctor.rules.interfaces import network_findings
from bench.doctor.rules.links import link_findings
from bench.doctor.rules.memory import host_findings
from bench.doctor.rules.versions import software_findings

__all__ = ["Finding", "HostReadings", "Status", "diagnose", "worst"]


def diagnose(machine: HostReadings) -> list[Finding]:
    """Every line of the doctor, in reading order: GPUs, cores, memory, network, software."""
    return [
        *gpu_findings(machine),
        *link_findings(machine),
        *core_findings(machine),
        *host_findings(machine),
        *network_findings(machine),
        *software_findings(machine),
    ]
