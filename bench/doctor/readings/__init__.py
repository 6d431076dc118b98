"""Reads the machine for the doctor. Strictly read-only: it writes, sets and resets nothing."""

from __future__ import annotations

from pathlib import Path

from bench.conditions import environment
from bench.doctor.machine import HostReadings
from bench.doctor.readings.network import read_network
from bench.doctor.readings.nvml import read_gpus
from bench.doctor.readings.software import read_software
from bench.doctor.readings.system import read_disk, read_host


def read_machine(*, results: Path = Path("results")) -> HostReadings:
    """Everything the doctor looks at; takes a few seconds, most of it importing torch."""
    # First what our own work would disturb: the load, then the GPUs, then the imports.
    cpu, memory = read_host()
    driver = read_gpus()
    return HostReadings(
        cpu=cpu,
        memory=memory,
        disk=read_disk(results),
        network=read_network(),
        software=read_software(driver=driver.version, driver_cuda=driver.cuda),
        gpus=driver.gpus,
        num_gpus_present=driver.num_present,
        gpu_error=driver.error,
        pairs=driver.pairs,
        env=environment(),
    )
