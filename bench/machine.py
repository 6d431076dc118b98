"""Reads what this machine is: versions, processor, memory, kernel settings, environment variables."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from pathlib import Path

import psutil

from . import sysfs
from .manifest import Cgroup, FirstHost, Limit
from .package import version_of

PACKAGES = ("torch", "torchvision", "numpy", "pandas", "scipy", "matplotlib")

ENV_PREFIXES = (
    *("CUDA_", "DDP_", "GLIBC_", "GLOO_", "GOMP_", "KMP_"),
    *("MALLOC_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_"),
    *("CUBLAS_", "CUDNN_", "DNNL_", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "ONEDNN_", "OPENBLAS_"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_"),
)
"""Beginnings of the names of environment variables that change how fast a step is."""

HIDDEN = "(hidden)"

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|BEARER|(API|ACCESS|PRIVATE|SSH)_?KEY|(^|_)KEYS?(_|$)",
    re.IGNORECASE,
)
"""Parts of names; a bare KEY only as a word of its own: NCCL_IB_PKEY is the number of a partition."""

_SECRET_VALUE = re.compile(
    r"://[^/\s]*@"  # a URL with user, or user and password
    r"|\b(token|secret|passw(or)?d|passphrase|credentials?|auth(orization)?|api[_-]?key)\s*[=:]"
    r"|\bbearer\s"
    r"|-----BEGIN "
    r"|\b(gh[opsur]_|github_pat_|glpat-|hf_|xox[abprs]-|A[KS]IA[0-9A-Z]{8}|eyJ[\w-]{8,}\.|sk-)",
    re.IGNORECASE,
)
"""Values that give themselves away: URLs with a user, `password=…`, keys and tokens by their known heads."""


def versions() -> dict[str, str]:
    """Versions of Python, the packages and what torch was built with."""
    import torch  # seconds, which not every command has to pay

    found = {"python": platform.python_version()}
    found |= {package: known for package in PACKAGES if (known := version_of(package)) is not None}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        # torch 2.15 has two and takes the newer one unless it is told not to.
        has_newer = hasattr(torch.distributed, "ProcessGroupNCCL2")
        newer = has_newer and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
        found["nccl_backend"] = "nccl2" if newer else "nccl"
    return found


def machine(host: str, root: Path = Path("/")) -> FirstHost:
    """Host, processor, memory, topology, and how the kernel runs them; its GPUs are told by `bench.gpus`.

    `root` is where /proc and /sys are found.
    """
    limit_bytes, quota = sysfs.memory_limit_bytes(root), sysfs.cpu_quota(root)
    return FirstHost(
        host=host,
        os=platform.platform(),
        cpu_model=cpu_model(),
        num_cores=psutil.cpu_count(logical=True),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        topology=topology(),
        governors=sysfs.governors(root),
        huge_pages=sysfs.huge_pages(root),
        cgroup=Cgroup(
            cpu_quota_cores=None if quota is None else _limit(quota),
            memory_limit_gib=None if limit_bytes is None else _limit(limit_bytes / 2**30),
            cpuset=sysfs.cpuset(root),
        ),
        env=environment(),
    )


def _limit(value: float) -> Limit:
    return "unlimited" if math.isinf(value) else round(value, 3)


def environment() -> dict[str, str]:
    """The environment variables that change how fast a step is, by name.

    What looks like a credential is hidden, also in doubt, so that it is never written down.
    """
    return {
        name: HIDDEN if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENV_PREFIXES)
    }


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def topology() -> str | None:
    """`nvidia-smi topo -m`, how GPUs, NICs and sockets are joined; None without it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
