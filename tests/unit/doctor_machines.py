"""Machines that are not at hand, as what the doctor's checks read there: files, NVML, environment, torch."""

import copy
import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
from stand_ins import Patch, stand_in

from ddp_bench.bench.doctor import host, main, resources
from ddp_bench.bench.machine import gpus, load

GIB = 2**30
PYTHON = "3.11.7"
CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"


class Nvml:
    """pynvml with given answers; everything else this GPU does not support, as virtual GPUs say."""

    def __init__(self, answers):
        self.answers = answers
        self.absent = set()
        self.set_calls = []

    def __getattr__(self, name):
        if not hasattr(pynvml, name):
            self.absent.add(name)
            raise AttributeError(name)
        if not name.startswith("nvml") or not callable(getattr(pynvml, name)):
            return getattr(pynvml, name)
        if "Set" in name or "Reset" in name or "Clear" in name:
            self.set_calls.append(name)
        return self.answers.get(name, self.not_supported)

    @staticmethod
    def not_supported(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@dataclass
class Machine:
    """What is read there; `gpus` is what NVML answers of each, or its error; None is a machine without."""

    files: dict[str, str | None]
    env: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] | int = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    link: dict[str, Any] = field(default_factory=dict)
    """What it answers of every pair."""
    num_cores: int | None = 8
    allowed: frozenset[int] = frozenset(range(8))
    load: float | None = 0.4
    shm: tuple[int, int, int] | None = (8 * GIB, 0, 8 * GIB)
    """Total, used and free bytes of /dev/shm."""
    torch: Any = None
    later: dict[str, str] = field(default_factory=dict)
    """Files as they are once load has been watched."""

    def nvml(self):
        if isinstance(self.gpus, int):
            error = pynvml.NVMLError(self.gpus)
            return Nvml({"nvmlInit": lambda: _raise(error)})
        handles = self.gpus
        names = {name for handle in handles for name in handle}
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(handles),
            "nvmlDeviceGetHandleByIndex": lambda index: handles[index],
        }
        for name in names:
            answers[f"nvmlDeviceGet{name}"] = lambda handle, *_, name=name: (
                handle[name] if handle.get(name) is not None else Nvml.not_supported()
            )
        for name, value in self.link.items():
            answers[f"nvmlDeviceGet{name}"] = lambda *_, value=value: value
        return Nvml(answers)

    def install(self, root, patch):
        """Let the doctor find this machine."""
        write(root, self.files)

        patch.setattr(gpus, "pynvml", self.nvml())
        patch.setattr(psutil, "PROCFS_PATH", str(root / "proc"))
        clock = iter((0.0, 1.0))
        watched = SimpleNamespace(sleep=lambda _: write(root, self.later), monotonic=lambda: next(clock))
        patch.setattr(host, "time", watched)
        patch.setattr(load, "time", watched)
        idle = SimpleNamespace(cpu_times=lambda: (0.0,) * 4, children=lambda **_: [])
        patch.setattr(psutil, "Process", lambda: idle)
        patch.setattr(os, "cpu_count", lambda: self.num_cores)
        patch.setattr(os, "sched_getaffinity", lambda _: set(self.allowed))
        patch.setattr(os, "getloadavg", lambda: _raise(OSError()) if self.load is None else (self.load,) * 3)
        patch.setitem(sys.modules, "torch", self.torch)
        stand_in(patch, host, {"shutil.disk_usage": lambda _: self.shm or _raise(OSError())})
        stand_in(patch, resources, {"platform.python_version": lambda: PYTHON})
        for name in list(host.select_environment()):
            patch.delenv(name)
        for name, value in self.env.items():
            patch.setenv(name, value)


def _raise(error):
    raise error


def write(root, files):
    for path, content in files.items():
        if content is None:
            continue
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{content}\n")
    return root


def found_in(machine, root):
    """The doctor's lines of a machine, by name."""
    with Patch.context() as patch:
        machine.install(root, patch)
        return main.examine(root)


def fake_torch(version="2.11.0", *, cuda=None, num_devices=0):
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            nccl=SimpleNamespace(version=lambda: (2, 27, 5) if cuda else _raise(RuntimeError())),
            device_count=lambda: num_devices,
        ),
    )


def stat(num_cores, *, busy=0.0, steal=0.0, since=0):
    """/proc/stat at a moment; the shares are of the second that it then went on."""
    used = [round(100 * share) for share in (busy, 0, 0, 1 - busy - steal, 0, 0, 0, steal, 0, 0)]
    ever = [0, 0, 0, 100 * since, 0, 0, 0, 0, 0, 0]
    line = " ".join(str(then + now) for then, now in zip(ever, used, strict=True))
    return "\n".join([f"cpu  {line}", *(f"cpu{core} {line}" for core in range(num_cores))])


def meminfo(total_gib, available_gib):
    sizes = {"MemTotal": total_gib * 2**20, "MemFree": available_gib * 2**20, "Buffers": 0, "Cached": 0}
    sizes |= {"MemAvailable": available_gib * 2**20}
    return "\n".join(f"{name}: {size:.0f} kB" for name, size in sizes.items())


def h100(index):
    """What NVML answers of one."""
    return {
        "Name": "NVIDIA H100 80GB HBM3", "UUID": f"GPU-{index}1234567",
        "VirtualizationMode": 0, "MigMode": [0, 0],
        "PciInfo": SimpleNamespace(busId=f"00000000:{index}7:00.0"),
        "ComputeRunningProcesses": [], "GraphicsRunningProcesses": [],
        "UtilizationRates": SimpleNamespace(gpu=0),
        "MemoryInfo": SimpleNamespace(used=4 * 2**20, total=81559 * 2**20),
        "ClockInfo": 345, "MaxClockInfo": 1980, "CurrentClocksEventReasons": 0x1,
        "EnforcedPowerLimit": 700000, "PowerManagementDefaultLimit": 700000,
        "ComputeMode": pynvml.NVML_COMPUTEMODE_DEFAULT,
        "EccMode": [1, 1], "TotalEccErrors": 0, "RemappedRows": (0, 0, 0, 0),
    }  # fmt: skip


NVLINK = {"P2PStatus": pynvml.NVML_P2P_STATUS_OK}


def h100_box():
    """Eight H100 joined by NVSwitch, two sockets, InfiniBand, nothing else running."""
    files = {f"{CPUS}/cpu{core}/cpufreq/scaling_governor": "performance" for core in range(2)}
    files |= {f"sys/bus/pci/devices/0000:{gpu}7:00.0/numa_node": f"{gpu // 4}" for gpu in range(8)}
    files |= {
        f"{CPUS}/cpu0/cpufreq/scaling_driver": "intel_pstate",
        f"{CPUS}/intel_pstate/no_turbo": "0",
        f"{NODES}/node0/cpulist": "0-55",
        f"{NODES}/node1/cpulist": "56-111",
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/cpu.max": "max 100000",
        "sys/fs/cgroup/memory.max": "max",
        "proc/stat": stat(112, since=100),
        "proc/meminfo": meminfo(2048, 1990),
        "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1",
        "proc/sys/kernel/numa_balancing": "0",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }
    return Machine(
        files,
        gpus=[h100(index) for index in range(8)],
        link=dict(NVLINK),
        num_cores=112,
        allowed=frozenset(range(112)),
        torch=fake_torch("2.11.0+cu128", cuda="12.8", num_devices=8),
        later={"proc/stat": stat(112, since=101)},
    )


def laptop():
    """No GPU, four cores with two hardware threads each, Intel, on battery."""
    box = h100_box()
    kept = ("proc/", "sys/fs", "sys/kernel", f"{CPUS}/intel")
    files = {path: text for path, text in box.files.items() if path.startswith(kept)}
    files |= {f"{CPUS}/cpu{core}/topology/thread_siblings_list": f"{core % 4}" for core in range(8)}
    files |= {f"{CPUS}/cpu{core}/cpufreq/scaling_governor": "powersave" for core in range(8)}
    files |= {
        f"{CPUS}/cpu0/cpufreq/scaling_driver": "intel_pstate",
        f"{NODES}/node0/cpulist": "0-7",
        "proc/stat": stat(8, since=100),
        "proc/meminfo": meminfo(16, 9),
    }
    later = {"proc/stat": stat(8, since=101)}
    torch = fake_torch("2.11.0+cpu")
    return Machine(files, torch=torch, later=later)


def blank():
    """Nothing can be read."""
    return Machine({}, num_cores=None, allowed=frozenset(), load=None, shm=None)


def changed(machine, **changes):
    """The machine with other values: of files, answers and variables those named, of GPUs by index."""
    made = copy.copy(machine)
    for name, value in changes.items():
        now = getattr(made, name)
        if name == "gpus" and isinstance(value, dict):
            now = [{**one, **value.get(index, {})} for index, one in enumerate(now)]
        else:
            now = {**now, **value} if isinstance(now, dict) and isinstance(value, dict) else value
        setattr(made, name, now)
    return made


BY_PCIE = {"P2PStatus": pynvml.NVML_P2P_STATUS_NOT_SUPPORTED}
BUSY = SimpleNamespace(gpu=87)
MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/"}
OTHERS = [SimpleNamespace(pid=4242, usedGpuMemory=12034 * 2**20)]


def gpu(index, **answers):
    return {"gpus": {index: answers}}


def allowed(num_cores):
    return {"allowed": frozenset(range(num_cores))}


def env(**variables):
    return {"env": variables}


def file(path, content):
    return {"files": {path: content}}


def later(times):
    return {"later": {"proc/stat": times}}


def busy(share, *, num_cores=8, steal=0.0):
    return later(stat(num_cores, busy=share, steal=steal, since=101))


SITUATIONS = {
    # By line: machines, and what differs in them each time; what is said of each is recorded.
    "GPUs": [
        (h100_box, gpu(7, Name="NVIDIA H200"), gpu(7, MigMode=[1, 1]), env(CUDA_VISIBLE_DEVICES="0,1")),
        (h100_box, gpu(0, VirtualizationMode=pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU)),
        (h100_box, {"gpus": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "torch": fake_torch()}),
    ],
    "GPU use": [(h100_box, gpu(2, ComputeRunningProcesses=OTHERS, UtilizationRates=BUSY))],
    "GPU clocks": [(h100_box, *(gpu(5, CurrentClocksEventReasons=bits) for bits in (0x40, 0x4)))],
    "GPU power": [(h100_box, gpu(0, EnforcedPowerLimit=250000))],
    # 3 is NVML_COMPUTEMODE_EXCLUSIVE_PROCESS in nvml.h, 2 ..._PROHIBITED; an MPS server lets several in.
    "GPU compute mode": [
        (h100_box, *(gpu(3, ComputeMode=mode) | env(**mps) for mps in ({}, MPS) for mode in (3, 2)))
    ],
    "GPU memory errors": [(h100_box, gpu(1, TotalEccErrors=3))],
    "GPU links": [(h100_box, {"gpus": [h100(0), h100(1)], "link": BY_PCIE})],
    "GPU affinity": [(h100_box, allowed(56))],
    "cores": [
        (h100_box, allowed(15), allowed(7)),
        (laptop, *(file("sys/fs/cgroup/cpu.max", f"{quota} 100000") for quota in (250000, 50000))),
    ],
    "governor": [(laptop, {"files": {f"{CPUS}/cpu0/cpufreq/scaling_driver": "acpi-cpufreq"}})],
    "turbo": [(laptop, file(f"{CPUS}/intel_pstate/no_turbo", "1"))],
    "load": [(h100_box, busy(0.95, num_cores=112)), (laptop, *(busy(share) for share in (0.04, 0.06, 0.25)))],
    "steal": [(laptop, busy(0.0, steal=0.11))],
    "NUMA": [(h100_box, file("proc/sys/kernel/numa_balancing", "1"))],
    "memory": [(laptop, file("sys/fs/cgroup/memory.max", f"{3 * GIB}"))],
    "shared memory": [(h100_box, {"shm": (64 * 2**20, 0, 64 * 2**20)})],
    "memory stalls": [(laptop, file("proc/pressure/memory", "some avg10=25.00"))],
    "huge pages": [(laptop, file("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"))],
    "threads": [(h100_box, env(OMP_NUM_THREADS="16"), env(GOMP_CPU_AFFINITY="0-3"))],
    "torch": [(h100_box, {"torch": fake_torch()}), (laptop, {"torch": None})],
    "settings": [(h100_box, env(CUDA_LAUNCH_BLOCKING="1", NCCL_DEBUG="info"))],
}


def said_of_each(folder):
    """What the doctor says: every line of the machines above, then the line that a situation is about."""

    def line(name, found):
        return f"{name}: {found.status}: {found.text}; {found.advice}"

    told = []
    for make in (h100_box, laptop):
        told.append(f"# {make.__name__}")
        told += [line(name, found) for name, found in found_in(make(), folder / make.__name__).items()]
    told.append("# changed")
    for name, rows in SITUATIONS.items():
        for make, *each in rows:
            for changes in each:
                found = found_in(changed(make(), **changes), folder / f"{len(told)}")[name]
                told.append(line(name, found))
    return told
