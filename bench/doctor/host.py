"""Answers of the checks, and readings that several of them share."""

from __future__ import annotations

import contextlib
import importlib
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import psutil
import pynvml

from ..common.process import get_allowed_cores
from ..machine.gpus import ask_nvml, find_visible_gpus, has_mps, list_uuids, open_nvml
from ..machine.host import parse_cores, read_cpu_quota, read_text, select_environment
from ..machine.load import compute_loads, read_load

T = TypeVar("T")
Status = Literal["ok", "unknown", "caution", "bad"]

SEVERITY: tuple[Status, ...] = ("ok", "unknown", "caution", "bad")

SAMPLE_S = 0.5
"""Seconds that load and steal are watched."""


@dataclass(frozen=True)
class CheckResult:
    """State of a part of the machine, and advice; `advice` is empty where nothing needs doing."""

    status: Status
    text: str
    advice: str = ""
    value: float | None = None
    """Value of one GPU: `{}` in `text` stands for it, so that equal answers share a line."""


UNKNOWN = CheckResult("unknown", "not readable here")


def make_result(status: Status, text: str, advice: str) -> CheckResult:
    """Make an answer of any status; ok goes without the advice."""
    return CheckResult(status, text, "" if status == "ok" else advice)


def find_worst(statuses: Iterable[Status]) -> Status:
    """Find the gravest of the statuses; ok without any."""
    return max(statuses, key=SEVERITY.index, default="ok")


def grade_value(value: float, *, caution: float, bad: float) -> Status:
    """Grade a value that is better the smaller it is; a limit belongs to the worse side."""
    return "bad" if value >= bad else "caution" if value >= caution else "ok"


def try_reading(read: Callable[[], T]) -> T | None:
    """Return what `read` returns; None where this system has no such reading."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # psutil warns of what /proc lacks; here that is an answer
            return read()
    except (OSError, ValueError, LookupError, AttributeError, RuntimeError, ImportError, psutil.Error):
        return None


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA_VISIBLE_DEVICES leaves, by its place and handle in NVML."""

    index: int
    handle: Any

    def ask(self, names: str, *arguments: Any) -> Any:
        """Return the answer of NVML's function (`new|old`); None where this GPU has none."""
        return ask_nvml(names, self.handle, *arguments)

    @property
    def name(self) -> str:
        return self.ask("nvmlDeviceGetName") or "name unknown"


class Host(contextlib.ExitStack):
    """The machine that is checked, and readings that several checks share; NVML is open until it is left.

    `root` is where /proc, /sys and /dev are found.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.env, self.quota = root, select_environment(), read_cpu_quota(root)
        self.has_mps = has_mps()
        self.shared_memory = try_reading(lambda: shutil.disk_usage(root / "dev/shm"))
        self.allowed = frozenset(get_allowed_cores())
        self.nodes = _read_nodes(root)
        # First what our own work would disturb: the load, then the GPUs, then the import of torch.
        before = try_reading(read_load)
        time.sleep(SAMPLE_S)
        self.load = next(iter(compute_loads([before], [try_reading(read_load)])), None)
        self._open_gpus()
        self.torch, self.torch_error = _import_torch()
        self.num_cuda_devices = try_reading(lambda: int(self.torch.cuda.device_count()))

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

    def _open_gpus(self) -> None:
        """Find the GPUs: none without a driver; `gpus` is None where the driver only answers an error."""
        self.gpus: tuple[Gpu, ...] | None = ()
        self.num_gpus_present = 0
        self.gpu_error: str | None = None
        try:
            handles = self.enter_context(open_nvml())
        except pynvml.NVMLError as error:
            absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if error.value not in absent:
                self.gpus, self.gpu_error = None, str(error)
            return
        chosen = find_visible_gpus(
            self.env.get("CUDA_VISIBLE_DEVICES"), [list_uuids(handle) for handle in handles]
        )
        self.gpus = tuple(Gpu(index, handles[index]) for index in chosen)
        self.num_gpus_present = len(handles)


def _import_torch() -> tuple[Any, str]:
    """Import torch: the module, or the first line of why it does not load."""
    try:
        return importlib.import_module("torch"), ""
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return None, next(iter(str(error).strip().splitlines()), type(error).__name__)


def _read_nodes(root: Path) -> dict[int, frozenset[int]]:
    """Cores by NUMA node; nodes of memory alone are left out."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cores := parse_cores(read_text(folder / "cpulist") or ""):
            found[int(folder.name.removeprefix("node"))] = cores
    return found


Check: TypeAlias = Callable[[Host], CheckResult | None]
"""Reads and judges; None where there is nothing to say of such a machine."""
