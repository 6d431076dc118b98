"""Checks of libraries: threads, interfaces of gloo and NCCL, versions, settings for debugging.

They create no CUDA context.
"""

from __future__ import annotations

import functools
import importlib.util
import ipaddress
import platform
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import InvalidRequirement, Requirement

from .. import sysfs
from ..cli import speaker
from ..gpus import ask_nvml
from .host import (
    UNKNOWN,
    Answer,
    Check,
    Host,
    Status,
    attempt,
    figures,
    first_line,
    worst,
)

NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""NCCL's search without NCCL_SOCKET_IFNAME: the first of these patterns that matches anything (NCCL,
src/misc/socket.cc)."""

VIRTUAL_PREFIXES = ("docker", "virbr", "veth", "br-")

REINSTALL = "install torch and torchvision together, from one index: pip install -U torch torchvision"

SLOW_SETTINGS: tuple[tuple[str, tuple[str, ...], Status], ...] = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "bad"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), "bad"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "bad"),
    ("TORCH_DISTRIBUTED_DEBUG", ("INFO",), "caution"),
    ("NCCL_DEBUG", ("INFO", "TRACE"), "caution"),
    ("NCCL_P2P_DISABLE", ("1",), "caution"),
    ("NCCL_SHM_DISABLE", ("1",), "caution"),
    ("NCCL_IB_DISABLE", ("1",), "caution"),
)
"""Name, values, how grave. The bad ones make every launch wait, every allocation a cudaMalloc, every
collective checked by another (PyTorch notes "CUDA environment variables" and "Distributed: debugging"); the
others switch a transport off or write logs (NCCL user guide, "Environment variables")."""

LOOK_UP_S = 1.0
"""How long to wait for the name service; gloo itself would wait for as long as it takes."""

ROUTE_UP, ANYWHERE = 0x1, "00000000"
RDMA = "sys/class/infiniband"


@dataclass(frozen=True)
class Interface:
    """A network interface; link-local addresses left out."""

    name: str
    is_up: bool
    is_loopback: bool
    addresses: tuple[str, ...] = ()
    speed_mbit_per_s: int | None = None

    def __str__(self) -> str:
        """`eth0 (192.0.2.2, 10000 Mbit/s)`."""
        speed = f", {self.speed_mbit_per_s} Mbit/s" if self.speed_mbit_per_s else ""
        return f"{self.name} ({self.addresses[0] if self.addresses else 'no address'}{speed})"


class Network:
    """What decides which interface gloo and NCCL would use, and what both are told about it."""

    def __init__(self, host: Host) -> None:
        keep = host.network.keep
        self.interfaces = keep("interfaces", attempt(_interfaces))
        self.default_route = keep("default_route", _default_route(host.root))
        self.host_addresses = keep("host_addresses", _host_addresses())
        self.ports = keep("ports", tuple(map(_port, sorted((host.root / RDMA).glob("*/ports/*")))))

    def names(self) -> str:
        return ", ".join(f"{i.name}{'' if i.is_up else ' (down)'}" for i in self.interfaces or ()) or "none"

    def advice(self, library: str) -> str:
        """Say which interface `library` should be told to use."""
        outward = [i.name for i in self.interfaces or () if i.is_up and i.addresses and not i.is_loopback]
        best = self.default_route if self.default_route in outward else outward[0] if outward else None
        if best is None:
            return "for several machines this one needs an interface besides loopback"
        return f"for several machines: export {library}_SOCKET_IFNAME={best}"

    def reachable(self, library: str, text: str, chosen: Sequence[Interface]) -> Answer:
        """Judge whether other machines can be met through the interfaces `chosen`."""
        if all(interface.is_loopback for interface in chosen):
            text += ", loopback only: one machine can run, several cannot meet"
        elif all(interface.name.startswith(VIRTUAL_PREFIXES) for interface in chosen):
            text += ", a bridge inside this machine: several machines cannot meet"
        else:
            return Answer("ok", text)
        return Answer("caution", text, self.advice(library.upper()))


network_of = functools.lru_cache(maxsize=1)(Network)
"""The network of a host, looked up once."""


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
        is_loopback = any(ipaddress.ip_address(address).is_loopback for address in usable)
        found.append(Interface(name, bool(state.isup), is_loopback, usable, int(state.speed) or None))
    return tuple(found)


def _port(folder: Path) -> dict[str, Any]:
    """Read an InfiniBand or RoCE port."""
    state, rate = sysfs.text(folder / "state"), sysfs.text(folder / "rate")
    active = None if state is None else "ACTIVE" in state
    return {"name": folder.parent.parent.name, "active": active, "rate": rate}


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


def gloo(host: Host) -> Answer:
    """Check gloo's interface: GLOO_SOCKET_IFNAME, else where this host's name resolves to, else loopback.

    Source: PyTorch, ProcessGroupGloo.cpp, createDefaultDevice; exact names separated by commas.
    """
    network = network_of(host)
    if network.interfaces is None:
        return UNKNOWN
    if setting := host.env.get("GLOO_SOCKET_IFNAME"):
        up = {interface.name: interface for interface in network.interfaces if interface.is_up}
        words = setting.split(",")
        if missing := [word for word in words if word not in up]:
            wrong = f"GLOO_SOCKET_IFNAME={setting}: {', '.join(missing)} is not there or not up"
            return Answer("bad", f"{wrong}; there are {network.names()}", network.advice("GLOO"))
        chosen = [up[word] for word in words]
        return network.reachable("gloo", ", ".join(map(str, chosen)), chosen)
    if network.host_addresses is None:
        return Answer("unknown", "what this host's name resolves to is not known: the look-up took too long")
    chosen = [i for i in network.interfaces if set(i.addresses) & set(network.host_addresses)][:1]
    if chosen and not chosen[0].is_loopback:
        return network.reachable("gloo", str(chosen[0]), chosen)
    resolved = ", ".join(network.host_addresses) or "nothing"
    text = f"loopback (this host's name resolves to {resolved}): one machine can run, several cannot meet"
    return Answer("caution", text, network.advice("GLOO"))


def nccl(host: Host) -> Answer | None:
    """Check NCCL's interface for connecting ranks, and the InfiniBand or RoCE ports for the data."""
    network = network_of(host)
    if not host.num_gpus:
        return None
    if network.interfaces is None:
        return UNKNOWN
    setting = host.env.get("NCCL_SOCKET_IFNAME")
    chosen = nccl_interfaces(network.interfaces, setting)
    if not chosen:
        wrong = (
            f"NCCL_SOCKET_IFNAME={setting}: no interface that is up matches" if setting else "no interface"
        )
        return Answer("bad", f"{wrong}; there are {network.names()}", network.advice("NCCL"))
    text = ", ".join(map(str, chosen))
    active = [f"{port['name']} {port['rate']}" for port in network.ports if port["active"]]
    if active:
        text += f"; RDMA ports {', '.join(active)}"
    elif network.ports:
        down = f"{text}; none of {len(network.ports)} RDMA ports is known to be active"
        return Answer("caution", down, "ibstat shows why; on one machine it does not matter")
    return network.reachable("NCCL", text, chosen)


def nccl_interfaces(interfaces: Sequence[Interface], setting: str | None) -> list[Interface]:
    """Choose the interfaces that NCCL would use; `setting` is NCCL_SOCKET_IFNAME.

    Prefixes by commas, `=` before them for exact names, `^` for all but them (NCCL user guide).
    """
    usable = [interface for interface in interfaces if interface.is_up and interface.addresses]
    for pattern in [setting] if setting else NCCL_ORDER:
        chosen = [interface for interface in usable if _matches(interface.name, pattern)]
        if chosen:
            return chosen
    return []


def _matches(name: str, pattern: str) -> bool:
    excluded = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    words = [word for word in pattern.removeprefix("=").split(",") if word]
    hit = any(name == word if exact else name.startswith(word) for word in words)
    return hit != excluded


def torch_build(host: Host) -> Answer:
    """Check whether torch loads and sees the GPUs that the driver shows."""
    keep, torch, gpus = host.software.keep, host.torch, host.gpus or ()
    python = keep("python", platform.python_version())
    version = keep("torch", None if torch is None else str(torch.__version__))
    cuda = keep("torch_cuda", None if torch is None else torch.version.cuda or "")
    nccl = keep("nccl", attempt(lambda: ".".join(map(str, torch.cuda.nccl.version()))))
    keep("num_cuda_devices", host.num_cuda_devices)
    if keep("torch_error", host.torch_error) is not None:
        return Answer("bad", f"does not load: {host.torch_error}", REINSTALL)
    built = f"CUDA {cuda}" if cuda else "built without CUDA"
    text = f"{version}, Python {python}, {built}{f', NCCL {nccl}' if nccl else ''}"
    if gpus and not cuda:
        return Answer("bad", f"{text}: it cannot use the {len(gpus)} GPU(s) here", REINSTALL)
    if gpus and host.num_cuda_devices == 0:
        text += f": it sees none of the {len(gpus)} GPU(s) that the driver shows"
        advice = "python -c 'import torch; torch.cuda.init()' says why; see also the line CUDA driver"
        return Answer("bad", text, advice)
    return Answer("ok", text)


def torchvision(host: Host) -> Answer:
    """Check whether torchvision was built for this torch: its own requirement, and whether it loads."""
    name, keep, torch = "torchvision", host.software.keep, host.torch
    version = keep(name, attempt(lambda: metadata.version(name)))
    error = keep("torchvision_error", None if torch is None else _operators_error(torch))
    needs = keep("torchvision_needs", _needs(name, "torch"))
    if version is None:
        return Answer("bad", f"does not load: {error}", REINSTALL) if error else UNKNOWN
    fits = Requirement(needs).specifier.contains if needs else None
    if fits and torch is not None and not fits(str(torch.__version__), prereleases=True):
        return Answer("bad", f"{version} needs {needs}, here is {torch.__version__}", REINSTALL)
    if error is not None:
        return Answer("bad", f"{version} does not load: {error}", REINSTALL)
    return Answer("ok", f"{version}, made for this torch" if needs else version)


def _operators_error(torch: Any) -> str | None:
    """Find out why torchvision's compiled operators do not load with this torch; None when they do.

    Loads the library alone: importing torchvision imports PyTorch's compiler, which makes a cache folder.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return "not installed"
    libraries = [path for path in Path(found.origin).parent.glob("_C*") if path.suffix in (".so", ".pyd")]
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        return first_line(error)
    has_them = libraries and hasattr(torch.ops.torchvision, "nms")
    return None if has_them else "its compiled operators are missing"


def _needs(package: str, other: str) -> str | None:
    """Read what `package` requires of `other` from its installed metadata."""
    for line in attempt(lambda: metadata.requires(package)) or []:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.name == other and wanted.specifier and wanted.marker is None:
            return f"{other}{wanted.specifier}"
    return None


def driver(host: Host) -> Answer | None:
    """Check whether the driver is new enough for the CUDA that torch was built with; no line without either.

    Any of the same CUDA major version is ("CUDA Compatibility", minor version compatibility), and newer ones.
    """
    number = ask_nvml("nvmlSystemGetCudaDriverVersion_v2")
    version = host.software.keep("driver", ask_nvml("nvmlSystemGetDriverVersion"))
    # 13020 stands for 13.2: NVML, nvmlSystemGetCudaDriverVersion.
    most = f"{number // 1000}.{number % 1000 // 10}" if number else None
    host.software.keep("driver_cuda", most)
    cuda = host.torch.version.cuda if host.torch is not None else None
    if not host.gpus and not version:
        return None
    if version is None and most is None:
        return UNKNOWN
    text = f"{version or 'version unknown'}, up to CUDA {most or '?'}"
    if most is None:
        return Answer("unknown", text)
    if cuda and int(most.split(".")[0]) < int(cuda.split(".")[0]):
        text += f"; torch was built for {cuda}"
        return Answer("bad", text, "update the driver, or install a torch built for this CUDA")
    return Answer("ok", text)


def settings(host: Host) -> Answer:
    """Name environment variables for debugging that would be measured along with the step."""
    found = {
        key: status
        for key, values, status in SLOW_SETTINGS
        if host.env.get(key, "").strip().upper() in values
    }
    if not found:
        return Answer("ok", "none that slow a step down")
    text = ", ".join(f"{key}={host.env[key]}" for key in found)
    return Answer(worst(found.values()), f"{text}: slower steps", f"unset {' '.join(found)}")


def threads(host: Host) -> Answer:
    """Check the OpenMP and MKL settings that every rank would inherit."""
    env, gpus, cores = host.env, host.num_gpus, host.usable_cores
    pinned = [key for key in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY") if env.get(key)]
    if pinned:
        what = ", ".join(f"{key}={env[key]}" for key in pinned)
        text, advice = f"{what}: every rank is pinned to the same cores", f"unset {' '.join(pinned)}"
        return Answer("caution", text, advice)
    most = 0
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if not (value := env.get(key)):
            continue
        first = value.split(",")[0].strip()
        if not first.isdecimal() or int(first) < 1:
            return Answer("caution", f"{key}={value} is no number of threads", f"export {key}=1")
        most = max(most, int(first))
    if not most:
        return Answer("ok", f"OMP_NUM_THREADS unset: {speaker('run')} and torchrun give each rank 1")
    if not gpus:
        return Answer("ok", f"{most} set; a CPU core standing in for a GPU runs 1 all the same")
    text = f"{most} per rank x {gpus} GPU(s)"
    if cores is not None and most * gpus > cores:
        fits = max(int(cores) // gpus, 1)
        over = f"{text} on {figures(cores)} cores: ranks push each other off their cores"
        return Answer("caution", over, f"export OMP_NUM_THREADS={fits} MKL_NUM_THREADS={fits}")
    return Answer("ok", text)


LIBRARY_CHECKS: dict[str, Check] = {
    "threads": threads,
    "gloo network": gloo,
    "NCCL network": nccl,
    "torch": torch_build,
    "torchvision": torchvision,
    "CUDA driver": driver,
    "settings": settings,
}
