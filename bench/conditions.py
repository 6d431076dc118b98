"""The conditions of a run: versions, machine, topology, git state. Read-only."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pynvml

PACKAGES = ("torch", "torchvision", "numpy", "pandas", "scipy", "matplotlib")
ENV_PREFIXES = (
    *("BENCH_", "CUDA_", "DDP_", "GLIBC_", "GLOO_", "GOMP_", "KMP_"),
    *("MALLOC_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_"),
)
"""Beginnings of the names of environment variables that change how fast a step is."""

GIT_TIMEOUT_S = 10


def versions() -> dict[str, str]:
    """Versions of Python, the packages and what torch was built with."""
    import torch  # noqa: PLC0415 - seconds, which not every command has to pay

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """Commit and cleanliness of the checkout this code runs from; empty outside one."""
    where = folder or Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments],
                cwd=where,
                capture_output=True,
                text=True,
                timeout=GIT_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def machine(host: str) -> dict[str, Any]:
    """Host, processor, memory, GPUs and how they are joined."""
    return {
        "host": host,
        "os": platform.platform(),
        "cpu_model": cpu_model(),
        "num_cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
        "topology": topology(),
        "env": environment(),
    }


def environment() -> dict[str, str]:
    """The environment variables that change how fast a step is, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENV_PREFIXES)}


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpus() -> list[dict[str, Any]]:
    """Every NVIDIA GPU: name, memory, driver, power limit, clocks; empty without one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [
            _gpu(pynvml.nvmlDeviceGetHandleByIndex(i), driver) for i in range(pynvml.nvmlDeviceGetCount())
        ]
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any, driver: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": pynvml.nvmlDeviceGetName(handle), "driver": driver}
    readings: dict[str, Callable[[], Any]] = {
        "memory_mib": lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // 2**20,
        "power_limit_w": lambda: int(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000,
        "max_sm_clock_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
    }
    for name, read in readings.items():
        try:
            facts[name] = read()
        except pynvml.NVMLError:
            continue  # some virtual GPUs hide some readings
    return facts


def topology() -> str | None:
    """`nvidia-smi topo -m`, how GPUs, NICs and sockets are joined; None without it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
