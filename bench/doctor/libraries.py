"""Checks of libraries: threads, versions, settings for debugging.

They create no CUDA context.
"""

from __future__ import annotations

import platform
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from ..cli import speaker
from ..gpus import ask_nvml
from .host import (
    UNKNOWN,
    Answer,
    Check,
    Host,
    Status,
    attempt,
    figures,
    worst,
)

REINSTALL = "install torch and torchvision together, from one index: pip install -U torch torchvision"

SLOW_SETTINGS: tuple[tuple[str, tuple[str, ...], Status], ...] = (
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


def torch_build(host: Host) -> Answer:
    """Check whether torch loads and sees the GPUs that the driver shows."""
    keep, torch, gpus = host.software.keep, host.torch, host.gpus or ()
    python = keep("python", platform.python_version())
    version = keep("torch", None if torch is None else str(torch.__version__))
    cuda = keep("torch_cuda", None if torch is None else torch.version.cuda or "")
    nccl = keep("nccl", attempt(lambda: ".".join(map(str, torch.cuda.nccl.version()))))
    keep("num_cuda_devices", host.num_cuda_devices)
    if keep("torch_error", host.torch_error) is not None:
        return Answer("bad", f"does not load: {host.torch_error}", REINSTALL)
    built = f"CUDA {cuda}" if cuda else "built without CUDA"
    text = f"{version}, Python {python}, {built}{f', NCCL {nccl}' if nccl else ''}"
    if gpus and not cuda:
        return Answer("bad", f"{text}: it cannot use the {len(gpus)} GPU(s) here", REINSTALL)
    if gpus and host.num_cuda_devices == 0:
        text += f": it sees none of the {len(gpus)} GPU(s) that the driver shows"
        advice = "python -c 'import torch; torch.cuda.init()' says why; see also the line CUDA driver"
        return Answer("bad", text, advice)
    return Answer("ok", text)


def torchvision(host: Host) -> Answer:
    """Check whether torchvision was built for this torch, by its own requirement."""
    name, keep, torch = "torchvision", host.software.keep, host.torch
    version = keep(name, attempt(lambda: metadata.version(name)))
    needs = keep("torchvision_needs", _needs(name, "torch"))
    if version is None:
        return UNKNOWN
    fits = Requirement(needs).specifier.contains if needs else None
    if fits and torch is not None and not fits(str(torch.__version__), prereleases=True):
        return Answer("bad", f"{version} needs {needs}, here is {torch.__version__}", REINSTALL)
    return Answer("ok", f"{version}, made for this torch" if needs else version)


def _needs(package: str, other: str) -> str | None:
    """Read what `package` requires of `other` from its installed metadata."""
    for line in attempt(lambda: metadata.requires(package)) or []:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.name == other and wanted.specifier and wanted.marker is None:
            return f"{other}{wanted.specifier}"
    return None


def driver(host: Host) -> Answer | None:
    """Check whether the driver is new enough for the CUDA that torch was built with; no line without either.

    Any of the same CUDA major version is ("CUDA Compatibility", minor version compatibility), and newer ones.
    """
    number = ask_nvml("nvmlSystemGetCudaDriverVersion_v2")
    version = host.software.keep("driver", ask_nvml("nvmlSystemGetDriverVersion"))
    # 13020 stands for 13.2: NVML, nvmlSystemGetCudaDriverVersion.
    most = f"{number // 1000}.{number % 1000 // 10}" if number else None
    host.software.keep("driver_cuda", most)
    cuda = host.torch.version.cuda if host.torch is not None else None
    if not host.gpus and not version:
        return None
    if version is None and most is None:
        return UNKNOWN
    text = f"{version or 'version unknown'}, up to CUDA {most or '?'}"
    if most is None:
        return Answer("unknown", text)
    if cuda and int(most.split(".")[0]) < int(cuda.split(".")[0]):
        text += f"; torch was built for {cuda}"
        return Answer("bad", text, "update the driver, or install a torch built for this CUDA")
    return Answer("ok", text)


def settings(host: Host) -> Answer:
    """Name environment variables for debugging that would be measured along with the step."""
    found = {
        key: status
        for key, values, status in SLOW_SETTINGS
        if host.env.get(key, "").strip().upper() in values
    }
    if not found:
        return Answer("ok", "none that slow a step down")
    text = ", ".join(f"{key}={host.env[key]}" for key in found)
    return Answer(worst(found.values()), f"{text}: slower steps", f"unset {' '.join(found)}")


def threads(host: Host) -> Answer:
    """Check the OpenMP and MKL settings that every rank would inherit."""
    env, gpus, cores = host.env, host.num_gpus, host.usable_cores
    pinned = [key for key in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY") if env.get(key)]
    if pinned:
        what = ", ".join(f"{key}={env[key]}" for key in pinned)
        text, advice = f"{what}: every rank is pinned to the same cores", f"unset {' '.join(pinned)}"
        return Answer("caution", text, advice)
    most = 0
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if not (value := env.get(key)):
            continue
        first = value.split(",")[0].strip()
        if not first.isdecimal() or int(first) < 1:
            return Answer("caution", f"{key}={value} is no number of threads", f"export {key}=1")
        most = max(most, int(first))
    if not most:
        return Answer("ok", f"OMP_NUM_THREADS unset: {speaker('run')} and torchrun give each rank 1")
    if not gpus:
        return Answer("ok", f"{most} set; a CPU core standing in for a GPU runs 1 all the same")
    text = f"{most} per rank x {gpus} GPU(s)"
    if cores is not None and most * gpus > cores:
        fits = max(int(cores) // gpus, 1)
        over = f"{text} on {figures(cores)} cores: ranks push each other off their cores"
        return Answer("caution", over, f"export OMP_NUM_THREADS={fits} MKL_NUM_THREADS={fits}")
    return Answer("ok", text)


LIBRARY_CHECKS: dict[str, Check] = {
    "threads": threads,
    "torch": torch_build,
    "torchvision": torchvision,
    "CUDA driver": driver,
    "settings": settings,
}
