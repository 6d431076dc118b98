"""What the doctor says of machines that are not at hand."""

import functools
import importlib.util
import json
import math
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pynvml
import pytest
from doctor_machines import (
    CPUS,
    GIB,
    NODES,
    Machine,
    blank,
    changed,
    container,
    fake_torch,
    found_in,
    h100,
    h100_box,
    laptop,
    meminfo,
    stat,
    virtual_gpu,
    write,
)

from ddp_bench.bench import sysfs
from ddp_bench.bench.doctor import libraries, main, resources
from ddp_bench.bench.doctor.gpu import span
from ddp_bench.bench.doctor.host import Host, Readings, attempt, figures, graded
from ddp_bench.bench.doctor.libraries import Interface, nccl_interfaces

SOME_GPUS = [h100(index) for index in range(2)]
BY_PCIE = {"P2PStatus": pynvml.NVML_P2P_STATUS_NOT_SUPPORTED}
BATCHES = 8 * 2 * 2 * 256 * 3 * 224 * 224 * 4  # GPUs x workers x prefetched x images x float32
DRIVER = f"{CPUS}/cpu0/cpufreq/scaling_driver"
GOVERNOR = f"{CPUS}/cpu0/cpufreq/scaling_governor"
PRESSURE = "proc/pressure/memory"
PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
QUOTA = "sys/fs/cgroup/cpu.max"
DOWN = {"eth1": (False, "203.0.113.4", 0)}
PORT = "sys/class/infiniband/mlx5_0/ports/1/state"


def gpu(index, **answers):
    return {"gpus": {index: answers}}


def held(bits):
    return gpu(5, CurrentClocksEventReasons=bits)


def process(mib, pid=4242):
    return [SimpleNamespace(pid=pid, usedGpuMemory=mib * 2**20)]


def rates(percent):
    return SimpleNamespace(gpu=percent)


def memory(used_mib):
    return SimpleNamespace(used=used_mib * 2**20, total=81559 * 2**20)


def env(**variables):
    return {"env": variables}


def file(path, content):
    return {"files": {path: content}}


def later(times):
    return {"later": {"proc/stat": times}}


def busy(share, *, num_cores=8, steal=0.0):
    return later(stat(num_cores, busy=share, steal=steal, since=101))


def stolen_ever(share):
    """Of 1,000 s, of which none was stolen in the last."""

    def times(seconds):
        line = f"0 0 0 {100 * seconds - 1e5 * share:.0f} 0 0 0 {1e5 * share:.0f} 0 0"
        return "\n".join(f"cpu{core} {line}" for core in ["", *range(8)])

    return {**file("proc/stat", times(1000)), **later(times(1001))}


def torch(*version, **more):
    return {"torch": fake_torch(*version, **more)}


SITUATIONS = {
    # By line: machine, what differs, status, a part of its text and advice.
    "GPUs": [
        (laptop, {}, "ok", "no CUDA device: devices are CPU cores"),
        (h100_box, {}, "ok", "8 x NVIDIA H100 80GB HBM3"),
        (h100_box, gpu(7, Name="NVIDIA H200"), "caution", "the slowest sets the pace"),
        (h100_box, gpu(7, MigMode=[1, 1]), "caution", "split by MIG"),
        (virtual_gpu, {}, "caution", "virtual: others can share it"),
        (h100_box, env(CUDA_VISIBLE_DEVICES="0,1"), "ok", "HBM3 (2 of 8 visible)"),
        (
            h100_box,
            {**env(CUDA_VISIBLE_DEVICES=""), **torch()},
            "caution",
            "hides all 8: devices are CPU cores; unset CUDA_VISIBLE_DEVICES",
        ),
        (h100_box, {"gpus": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, **torch()}, "bad", "reboot"),
        (h100_box, {"gpus": pynvml.NVML_ERROR_GPU_IS_LOST}, "unknown", "torch sees 8 CUDA device(s)"),
        (h100_box, {"gpus": pynvml.NVML_ERROR_DRIVER_NOT_LOADED, **torch()}, "ok", "no CUDA device"),
        (laptop, torch(num_devices=4), "unknown", "torch sees 4 device(s), NVIDIA's driver library none"),
    ],
    "GPU use": [
        (
            h100_box,
            gpu(2, ComputeRunningProcesses=process(12034), UtilizationRates=rates(87)),
            "bad",
            "GPU 2: used by process 4242 (12034 MiB), 87% busy; GPU 0-1,3-7: no other",
        ),
        (h100_box, gpu(2, GraphicsRunningProcesses=process(5)), "caution", "used by process 4242"),
        (h100_box, gpu(0, ComputeRunningProcesses=process(5, pid=os.getpid())), "ok", "no other process"),
        (h100_box, gpu(0, UtilizationRates=rates(40)), "bad", "not visible from here"),
        (
            h100_box,
            gpu(0, MemoryInfo=memory(30000)),
            "caution",
            "30000 MiB in use by a process not visible from here",
        ),
    ],
    "GPU clocks": [
        (h100_box, {}, "ok", "345 of 1980 MHz, idle"),
        (h100_box, held(0x40), "bad", "GPU 5: 345 of 1980 MHz, held down by hardware thermal slow-down"),
        (h100_box, held(0x20), "bad", "held down by software thermal slow-down"),
        (h100_box, held(0x81), "bad", "held down by power brake;"),
        (h100_box, held(0x4), "caution", "held down by power cap"),
        (h100_box, held(0x2), "caution", "held down by application clocks"),
        (h100_box, held(0x1), "ok", "345 of 1980 MHz, idle"),
        (h100_box, held(None), "unknown", "why not readable here"),
        (virtual_gpu, {}, "unknown", "not readable here"),
    ],
    "GPU power": [
        (h100_box, {}, "ok", "limit 700 W, default 700 W"),
        (
            h100_box,
            {"gpus": [h100(0) | {"EnforcedPowerLimit": 250000, "PowerManagementDefaultLimit": 400000}]},
            "caution",
            "capped at 250 W, default 400 W; sudo nvidia-smi -pl 400; else compare only runs with this limit",
        ),
        (virtual_gpu, {}, "unknown", "not readable here"),
    ],
    "GPU memory errors": [
        (h100_box, {}, "ok", "none, ECC on"),
        (h100_box, gpu(1, EccMode=[0, 0]), "ok", "GPU 1: none, ECC off"),
        (h100_box, gpu(1, TotalEccErrors=3), "bad", "GPU 1: memory errors that ECC"),
        (h100_box, gpu(1, RemappedRows=(0, 0, 0, 1)), "bad", "ECC could not correct"),
        (virtual_gpu, {}, "unknown", "ECC not reported"),
    ],
    "GPU heat": [
        (h100_box, {}, "ok", "29-36 C"),
        (h100_box, gpu(0, MarginTemperature=11), "ok", "29-36 C"),
        (h100_box, gpu(0, MarginTemperature=10), "caution", "within 10 C of thermal slow-down"),
        (h100_box, gpu(0, MarginTemperature=0), "bad", "at thermal slow-down"),
        (h100_box, gpu(0, MarginTemperature=None), "unknown", "slow-down temperature not readable"),
        (
            h100_box,
            gpu(0, MarginTemperature=None, TemperatureThreshold=35),
            "caution",
            "GPU 0: 29 C, within 10 C",
        ),
        (virtual_gpu, {}, "unknown", "not readable here"),
    ],
    "GPU persistence": [
        (h100_box, {}, "ok", "on"),
        (h100_box, gpu(3, PersistenceMode=0), "caution", "GPU 3: off"),
        (virtual_gpu, {}, "unknown", "not readable here"),
    ],
    "GPU links": [
        (virtual_gpu, {}, "ok", "one GPU: nothing to link"),
        (h100_box, {}, "ok", "28 of 28 pairs by NVLink"),
        (h100_box, {"gpus": SOME_GPUS, "link": BY_PCIE}, "caution", "pairs by host memory; choose"),
        (
            h100_box,
            {"gpus": [one | {"Name": "NVIDIA GeForce RTX 4090"} for one in SOME_GPUS], "link": BY_PCIE},
            "ok",
            "1 of 1 pairs by host memory",
        ),
        (h100_box, gpu(7, MigMode=[1, 1]), "unknown", "not readable here"),
    ],
    "GPU affinity": [
        (h100_box, {}, "ok", "GPU 0-3: on NUMA node 0; GPU 4-7: on NUMA node 1"),
        (h100_box, {"allowed": frozenset(range(56))}, "caution", "GPU 4-7: on NUMA node 1, wh"),
        (h100_box, gpu(3, PciInfo=None), "unknown", "GPU 3: not readable here"),
        (h100_box, file(f"{NODES}/node1/cpulist", ""), "ok", "one NUMA node"),
        (virtual_gpu, {}, "unknown", "not readable here"),
    ],
    "cores": [
        (h100_box, {}, "ok", "112 of 112 usable, 16 wanted for 8 GPU(s)"),
        (h100_box, {"allowed": frozenset(range(16))}, "ok", "16 of 112 usable"),
        (h100_box, {"allowed": frozenset(range(15))}, "caution", "use fewer GPUs"),
        (h100_box, {"allowed": frozenset(range(7))}, "bad", "use fewer GPUs"),
        (laptop, {}, "caution", "two devices can share one core; --gpus up to 4"),
        (laptop, {"allowed": frozenset({1})}, "caution", "1 of 8 usable: nothing can be scaled on it"),
        (container, {}, "caution", "2.5 of 8 usable, 8 visible"),
        (container, {}, "caution", "--gpus up to 2"),
        (container, file(QUOTA, "50000 100000"), "bad", "0.5 of 8 usable"),
    ],
    "governor": [
        (h100_box, {}, "ok", "performance (intel_pstate)"),
        (h100_box, file(GOVERNOR, "schedutil"), "caution", "performance/schedutil"),
        (laptop, {}, "caution", "frequency-set -g performance"),
        (laptop, file(DRIVER, "acpi-cpufreq"), "bad", "held at the lowest frequency"),
        (laptop, file(DRIVER, "amd-pstate-epp"), "caution", "frequency follows the load"),
        (container, {}, "unknown", "not shown in this virtual machine"),
    ],
    "turbo": [
        (h100_box, {}, "ok", "on"),
        (laptop, {}, "caution", "scaling looks worse than it is"),
        (laptop, file(f"{CPUS}/intel_pstate/no_turbo", "1"), "ok", "off"),
        (container, file(f"{CPUS}/cpufreq/boost", "1"), "caution", "0 into cpufreq/boost"),
        (container, {}, "unknown", "not shown in this virtual machine"),
    ],
    "load": [
        (h100_box, busy(0.5, num_cores=112), "ok", "56 of 112 cores busy"),
        (h100_box, busy(0.95, num_cores=112), "bad", "stop other programs"),
        (laptop, busy(0.04), "ok", "0.32 of 8 cores busy"),
        (laptop, busy(0.06), "caution", "0.48 of 8 cores busy"),
        (laptop, busy(0.24), "caution", "1.92 of 8 cores busy"),
        (laptop, busy(0.25), "bad", "2 of 8 cores busy"),
        (laptop, {"load": 8.5}, "caution", "load average 8.50 over 1 min"),
        (laptop, later(stat(4, since=101)), "unknown", "not readable"),
    ],
    "steal": [
        (laptop, later(stat(8, since=100)), "unknown", "not readable"),
        (laptop, stolen_ever(0.019), "ok", "0.0% over 0.5 s, 1.9% since start-up"),
        (laptop, stolen_ever(0.03), "caution", "other virtual machines take this one's cores"),
        (laptop, busy(0.0, steal=0.02), "caution", "2.0% over 0.5 s"),
        (laptop, busy(0.0, steal=0.11), "bad", "compare by ratios only"),
    ],
    "NUMA": [
        (laptop, {}, "ok", "1 node"),
        (h100_box, {}, "ok", "2 nodes, cores allowed on 2"),
        (h100_box, file("proc/sys/kernel/numa_balancing", "1"), "caution", "kernel.numa_balancing=0"),
        (virtual_gpu, {}, "unknown", "not readable here"),
    ],
    "memory": [
        (h100_box, {}, "ok", "1990.0 GiB available of 2048.0 GiB"),
        (laptop, file("proc/meminfo", meminfo(16, 7)), "bad", "8 ranks need 8.0 GiB and more"),
        (container, {}, "caution", "container limit 3.0 GiB; 2 ranks need"),
    ],
    "memory stalls": [
        (laptop, file(PRESSURE, "some avg10=4.99"), "ok", "5.0% of the last 10 s"),
        (laptop, file(PRESSURE, "some avg10=6.50"), "caution", "6.5% of the last 10 s"),
        (laptop, file(PRESSURE, "some avg10=25.00"), "bad", "stop programs"),
    ],
    "swap": [
        (laptop, file("proc/meminfo", meminfo(16, 9, 2**20)), "ok", "1.0 GiB in use"),
        (laptop, {"later": {"proc/vmstat": "pswpin 1\npswpout 0"}}, "caution", "being read back"),
    ],
    "huge pages": [
        (laptop, file(PAGES, "always madvise [never]"), "caution", "echo madvise"),
        (laptop, {}, "ok", "madvise: bench.run's ranks on CPU cores use them"),
        (laptop, file(PAGES, ""), "unknown", "not readable here"),
    ],
    "shared memory": [
        (h100_box, {"shm": (BATCHES, BATCHES + 1)}, "ok", "free of"),
        (h100_box, {"shm": (BATCHES, BATCHES)}, "caution", "docker run --shm-size=10g"),
        (container, {}, "caution", "64 MiB free of 64 MiB"),
    ],
    "disk": [
        (laptop, {}, "ok", "900.0 GiB free for results"),
        (laptop, {"disk": (GIB, GIB)}, "caution", "with --out"),
        (container, {}, "bad", "50 MiB free"),
    ],
    "threads": [
        (h100_box, env(OMP_NUM_THREADS="14"), "ok", "14 per rank x 8 GPU(s)"),
        (h100_box, env(OMP_NUM_THREADS="16"), "caution", "OMP_NUM_THREADS=14"),
        (h100_box, env(OMP_NUM_THREADS="4", MKL_NUM_THREADS="16"), "caution", "MKL_NUM_THREADS=14"),
        (h100_box, env(OMP_NUM_THREADS="many"), "caution", "no number of threads"),
        (h100_box, env(GOMP_CPU_AFFINITY="0-3"), "caution", "unset GOMP_CPU_AFFINITY"),
        (laptop, env(OMP_NUM_THREADS="16"), "ok", "a CPU core standing in for a GPU runs 1"),
    ],
    "gloo network": [
        (h100_box, {}, "ok", "eth0 (192.0.2.7, 10000 Mbit/s)"),
        (laptop, {}, "caution", "resolves to 127.0.1.1"),
        (laptop, {}, "caution", "for several machines: export GLOO_SOCKET_IFNAME=eth0"),
        (laptop, {"resolves": ""}, "caution", "resolves to nothing"),
        (laptop, env(GLOO_SOCKET_IFNAME="eth0"), "ok", "eth0 (192.0.2.7"),
        (laptop, env(GLOO_SOCKET_IFNAME="eth"), "bad", "eth is not there or not up"),
        (laptop, {**env(GLOO_SOCKET_IFNAME="eth1"), "interfaces": DOWN}, "bad", "(down)"),
    ],
    "NCCL network": [
        (h100_box, {}, "ok", "Mbit/s); RDMA ports mlx5_0 400 Gb/sec (4X NDR)"),
        (h100_box, env(NCCL_SOCKET_IFNAME="ens5"), "bad", "there are lo, eth0"),
        (
            h100_box,
            env(NCCL_SOCKET_IFNAME="ens5"),
            "bad",
            "for several machines: export NCCL_SOCKET_IFNAME=eth0",
        ),
        (h100_box, file(PORT, "1: DOWN"), "caution", "none of 1 RDMA ports is known"),
        (h100_box, env(NCCL_SOCKET_IFNAME="lo"), "caution", "loopback only"),
        (
            h100_box,
            {**env(NCCL_SOCKET_IFNAME="docker"), "interfaces": {"docker0": (True, "172.17.0.1", 0)}},
            "caution",
            "a bridge inside this machine",
        ),
    ],
    "torch": [
        (h100_box, {}, "ok", "CUDA 12.8, NCCL 2.27.5"),
        (h100_box, torch(num_devices=0), "bad", "built without CUDA: it cannot use the 8 GPU(s) here"),
        (h100_box, torch("2.11.0", cuda="12.8"), "bad", "it sees none of the 8 GPU(s)"),
        (laptop, {"torch": None}, "bad", "does not load"),
    ],
    "torchvision": [
        (laptop, {}, "ok", "0.26.0, made for this torch"),
        (laptop, torch("2.13.0"), "bad", "needs torch==2.11.0, here is 2.13.0"),
        (laptop, {"vision": None}, "unknown", "not readable here"),
        (
            laptop,
            {**torch("2.16.0.dev20261001"), "vision": ("0.30", "torch==2.16.0.dev20261001")},
            "ok",
            "made for this torch",
        ),
    ],
    "CUDA driver": [
        (h100_box, {"system": {"CudaDriverVersion_v2": 12020}}, "ok", "570.86.15, up to CUDA 12.2"),
        (h100_box, {"system": {"CudaDriverVersion_v2": 13000}}, "ok", "up to CUDA 13.0"),
        (
            h100_box,
            {"system": {"CudaDriverVersion_v2": 11080}},
            "bad",
            "torch was built for 12.8; update the driver",
        ),
    ],
    "settings": [
        (h100_box, env(NCCL_DEBUG="WARN"), "ok", "none that slow a step down"),
        (h100_box, env(NCCL_DEBUG="info"), "caution", "NCCL_DEBUG=info: slower steps"),
        (
            h100_box,
            env(CUDA_LAUNCH_BLOCKING="1", NCCL_DEBUG="info"),
            "bad",
            "unset CUDA_LAUNCH_BLOCKING NCCL_DEBUG",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "situation"),
    [(name, row) for name, rows in SITUATIONS.items() for row in rows],
    ids=[f"{name} {status}: {says[:40]}" for name, rows in SITUATIONS.items() for _, _, status, says in rows],
)
def test_situation(name, situation, tmp_path):
    make, changes, status, says = situation
    found = found_in(changed(make(), **changes), tmp_path)[name]
    assert found.status == status
    assert says in f"{found.text}; {found.advice}"


@pytest.mark.parametrize("make", [h100_box, laptop, container, virtual_gpu])
def test_every_caution_says_what_to_do_on_one_plain_line(make, tmp_path):
    for finding in found_in(make(), tmp_path).values():
        assert (finding.advice != "") == (finding.status in ("caution", "bad")), finding
        assert f"{finding.text}{finding.advice}".isascii()
        assert "\n" not in finding.text + finding.advice


def test_an_idle_eight_gpu_box_is_fit_in_every_line(tmp_path):
    found = found_in(h100_box(), tmp_path)
    assert {name: line.text for name, line in found.items() if line.status != "ok"} == {}
    assert "huge pages" not in found  # they are for ranks on cores


def test_a_machine_without_gpu_has_one_line_about_gpus(tmp_path):
    found = found_in(laptop(), tmp_path)
    assert [name for name in found if "GPU" in name or name in ("CUDA driver", "NCCL network")] == ["GPUs"]


def test_what_was_not_read_is_unknown_and_never_judged(tmp_path):
    judged = {name: line.status for name, line in found_in(blank(), tmp_path).items()}
    # What the environment says is always known, and so is that torch is not there.
    expected = {"GPUs": "ok", "threads": "ok", "settings": "ok", "torch": "bad"}
    assert {name: status for name, status in judged.items() if status != "unknown"} == expected


def without_each_reading(machine):
    """Copies of a machine, each with one reading missing."""
    copies = [changed(machine, files={path: None}) for path in machine.files]
    if isinstance(machine.gpus, list):
        # Without its name a GPU is none to CUDA_VISIBLE_DEVICES.
        copies += [changed(machine, **gpu(0, **{name: None})) for name in machine.gpus[0] if name != "UUID"]
    copies += [changed(machine, **{name: None}) for name in ("load", "shm", "disk", "interfaces", "vision")]
    return [*copies, changed(machine, system={"DriverVersion": None})]


# Not the container: without its quota it looks like more devices, each of which needs memory.
@pytest.mark.parametrize("make", [h100_box, laptop, virtual_gpu])
def test_no_missing_reading_makes_a_machine_worse(make, tmp_path):
    def bad(machine, root):
        return {name for name, line in found_in(machine, root).items() if line.status == "bad"}

    before = bad(make(), tmp_path)
    copies = without_each_reading(make())
    assert len(copies) > 20
    for number, copy in enumerate(copies):
        root = tmp_path / str(number)
        assert bad(copy, root) <= before, copy
        shutil.rmtree(root)


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """The command on a machine: its exit code and what it prints."""

    def run(machine, *options):
        with monkeypatch.context() as patch:
            machine.install(tmp_path, patch)
            patch.setattr(main, "examine", functools.partial(main.examine, tmp_path))
            return main.main(options), capsys.readouterr().out

    return run


def test_exit_code_is_one_only_where_something_is_bad(doctor):
    assert [doctor(make())[0] for make in (h100_box, laptop, virtual_gpu)] == [0, 0, 0]
    code, out = doctor(container())
    assert code == 1
    assert "not fit to measure on" in out.splitlines()[-1]


def test_every_finding_is_on_the_screen_with_what_to_do(doctor, tmp_path):
    _, out = doctor(container())
    for finding in found_in(container(), tmp_path).values():
        (row,) = [row for row in out.splitlines() if row[9:].startswith(f"{finding.name}  ")]
        assert row.startswith(finding.status)
        assert finding.text[:40] in row
        assert finding.advice[:40] in out


def test_quiet_shows_only_what_needs_attention(doctor):
    _, out = doctor(laptop(), "--quiet")
    assert {row.split()[0] for row in out.splitlines() if not row.startswith(" ")} == {"caution"}


def test_quiet_says_nothing_of_a_fit_machine(doctor):
    assert doctor(h100_box(), "--quiet") == (0, "")


def test_json_has_findings_and_readings(doctor):
    code, out = doctor(changed(h100_box(), allowed=frozenset(range(60))), "--json")
    told = json.loads(out)
    assert (code, told["status"], len(told["findings"])) == (0, "ok", 27)
    read = told["readings"]
    assert read["cpu"]["quota"] == "unlimited"
    assert read["cpu"]["nodes"][1] == {"number": 1, "num_cores": 56, "num_allowed": 4}
    first = read["gpus"][0]
    assert (first["index"], first["clock_reasons"], first["numa_node"]) == (0, ["idle"], 0)
    assert (first["used_mib"], first["total_mib"], first["margin_c"]) == (4, 81559, 56)
    assert (first["processes"], first["power_limit_w"], first["virtual"]) == ([], 700.0, False)
    assert read["pairs"][0] == {"first": 0, "second": 1, "nvlink": True, "peer_access": True, "path": "SYS"}
    assert read["network"]["default_route"] == "eth0"
    assert read["software"]["driver_cuda"] == "12.8"


def test_json_is_null_where_nothing_could_be_read(doctor):
    broken = changed(blank(), gpus=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    code, out = doctor(broken, "--json", "--quiet")
    told = json.loads(out)
    assert (code, told["status"]) == (1, "bad")
    assert {line["status"] for line in told["findings"]} <= {"caution", "bad"}
    read = told["readings"]
    assert (read["gpus"], read["num_gpus_present"], read["cpu"]["quota"]) == (None, None, None)


def test_nothing_of_nvml_is_set_and_every_name_is_known_to_it(tmp_path, monkeypatch):
    machine = h100_box()
    fake = machine.nvml()
    monkeypatch.setattr(machine, "nvml", lambda: fake)
    found_in(machine, tmp_path)
    assert (fake.absent, fake.set_calls) == (set(), [])


IB0 = Interface("ib0", is_up=True, is_loopback=False, addresses=("198.51.100.2",))
ETH0 = Interface("eth0", is_up=True, is_loopback=False, addresses=("192.0.2.7",))
ETH1 = Interface("eth1", is_up=False, is_loopback=False, addresses=("203.0.113.4",))
DOCKER = Interface("docker0", is_up=True, is_loopback=False, addresses=("172.17.0.1",))
LOOPBACK = Interface("lo", is_up=True, is_loopback=True, addresses=("127.0.0.1",))


@pytest.mark.parametrize(
    ("setting", "present", "chosen"),
    [
        (None, (LOOPBACK, DOCKER, ETH0, ETH1), ["eth0"]),
        (None, (LOOPBACK, ETH0, IB0), ["ib0"]),
        (None, (LOOPBACK, DOCKER), ["docker0"]),
        (None, (LOOPBACK,), ["lo"]),
        ("eth,ib", (LOOPBACK, ETH0, IB0, ETH1), ["eth0", "ib0"]),
        ("=eth", (LOOPBACK, ETH0), []),
        ("=eth0,lo", (LOOPBACK, ETH0), ["lo", "eth0"]),
        ("^docker,lo", (LOOPBACK, DOCKER, ETH0), ["eth0"]),
        ("^=lo", (LOOPBACK, ETH0), ["eth0"]),
        ("eth1", (LOOPBACK, ETH0, ETH1), []),
    ],
)
def test_the_interface_nccl_would_choose(setting, present, chosen):
    assert [interface.name for interface in nccl_interfaces(present, setting)] == chosen


def test_default_route_is_the_one_that_leads_anywhere(doctor):
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
    routes = (
        f"{head}\ntun0\t0000000A\t0\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
        "ens5\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0"
    )
    _, out = doctor(changed(laptop(), **file("proc/net/route", routes)), "--json")
    assert json.loads(out)["readings"]["network"]["default_route"] == "ens5"


@pytest.mark.parametrize(
    ("tree", "cores", "memory_bytes"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5, math.inf),
        (
            {
                "proc/self/cgroup": "0::/pod/job",
                "sys/fs/cgroup/pod/cpu.max": "400000 100000",
                "sys/fs/cgroup/pod/job/cpu.max": "max 100000",
                "sys/fs/cgroup/pod/memory.max": "max",
                "sys/fs/cgroup/pod/job/memory.max": "3221225472",
            },
            4.0,
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            0.5,
            math.inf,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "what?"}, math.inf, math.inf),
        ({}, None, None),
    ],
    ids=["v2", "v2 nested", "v1", "garbage", "no cgroups"],
)
def test_container_limits(tmp_path, tree, cores, memory_bytes):
    root = write(tmp_path, tree)
    assert sysfs.cpu_quota(root) == cores
    assert sysfs.memory_limit_bytes(root) == memory_bytes


def test_lists_and_ranges_of_cores_and_spans():
    assert sysfs.cores_in("0-3,8") == {0, 1, 2, 3, 8}
    assert sysfs.cores_in("") == frozenset()
    assert sysfs.cores_in("all") is None
    assert (sysfs.ranges([0, 1, 2, 3, 6]), sysfs.ranges([5])) == ("0-3,6", "5")
    assert (span([41.2, 40.6]), span([40, 47]), span([])) == ("41", "40-47", "?")


def test_a_limit_belongs_to_the_worse_side_and_sizes_read_well():
    assert [graded(v, caution=1, bad=2) for v in (0.9, 1, 1.9, 2)] == ["ok", "caution", "caution", "bad"]
    assert (resources.gib(64 * 2**20), resources.gib(1.5 * GIB)) == ("64 MiB", "1.5 GiB")
    assert [figures(value) for value in (8, 2.5, 0.25)] == ["8", "2.5", "0.25"]


def test_the_results_folder_need_not_exist(tmp_path):
    here = cast("Host", SimpleNamespace(disk=Readings()))
    assert resources.disk(here, tmp_path / "not" / "there").status != "unknown"
    room = os.statvfs(tmp_path)
    assert here.disk["free_bytes"] == pytest.approx(room.f_bavail * room.f_frsize, rel=0.2)
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in resources.disk(here, tmp_path / "file").text


def test_a_reading_this_system_lacks_is_none():
    def denied():
        raise psutil.AccessDenied

    assert attempt(denied) is None
    assert attempt(lambda: {}["absent"]) is None
    assert attempt(lambda: 3) == 3


def test_guests_of_a_core_are_not_counted_twice(doctor):
    # In between 1 s of user time, which was a guest's, 1 s idle, 1 s waiting for the disk, 1 s stolen.
    before = "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 1500 0 0 8000 0 0 0 500 500 0\ncpu1 0 0 0 10000 0 0 0 0 0 0"
    after = "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 1600 0 0 8100 100 0 0 600 600 0\ncpu1 900 0 0 10000 0 0 0 0 0 0"
    machine = changed(laptop(), allowed=frozenset({0}), **file("proc/stat", before), **later(after))
    cpu = json.loads(doctor(machine, "--json")[1])["readings"]["cpu"]
    assert (cpu["busy_share"], cpu["steal_share"]) == (0.25, 0.25)
    assert cpu["steal_share_since_boot"] == pytest.approx(6 / 104)


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch, tmp_path):
    answer = threading.Event()
    monkeypatch.setattr(libraries, "LOOK_UP_S", 0.01)
    monkeypatch.setattr(Machine, "look_up", lambda *_, **__: answer.wait(30) and [])
    assert "took too long" in found_in(laptop(), tmp_path)["gloo network"].text
    answer.set()


@pytest.mark.parametrize(
    ("missing", "says"), [(False, "undefined symbol: _ZN3c10"), (True, "does not load: not installed")]
)
def test_operators_made_for_another_torch(missing, says, monkeypatch, tmp_path):
    def refuse(path):
        raise OSError(f"{Path(path).name}: undefined symbol: _ZN3c10\nmore")

    other = laptop()
    other.torch.ops.load_library = refuse
    if missing:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    found = found_in(other, tmp_path)["torchvision"]
    assert (found.status, says in found.text, "more" in found.text) == ("bad", True, False)
