"""Reads cores, memory, disk and network interfaces: psutil, /proc and /sys. Changes nothing."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ddp_bench.bench import sysfs
from ddp_bench.bench.doctor.readings import Cpu, Disk, HostNetwork, Interface, Memory, NumaNode, Port

T = TypeVar("T")

SAMPLE_S = 0.5
"""How long load, steal and swapping are watched."""

LOOK_UP_S = 1.0
"""How long to wait for the name service; gloo itself would wait for as long as it takes."""

ROUTE_UP, ANYWHERE = 0x1, "00000000"


def attempt(read: Callable[[], T]) -> T | None:
    """Return what `read` returns; None where this system has no such reading."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # psutil warns of what /proc lacks; here that is an answer
            return read()
    except (OSError, ValueError, LookupError, AttributeError, RuntimeError, psutil.Error):
        return None


def allowed_cores() -> frozenset[int] | None:
    """Cores that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    count = os.cpu_count()
    return None if count is None else frozenset(range(count))


def read_host(
    root: Path = Path("/"), *, allowed: frozenset[int] | None = None, sample_s: float = SAMPLE_S
) -> tuple[Cpu, Memory]:
    """Read cores and memory; waits `sample_s` in between. `root` is where /proc, /sys and /dev are found."""
    cores = allowed_cores() if allowed is None else allowed
    before = attempt(lambda: psutil.cpu_times(percpu=True))
    swap_before = attempt(psutil.swap_memory)
    started = time.perf_counter()
    time.sleep(sample_s)
    after = attempt(lambda: psutil.cpu_times(percpu=True))
    busy, steal, steal_ever = _shares(before, after, cores)
    cpu = replace(
        read_cpu(root, cores),
        sample_s=round(time.perf_counter() - started, 2),
        busy_share=busy,
        steal_share=steal,
        steal_share_since_boot=steal_ever,
    )
    memory = read_memory(root)
    swap_after = attempt(psutil.swap_memory)
    if swap_before is not None and swap_after is not None:
        memory = replace(
            memory,
            swap_used_bytes=int(swap_after.used),
            swapped_in_bytes=max(int(swap_after.sin - swap_before.sin), 0),
        )
    return cpu, memory


def _shares(
    before: Sequence[Any] | None, after: Sequence[Any] | None, allowed: frozenset[int] | None
) -> tuple[float | None, float | None, float | None]:
    """Compute shares of the allowed cores' time: busy and stolen in between, stolen since start-up."""
    if not before or not after or len(before) != len(after):
        return None, None, None
    cores = [core for core in allowed or () if core < len(after)] or range(len(after))
    ever, earlier = _times([after[core] for core in cores]), _times([before[core] for core in cores])
    busy, steal, total = (now - then for now, then in zip(ever, earlier, strict=True))
    if total <= 0:
        return None, None, None
    share = min(max(busy / total, 0.0), 1.0)
    return (share, steal / total, ever[1] / ever[2]) if hasattr(after[0], "steal") else (share, None, None)


def _times(cores: Sequence[Any]) -> tuple[float, float, float]:
    """Sum up busy, stolen and all seconds of these cores; user time includes guests' (proc(5))."""
    guests = sum(getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0) for core in cores)
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    steal = sum(getattr(core, "steal", 0.0) for core in cores)
    total = sum(sum(core) for core in cores) - guests
    return total - idle - steal, steal, total


def read_cpu(root: Path, allowed: frozenset[int] | None) -> Cpu:
    """Read what /proc and /sys under `root` say of the cores."""
    cpus = root / sysfs.CPUS
    policies = sorted(cpus.glob("cpu[0-9]*/cpufreq"))
    no_turbo, boost = sysfs.number(cpus / "intel_pstate/no_turbo"), sysfs.number(cpus / "cpufreq/boost")
    flags = re.search(r"^flags\s*:(.*)$", sysfs.text(root / "proc/cpuinfo") or "", re.MULTILINE)
    siblings = [
        sysfs.text(cpus / f"cpu{core}/topology/thread_siblings_list") for core in sorted(allowed or ())
    ]
    balancing = sysfs.number(root / "proc/sys/kernel/numa_balancing")
    return Cpu(
        present=os.cpu_count(),
        allowed=len(allowed) if allowed else None,
        allowed_physical=len(set(siblings)) if siblings and None not in siblings else None,
        quota=sysfs.cpu_quota(root),
        virtual=" hypervisor " in f"{flags[1]} " if flags else None,
        governors=sysfs.governors(root),
        driver=sysfs.text(policies[0] / "scaling_driver") if policies else None,
        turbo=no_turbo == 0 if no_turbo is not None else boost == 1 if boost is not None else None,
        load_1min=attempt(lambda: os.getloadavg()[0]),
        nodes=_nodes(root, allowed),
        numa_balancing=None if balancing is None else balancing > 0,
    )


def _nodes(root: Path, allowed: frozenset[int] | None) -> tuple[NumaNode, ...] | None:
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cores = sysfs.cores_in(sysfs.text(folder / "cpulist") or "")
        if cores:
            on_node = None if allowed is None else len(cores & allowed)
            number = int(folder.name.removeprefix("node"))
            found.append(NumaNode(number=number, num_cores=len(cores), num_allowed=on_node))
    return tuple(sorted(found, key=lambda node: node.number)) or None


def read_memory(root: Path) -> Memory:
    """Read memory, the container's limit on it, stalls and shared memory."""
    now = attempt(psutil.virtual_memory)
    shm = attempt(lambda: shutil.disk_usage(root / "dev/shm"))
    stalls = re.search(r"^some avg10=([0-9.]+)", sysfs.text(root / "proc/pressure/memory") or "")
    return Memory(
        total_bytes=None if now is None else int(now.total),
        available_bytes=None if now is None else int(now.available),
        limit_bytes=sysfs.memory_limit_bytes(root),
        pressure_pct=float(stalls[1]) if stalls else None,
        shm_total_bytes=None if shm is None else shm.total,
        shm_free_bytes=None if shm is None else shm.free,
        huge_pages=sysfs.huge_pages(root),
    )


def read_disk(folder: Path) -> Disk:
    """Read the room where `folder` is or would be made."""
    there = next((up for up in (folder, *folder.absolute().parents) if up.exists()), None)
    if there is None:
        return Disk(path=str(folder))
    usage = attempt(lambda: shutil.disk_usage(there))
    return Disk(
        path=str(folder),
        free_bytes=None if usage is None else usage.free,
        writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
    )


def read_network(root: Path = Path("/")) -> HostNetwork:
    """Read everything that decides which interface gloo and NCCL would use."""
    return HostNetwork(
        interfaces=attempt(_interfaces),
        default_route=_default_route(root),
        host_addresses=_host_addresses(),
        ports=_ports(root),
    )


def _interfaces() -> tuple[Interface, ...]:
    addresses = psutil.net_if_addrs()
    found = []
    for name, state in psutil.net_if_stats().items():
        plain = [
            entry.address.split("%")[0]
            for entry in addresses.get(name, ())
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        usable = tuple(address for address in plain if not ipaddress.ip_address(address).is_link_local)
        found.append(
            Interface(
                name=name,
                is_up=bool(state.isup),
                is_loopback=any(ipaddress.ip_address(address).is_loopback for address in usable),
                addresses=usable,
                speed_mbit_per_s=int(state.speed) or None,
            )
        )
    return tuple(found)


def _default_route(root: Path) -> str | None:
    """Find the interface of the IPv4 default route: /proc/net/route, Iface Destination … Flags … Mask."""
    for line in (sysfs.text(root / "proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == words[7] == ANYWHERE and int(words[3], 16) & ROUTE_UP:
            return words[0]
    return None


def _host_addresses() -> tuple[str, ...] | None:
    """Look up this host's name as gloo does; empty where it resolves to nothing, None if too slow."""
    found: list[tuple[str, ...]] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found.append(())
        else:
            found.append(tuple(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in entries)))

    # A daemon: a name server that does not answer must not keep the doctor waiting.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(LOOK_UP_S)
    return found[0] if found else None


def _ports(root: Path) -> tuple[Port, ...]:
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state = sysfs.text(folder / "state")
        found.append(
            Port(
                name=folder.parent.parent.name,
                active=None if state is None else "ACTIVE" in state,
                rate=sysfs.text(folder / "rate"),
            )
        )
    return tuple(found)
