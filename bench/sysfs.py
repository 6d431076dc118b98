"""Small files of /proc and /sys, under any root; None where there is no such file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

NO_LIMIT_BYTES = 2**60
"""cgroup v1 writes "no limit" as a page-rounded 2**63; no machine has this much."""

CPUS = "sys/devices/system/cpu"


def text(path: Path) -> str | None:
    """The file's content without outer blanks."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def number(path: Path) -> int | None:
    """The file's content as a whole number."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def cores_in(content: str) -> frozenset[int] | None:
    """`0-3,8` as cores 0, 1, 2, 3, 8; None where it is not such a list."""
    found: set[int] = set()
    try:
        for part in filter(None, content.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return None
    return frozenset(found)


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6: what `cores_in` reads."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def governors(root: Path) -> tuple[str, ...] | None:
    """The frequency governors of the cores, each once."""
    found = {text(policy / "scaling_governor") for policy in (root / CPUS).glob("cpu[0-9]*/cpufreq")}
    return tuple(sorted(name for name in found if name)) or None


def huge_pages(root: Path) -> str | None:
    """When the kernel lends transparent huge pages: `always`, `madvise` or `never`."""
    chosen = re.search(r"\[(\w+)\]", text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return chosen[1] if chosen else None


def cpu_quota(root: Path) -> float | None:
    """Cores that the container may use, the least over all enclosing groups; inf without a limit.

    cgroup v2 `cpu.max` is "quota period", v1 has a file for each (Linux cgroup-v2 and sched-bwc documents).
    """
    return _least(root, "cpu", _quota)


def memory_limit_bytes(root: Path) -> float | None:
    """Memory that the container may use, the least over all enclosing groups; inf without a limit."""
    return _least(root, "memory", _limit)


def cpuset(root: Path) -> str | None:
    """The cores that the container may use, such as `0-3,8`.

    cgroup v2 `cpuset.cpus.effective`; v1 has `cpuset.effective_cpus` (Linux cgroup-v2, cgroup-v1/cpusets).
    """
    for folder in _groups(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if cores := text(folder / name):
                return cores
    return None


def _least(root: Path, controller: str, read: Callable[[Path], float | None]) -> float | None:
    folders = list(_groups(root, controller))
    if not folders:
        return None
    found = [value for value in map(read, folders) if value is not None]
    return min(found, default=math.inf)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The process's group of this controller and all that enclose it."""
    for base, folder in _own_groups(root, controller):
        yield from (up for up in (folder, *folder.parents) if up.is_relative_to(base))


def _own_groups(root: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    """Where the controller is mounted, and the process's group there, whichever of v1 and v2 manages it."""
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (controllers, controller) if controllers else ("", "unified")
        for mount in dict.fromkeys(mounts):
            base = root / "sys/fs/cgroup" / mount
            yield base, base / path.lstrip("/")


def _quota(folder: Path) -> float | None:
    words = (text(folder / "cpu.max") or "").split()
    if not words:
        words = [str(number(folder / f"cpu.cfs_{what}_us")) for what in ("quota", "period")]
    try:
        quota, period = words
        if quota in ("max", "-1"):
            return math.inf
        return int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None


def _limit(folder: Path) -> float | None:
    if text(folder / "memory.max") == "max":
        return math.inf
    value = number(folder / "memory.max")
    value = number(folder / "memory.limit_in_bytes") if value is None else value
    return math.inf if value is not None and value >= NO_LIMIT_BYTES else value


def oom_kills() -> int | None:
    """Processes that the kernel has ended for want of memory, here or in this group; None if unknown."""
    groups = [folder for _, folder in _own_groups(Path("/"), "memory")]
    files = [folder / name for folder in groups for name in ("memory.events", "memory.oom_control")]
    found = "\n".join(text(file) or "" for file in (Path("/proc/vmstat"), *files))
    counts = [int(number) for number in re.findall(r"^oom_kill (\d+)$", found, re.MULTILINE)]
    return sum(counts) if counts else None
