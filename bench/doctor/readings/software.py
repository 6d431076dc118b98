"""Reads versions, and whether torchvision's operators load. Imports torch; creates no CUDA context."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from ddp_bench.bench.doctor.readings import Software
from ddp_bench.bench.doctor.readings.system import attempt


def read_software(*, driver: str | None = None, driver_cuda: str | None = None) -> Software:
    """Read versions of Python, torch, torchvision and what they were built with; the driver's are NVML's."""
    torch, torch_error = _torch()
    return Software(
        python=platform.python_version(),
        torch=None if torch is None else str(torch.__version__),
        torch_error=torch_error,
        torch_cuda=None if torch is None else torch.version.cuda or "",
        nccl=attempt(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if torch is not None else None,
        num_cuda_devices=attempt(lambda: int(torch.cuda.device_count())) if torch is not None else None,
        torchvision=attempt(lambda: metadata.version("torchvision")),
        torchvision_error=None if torch is None else _operators_error(torch),
        torchvision_needs=_needs("torchvision", "torch"),
        driver=driver,
        driver_cuda=driver_cuda,
    )


def _torch() -> tuple[Any, str | None]:
    """Import torch: the module, or why it does not load."""
    try:
        return importlib.import_module("torch"), None
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return None, _first_line(error)


def _operators_error(torch: Any) -> str | None:
    """Find out why torchvision's compiled operators do not load with this torch; None when they do.

    Loads the library alone: importing torchvision imports PyTorch's compiler, which makes a cache folder.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return "not installed"
    libraries = [path for path in Path(found.origin).parent.glob("_C*") if path.suffix in (".so", ".pyd")]
    if not libraries:
        return "its compiled operators are missing"
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        return _first_line(error)
    return None if hasattr(torch.ops.torchvision, "nms") else "its compiled operators are missing"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _needs(package: str, other: str) -> str | None:
    """Read what `package` requires of `other` from its installed metadata."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return None
    for line in lines:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.name == other and wanted.specifier and wanted.marker is None:
            return f"{other}{wanted.specifier}"
    return None
