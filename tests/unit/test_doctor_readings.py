from __future__ import annotations

import importlib.util
import math
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from ddp_bench.bench import sysfs
from ddp_bench.bench.doctor.readings import NumaNode, software, system
from ddp_bench.bench.doctor.readings.system import attempt, read_cpu, read_disk, read_memory, read_network


def write(root: Path, tree: dict[str, str]) -> Path:
    for path, content in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content + "\n")
    return root


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
            3 * 2**30,
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
def test_container_limits(
    tmp_path: Path, tree: dict[str, str], cores: float | None, memory_bytes: float | None
) -> None:
    root = write(tmp_path, tree)
    assert sysfs.cpu_quota(root) == cores
    assert sysfs.memory_limit_bytes(root) == memory_bytes


def test_lists_of_cores() -> None:
    assert sysfs.cores_in("0-3,8") == {0, 1, 2, 3, 8}
    assert sysfs.cores_in("") == frozenset()
    assert sysfs.cores_in("all") is None


def test_cores_of_another_machine(tmp_path: Path) -> None:
    cpus = "sys/devices/system/cpu"
    tree = {f"{cpus}/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}" for i in range(4)}
    tree |= {f"{cpus}/cpu{i}/cpufreq/scaling_governor": "powersave" for i in range(4)}
    tree |= {f"{cpus}/cpu{i}/cpufreq/scaling_driver": "intel_pstate" for i in range(4)}
    tree |= {
        f"{cpus}/intel_pstate/no_turbo": "0",
        "proc/cpuinfo": "processor : 0\nflags\t\t: fpu hypervisor",
        "proc/sys/kernel/numa_balancing": "1",
        "proc/pressure/memory": "some avg10=6.50 avg60=0.00 avg300=0.00 total=1",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/devices/system/node/node0/cpulist": "0-1",
        "sys/devices/system/node/node1/cpulist": "2-3",
        "sys/devices/system/node/node2/cpulist": "",
    }
    found = read_cpu(write(tmp_path, tree), frozenset({0, 1, 2}))
    assert (found.allowed, found.allowed_physical) == (3, 2)
    assert (found.governors, found.driver) == (("powersave",), "intel_pstate")
    assert (found.turbo, found.virtual, found.numa_balancing) == (True, True, True)
    assert found.nodes == (
        NumaNode(number=0, num_cores=2, num_allowed=2),
        NumaNode(number=1, num_cores=2, num_allowed=1),
    )
    assert read_memory(tmp_path).pressure_pct == 6.5
    assert read_memory(tmp_path).huge_pages == "madvise"


def test_a_machine_without_any_file_is_unknown(tmp_path: Path) -> None:
    found = read_cpu(tmp_path, None)
    hidden = (found.allowed, found.allowed_physical, found.quota, found.governors, found.turbo, found.nodes)
    assert set(hidden) == {None}
    memory = read_memory(tmp_path)
    assert (memory.pressure_pct, memory.shm_free_bytes, memory.limit_bytes) == (None, None, None)
    assert memory.huge_pages is None
    assert memory.total_bytes == psutil.virtual_memory().total


def test_default_route_and_rdma_ports(tmp_path: Path) -> None:
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
    tree = {
        "proc/net/route": f"{head}\ntun0\t0000000A\t0\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
        "ens5\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
    }
    found = read_network(write(tmp_path, tree))
    assert found.default_route == "ens5"
    assert [(p.name, p.active, p.rate) for p in found.ports or ()] == [
        ("mlx5_0", True, "400 Gb/sec (4X NDR)"),
        ("mlx5_1", False, None),
    ]
    assert {i.name for i in found.interfaces or ()} == set(psutil.net_if_stats())


def test_the_results_folder_need_not_exist(tmp_path: Path) -> None:
    found = read_disk(tmp_path / "not" / "there")
    assert found.writable
    room = os.statvfs(tmp_path)
    assert found.free_bytes == pytest.approx(room.f_bavail * room.f_frsize, rel=0.2)
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    assert read_disk(tmp_path / "file").writable is False


def test_a_reading_this_system_lacks_is_none() -> None:
    def denied() -> int:
        raise psutil.AccessDenied

    assert attempt(denied) is None
    assert attempt(lambda: {}["absent"]) is None
    assert attempt(lambda: 3) == 3


class CoreTimes(NamedTuple):
    user: float
    idle: float
    iowait: float
    steal: float
    guest: float


BEFORE = [CoreTimes(user=15, idle=80, iowait=0, steal=5, guest=5), CoreTimes(0, 100, 0, 0, 0)]
# In between 1 s of user time, which was a guest's, 1 s idle, 1 s waiting for the disk, 1 s stolen.
AFTER = [CoreTimes(user=16, idle=81, iowait=1, steal=6, guest=6), CoreTimes(9, 100, 0, 0, 0)]


@pytest.mark.parametrize(
    ("after", "shares"),
    [
        (AFTER, (0.25, 0.25, 6 / 104)),
        (AFTER[:1], (None, None, None)),
        (BEFORE, (None, None, None)),
    ],
    ids=["a_second_of_each", "a_core_went_offline", "no_time_went_by"],
)
def test_shares_of_the_allowed_cores_only(
    after: list[CoreTimes], shares: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([BEFORE, after])
    monkeypatch.setattr(system.psutil, "cpu_times", lambda percpu: next(looks) if percpu else None)
    cpu, _ = system.read_host(tmp_path, allowed=frozenset({0}), sample_s=0)
    assert (cpu.busy_share, cpu.steal_share, cpu.steal_share_since_boot) == shares


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def slow(*_: Any, **__: Any) -> list[Any]:
        answer.wait(30)
        return []

    monkeypatch.setattr(system, "LOOK_UP_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert system._host_addresses() is None
    answer.set()


def test_a_name_that_resolves_to_nothing_is_not_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert system._host_addresses() == ()


def test_operators_made_for_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(f"{Path(path).name}: undefined symbol: _ZN3c10\nmore")

    other = SimpleNamespace(ops=SimpleNamespace(load_library=refuse))
    assert "undefined symbol: _ZN3c10" in str(software._operators_error(other))
    assert "more" not in str(software._operators_error(other))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert software._operators_error(other) == "not installed"
