"""Findings about versions that have to fit each other, and settings that slow a step down. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.requirements import InvalidRequirement, Requirement

from bench.doctor.finding import Finding, unknown
from bench.doctor.machine import HostReadings, Software

REINSTALL = "install torch and torchvision together, from one index: pip install -U torch torchvision"

SLOW_SETTINGS: tuple[tuple[str, tuple[str, ...], str], ...] = (
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


def software_findings(machine: HostReadings) -> list[Finding]:
    """Lines about torch, torchvision, the driver and debugging settings."""
    lines = [torch_build(machine), torchvision(machine.software), settings(machine.env)]
    if machine.gpus or machine.software.driver:
        lines.insert(2, driver(machine.software))
    return lines


def torch_build(machine: HostReadings) -> Finding:
    """Torch, and whether it sees the GPUs that the driver shows."""
    found = machine.software
    if found.torch_error is not None:
        return Finding("torch", "bad", f"does not load: {found.torch_error}", REINSTALL)
    if found.torch is None:
        return unknown("torch")
    parts = [f"{found.torch}", f"Python {found.python}" if found.python else ""]
    parts += [f"CUDA {found.torch_cuda}" if found.torch_cuda else ""]
    parts += ["built without CUDA"] if found.torch_cuda == "" else []
    parts += [f"NCCL {found.nccl}" if found.nccl else ""]
    text = ", ".join(part for part in parts if part)
    if machine.gpus and found.torch_cuda == "":
        count = len(machine.gpus)
        return Finding("torch", "bad", f"{text}: it cannot use the {count} GPU(s) here", REINSTALL)
    if machine.gpus and found.num_cuda_devices == 0:
        return Finding(
            "torch",
            "bad",
            f"{text}: it sees none of the {len(machine.gpus)} GPU(s) that the driver shows",
            "python -c 'import torch; torch.cuda.init()' says why; see also the line CUDA driver",
        )
    return Finding("torch", "ok", text)


def torchvision(found: Software) -> Finding:
    """Whether torchvision was built for this torch: its own requirement, and whether it loads."""
    name = "torchvision"
    if found.torchvision is None:
        absent = Finding(name, "bad", f"does not load: {found.torchvision_error}", REINSTALL)
        return absent if found.torchvision_error else unknown(name)
    text = f"{found.torchvision}"
    if found.torchvision_needs and found.torch and not _fits(found.torch, found.torchvision_needs):
        return Finding(
            name, "bad", f"{text} needs {found.torchvision_needs}, here is {found.torch}", REINSTALL
        )
    if found.torchvision_error is not None:
        return Finding(name, "bad", f"{text} does not load: {found.torchvision_error}", REINSTALL)
    return Finding(name, "ok", f"{text}, made for this torch" if found.torchvision_needs else text)


def _fits(version: str, requirement: str) -> bool:
    try:
        return Requirement(requirement).specifier.contains(version, prereleases=True)
    except InvalidRequirement:
        return True


def driver(found: Software) -> Finding:
    """Whether the driver is new enough for the CUDA that torch was built with.

    Any of the same CUDA major version is ("CUDA Compatibility", minor version compatibility), and newer ones.
    """
    name = "CUDA driver"
    if found.driver is None and found.driver_cuda is None:
        return unknown(name)
    text = f"{found.driver or 'version unknown'}, up to CUDA {found.driver_cuda or '?'}"
    if not found.driver_cuda or not found.torch_cuda:
        return Finding(name, "ok" if found.driver_cuda else "unknown", text)
    if int(found.driver_cuda.split(".")[0]) < int(found.torch_cuda.split(".")[0]):
        return Finding(
            name,
            "bad",
            f"{text}; torch was built for {found.torch_cuda}",
            "update the driver, or install a torch built for this CUDA",
        )
    return Finding(name, "ok", text)


def settings(env: Mapping[str, str]) -> Finding:
    """Environment variables for debugging that would be measured along with the step."""
    found = [
        (f"{key}={env[key]}", key, grave)
        for key, values, grave in SLOW_SETTINGS
        if env.get(key, "").strip().upper() in values
    ]
    if not found:
        return Finding("settings", "ok", "none that slow a step down")
    text = ", ".join(pair for pair, _, _ in found)
    bad = any(grave == "bad" for _, _, grave in found)
    keys = " ".join(key for _, key, _ in found)
    return Finding("settings", "bad" if bad else "caution", f"{text}: slower steps", f"unset {keys}")
