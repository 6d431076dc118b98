"""Reads what this machine is: versions, processor, memory, kernel settings, environment variables.

Of small files of /proc and /sys, under any root, None says that there is no such file.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from ..common.cli import get_version
from ..common.errors import UsageError
from ..common.process import get_host_name
from ..common.turns import VARIABLES_ENV
from .manifest import Cgroup, FirstHost
from .records import Limit

PACKAGES = ("torch", "torchvision", "numpy", "pandas", "scipy", "matplotlib")

ENV_PREFIXES = (
    *("CUDA_", "DDP_", "GLIBC_", "GLOO_", "GOMP_", "KMP_"),
    *("MALLOC_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_"),
    *("CUBLAS_", "CUDNN_", "DNNL_", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "ONEDNN_", "OPENBLAS_"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_"),
)
"""Beginnings of the names of environment variables that change how fast a step is."""

HIDDEN_VALUE = "(hidden)"

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

NO_LIMIT_BYTES = 2**60
"""cgroup v1 writes "no limit" as a page-rounded 2**63; no machine has this much."""

CPUS = "sys/devices/system/cpu"


def get_versions() -> dict[str, str]:
    """Versions of Python, the packages and what torch was built with."""
    import torch  # seconds, which not every command has to pay

    found = {"python": platform.python_version()}
    found |= {package: known for package in PACKAGES if (known := get_version(package)) is not None}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
        with contextlib.suppress(AttributeError):  # torch may be built without it
            found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
            found["nccl_backend"] = get_nccl_backend()
    return found


def get_nccl_backend() -> str:
    """Name the backend that torch makes of "nccl": `nccl2` from 2.14 where it is chosen, `nccl` otherwise.

    Torch reads TORCH_DIST_USE_NCCL2 once, as it registers "nccl"; its default changed in 2.15.
    """
    chosen = find_backend("nccl")
    return "nccl2" if chosen is not None and chosen == find_backend("nccl2") else "nccl"


def find_backend(name: str) -> Any:
    """Return what torch makes a group of this backend with, registering it as a group would; None if nothing.

    There is no public way. Before 2.14 torch registered none of its own.
    """
    from torch.distributed import Backend

    getattr(Backend, "_ensure_backend_registered", lambda _: None)(name)
    return Backend._plugins.get(name.upper())


def describe_machine(host: str, root: Path = Path("/")) -> FirstHost:
    """Host, processor, memory, and how the kernel runs them; `describe_gpus` describes its GPUs.

    `root` is where /proc and /sys are found.
    """
    limit_bytes, quota = read_memory_limit_bytes(root), read_cpu_quota(root)
    return FirstHost(
        host=host,
        os=platform.platform(),
        cpu_model=read_cpu_model(root),
        num_cores=psutil.cpu_count(logical=True),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        governors=read_governors(root),
        huge_pages=read_huge_pages(root),
        cgroup=Cgroup(
            cpu_quota_cores=None if quota is None else _encode_limit(quota),
            memory_limit_gib=None if limit_bytes is None else _encode_limit(limit_bytes / 2**30),
            cpuset=read_cpuset(root),
        ),
        env=select_environment(),
    )


def _encode_limit(value: float) -> Limit:
    return "unlimited" if math.isinf(value) else round(value, 3)


def select_environment() -> dict[str, str]:
    """Select the environment variables that change how fast a step is, or that a gate compares, by name.

    What looks like a credential is hidden, also in doubt, so that it is never written down.
    """
    return {
        name: HIDDEN_VALUE if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENV_PREFIXES) or name in os.environ.get(VARIABLES_ENV, "").split()
    }


def read_cpu_model(root: Path) -> str:
    """Read the processor's name."""
    named = re.search(r"^model name\s*:\s*(.+)$", read_text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def read_text(path: Path) -> str | None:
    """Read the file's content without outer blanks."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_number(path: Path) -> int | None:
    """Read the file's content as a whole number."""
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None


def parse_cores(content: str) -> frozenset[int] | None:
    """`0-3,8` as cores 0, 1, 2, 3, 8; None where it is not such a list."""
    found: set[int] = set()
    try:
        for part in filter(None, content.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return None
    return frozenset(found)


def format_ranges(numbers: Iterable[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6: what `parse_cores` reads."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def read_governors(root: Path) -> tuple[str, ...] | None:
    """Read the frequency governors of the cores, each once."""
    found = {read_text(policy / "scaling_governor") for policy in (root / CPUS).glob("cpu[0-9]*/cpufreq")}
    return tuple(sorted(name for name in found if name)) or None


def read_huge_pages(root: Path) -> str | None:
    """Return the kernel's mode of transparent huge pages: `always`, `madvise` or `never`."""
    chosen = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return chosen[1] if chosen else None


def read_cpu_quota(root: Path) -> float | None:
    """Cores that the container may use, the least over all enclosing groups; inf without a limit.

    cgroup v2 `cpu.max` is "quota period", v1 has a file for each (Linux cgroup-v2 and sched-bwc documents).
    """
    return _find_least(root, "cpu", _read_quota)


def read_memory_limit_bytes(root: Path) -> float | None:
    """Memory that the container may use, the least over all enclosing groups; inf without a limit."""
    return _find_least(root, "memory", _read_memory_limit)


def read_cpuset(root: Path) -> str | None:
    """Read the cores that the container may use, such as `0-3,8`.

    cgroup v2 `cpuset.cpus.effective`; v1 has `cpuset.effective_cpus` (Linux cgroup-v2, cgroup-v1/cpusets).
    """
    for folder in _list_groups(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if cores := read_text(folder / name):
                return cores
    return None


def _find_least(root: Path, controller: str, read: Callable[[Path], float | None]) -> float | None:
    folders = list(_list_groups(root, controller))
    if not folders:
        return None
    found = [value for value in map(read, folders) if value is not None]
    return min(found, default=math.inf)


def _list_groups(root: Path, controller: str) -> Iterator[Path]:
    """List the process's group of this controller and all that enclose it."""
    for base, folder in _find_groups(root, controller):
        yield from (up for up in (folder, *folder.parents) if up.is_relative_to(base))


def _find_groups(root: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    """Find the controller's mount point and the process's group there, whichever of v1 and v2 manages it."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (controllers, controller) if controllers else ("", "unified")
        for mount in dict.fromkeys(mounts):
            base = root / "sys/fs/cgroup" / mount
            yield base, base / path.lstrip("/")


def _read_quota(folder: Path) -> float | None:
    words = (read_text(folder / "cpu.max") or "").split()
    if not words:
        words = [str(read_number(folder / f"cpu.cfs_{what}_us")) for what in ("quota", "period")]
    try:
        quota, period = words
        if quota in ("max", "-1"):
            return math.inf
        return int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None


def _read_memory_limit(folder: Path) -> float | None:
    if read_text(folder / "memory.max") == "max":
        return math.inf
    value = read_number(folder / "memory.max")
    value = read_number(folder / "memory.limit_in_bytes") if value is None else value
    return math.inf if value is not None and value >= NO_LIMIT_BYTES else value


OPEN_FILES = 128
"""Descriptors that a process needs beside its connections to ranks: pipes, libraries as they are loaded."""


def raise_open_file_limit(num_connections: int) -> None:
    """Raise this process's limit of open files as far as it may.

    Raises UsageError where that is too few for so many connections to ranks.
    """
    needed = OPEN_FILES + num_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (max(soft, needed), hard):  # macOS takes no soft limit without end
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != allowed < needed:
        raise UsageError(
            f"{get_host_name()} allows {allowed} open files, this run needs {needed} in each process; allow "
            f"more in the shell that starts it there: sudo prlimit --pid $$ --nofile={2 * needed}"
        )


def count_oom_kills() -> int | None:
    """Count the processes that the kernel has killed for memory, here or in this group; None if unknown."""
    groups = [folder for _, folder in _find_groups(Path("/"), "memory")]
    files = [folder / name for folder in groups for name in ("memory.events", "memory.oom_control")]
    found = "\n".join(read_text(file) or "" for file in (Path("/proc/vmstat"), *files))
    counts = [int(number) for number in re.findall(r"^oom_kill (\d+)$", found, re.MULTILINE)]
    return sum(counts) if counts else None
