"""What the checks share: their answers, and what several of them read."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import psutil
import pynvml

from ..gpus import ask_nvml, names_of, nvml_devices, pair, visible
from ..machine import cores_in, cpu_quota, environment, read_text
from ..manifest import GpuPair
from ..process import allowed_cores

T = TypeVar("T")
Status = Literal["ok", "unknown", "caution", "bad"]

SEVERITY: tuple[Status, ...] = ("ok", "unknown", "caution", "bad")

SAMPLE_S = 0.5
"""How long load, steal and swapping are watched."""


@dataclass(frozen=True)
class Answer:
    """How something is, and what to do; `advice` is empty where nothing needs doing."""

    status: Status
    text: str
    advice: str = ""
    value: float | None = None
    """Of one GPU: `{}` in `text` stands for it, so that equal answers share a line."""


UNKNOWN = Answer("unknown", "not readable here")


def judged(status: Status, text: str, advice: str) -> Answer:
    """Make an answer of any status; ok goes without the advice."""
    return Answer(status, text, "" if status == "ok" else advice)


def worst(statuses: Iterable[Status]) -> Status:
    """Find the gravest of the statuses; ok without any."""
    return max(statuses, key=SEVERITY.index, default="ok")


def graded(value: float, *, caution: float, bad: float) -> Status:
    """Grade a value that is better the smaller it is; a limit belongs to the worse side."""
    return "bad" if value >= bad else "caution" if value >= caution else "ok"


def figures(value: float) -> str:
    """Write cores and the like: `8`, `2.5`, `0.25`."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def attempt(read: Callable[[], T]) -> T | None:
    """Return what `read` returns; None where this system has no such reading."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # psutil warns of what /proc lacks; here that is an answer
            return read()
    except (OSError, ValueError, LookupError, AttributeError, RuntimeError, ImportError, psutil.Error):
        return None


def first_line(error: Exception) -> str:
    """Say in one line why something does not load."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class Readings(dict[str, Any]):
    """What was read of one part of the machine, by name, for `--json`."""

    def keep(self, name: str, value: T) -> T:
        """Keep a reading and return it: None is what could not be read, infinity that there is no limit."""
        self[name] = "unlimited" if value == math.inf else value
        return value


class Gpu(Readings):
    """A GPU that CUDA_VISIBLE_DEVICES leaves, by its place and handle in NVML, and what was read of it."""

    def __init__(self, index: int, handle: Any) -> None:
        super().__init__(index=index)
        self.index, self.handle = index, handle

    def ask(self, names: str, *arguments: Any) -> Any:
        """The answer of NVML's function (`new|old`); None where this GPU has none."""
        return ask_nvml(names, self.handle, *arguments)

    def memory_mib(self, kind: Literal["used", "total"]) -> int | None:
        """Memory, without what the driver keeps for itself: version 1 of this reading counts it as used."""
        memory = self.ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
        return None if memory is None else int(getattr(memory, kind)) // 2**20


class Host(contextlib.ExitStack):
    """Where the checks look, and what several of them read; NVML is open until the host is left.

    `root` is where /proc, /sys and /dev are found.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.env = root, environment()
        self.cpu, self.memory, self.software = (Readings() for _ in range(3))
        # First what our own work would disturb: the load, then the GPUs, then the import of torch.
        self._watch()
        self._open_gpus()
        self.torch, self.torch_error = _torch()
        self.num_cuda_devices = attempt(lambda: int(self.torch.cuda.device_count()))

    def readings(self) -> dict[str, Any]:
        hardware = ("cpu", "memory", "gpus", "num_gpus_present", "gpu_error", "pairs")
        return {part: getattr(self, part) for part in (*hardware, "software", "env")}

    @property
    def num_gpus(self) -> int:
        """GPUs that training would use, as far as anything could tell."""
        return len(self.gpus or ()) or self.num_cuda_devices or 0

    @property
    def usable_cores(self) -> float | None:
        """Cores this process may use: its affinity, or the container's quota where that is less."""
        if not self.allowed:
            return None
        return min(len(self.allowed), math.inf if self.quota is None else self.quota)

    @property
    def num_devices(self) -> int:
        """Ranks that a run would start by default at most: GPUs, else usable cores."""
        return self.num_gpus or max(int(self.usable_cores or 1), 1)

    def _watch(self) -> None:
        """Read which cores are ours, and for `SAMPLE_S` who uses them, and swap."""
        self.allowed = frozenset(allowed_cores())
        self.quota = self.cpu.keep("quota", cpu_quota(self.root))
        self.nodes = _nodes(self.root)
        flags = re.search(r"^flags\s*:(.*)$", read_text(self.root / "proc/cpuinfo") or "", re.MULTILINE)
        self.virtual = self.cpu.keep("virtual", " hypervisor " in f"{flags[1]} " if flags else None)
        before, swap = attempt(lambda: psutil.cpu_times(percpu=True)), attempt(psutil.swap_memory)
        started = time.perf_counter()
        time.sleep(SAMPLE_S)
        after, self.swap = attempt(lambda: psutil.cpu_times(percpu=True)), attempt(psutil.swap_memory)
        self.sample_s = self.cpu.keep("sample_s", round(time.perf_counter() - started, 2))
        self.shares = _shares(before, after, self.allowed)
        self.swapped_in = max(int(self.swap.sin - swap.sin), 0) if self.swap and swap else None
        self.room = attempt(psutil.virtual_memory)

    def _open_gpus(self) -> None:
        """Find the GPUs: none without a driver; `gpus` is None where the driver only answers an error."""
        self.gpus: tuple[Gpu, ...] | None = ()
        self.num_gpus_present: int | None = 0
        self.gpu_error: str | None = None
        self.pairs: tuple[GpuPair, ...] | None = None
        try:
            handles = self.enter_context(nvml_devices())
        except pynvml.NVMLError as error:
            absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if error.value not in absent:
                self.gpus, self.num_gpus_present, self.gpu_error = None, None, str(error)
            return
        chosen = visible(self.env.get("CUDA_VISIBLE_DEVICES"), [names_of(handle) for handle in handles])
        self.gpus = tuple(Gpu(index, handles[index]) for index in chosen)
        self.num_gpus_present = len(handles)
        both = itertools.combinations(self.gpus, 2)
        self.pairs = tuple(pair(a.index, b.index, a.handle, b.handle) for a, b in both)


def _torch() -> tuple[Any, str | None]:
    """Import torch: the module, or the first line of why it does not load."""
    try:
        return importlib.import_module("torch"), None
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return None, first_line(error)


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    """Cores by NUMA node; nodes of memory alone are left out."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cores := cores_in(read_text(folder / "cpulist") or ""):
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


class Shares(NamedTuple):
    """Of the allowed cores' time, as fractions; None where it could not be read."""

    busy: float | None = None
    steal: float | None = None
    steal_since_boot: float | None = None


def _shares(before: Sequence[Any] | None, after: Sequence[Any] | None, allowed: Iterable[int]) -> Shares:
    """Compute them from the times of all cores at two moments."""
    if not before or not after or len(before) != len(after):
        return Shares()
    cores = [core for core in allowed if core < len(after)] or range(len(after))
    ever, earlier = _times([after[core] for core in cores]), _times([before[core] for core in cores])
    busy, steal, total = (now - then for now, then in zip(ever, earlier, strict=True))
    if total <= 0:
        return Shares()
    share = min(max(busy / total, 0.0), 1.0)
    return Shares(share, steal / total, ever[1] / ever[2]) if hasattr(after[0], "steal") else Shares(share)


def _times(cores: Sequence[Any]) -> tuple[float, float, float]:
    """Sum up busy, stolen and all seconds of these cores; user time includes guests' (proc(5))."""
    guests = sum(getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0) for core in cores)
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    steal = sum(getattr(core, "steal", 0.0) for core in cores)
    total = sum(sum(core) for core in cores) - guests
    return total - idle - steal, steal, total


Check: TypeAlias = Callable[[Host], Answer | None]
"""Reads and judges; None where there is nothing to say of such a machine."""
