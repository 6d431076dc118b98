"""Findings about libraries: threads, interfaces of gloo and NCCL, versions, settings for debugging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement

from ddp_bench.bench.doctor.readings import HostNetwork, HostReadings, Interface, Software
from ddp_bench.bench.doctor.rules import Finding, figures, unknown

NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""NCCL's search without NCCL_SOCKET_IFNAME: the first of these patterns that matches anything (NCCL,
src/misc/socket.cc)."""

VIRTUAL_PREFIXES = ("docker", "virbr", "veth", "br-")

REINSTALL = "install torch and torchvision together, from one index: pip install -U torch torchvision"

SLOW_SETTINGS: tuple[tuple[str, tuple[str, ...], str], ...] = (
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


def library_findings(machine: HostReadings) -> list[Finding]:
    """Judge OpenMP, gloo, torch, torchvision and debugging settings; with GPUs also NCCL and the driver."""
    found = machine.software
    return [
        threads(machine),
        gloo(machine.network, machine.env),
        *([nccl(machine.network, machine.env)] if machine.num_gpus else []),
        torch_build(machine),
        torchvision(found),
        *([driver(found)] if machine.gpus or found.driver else []),
        settings(machine.env),
    ]


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


def nccl(network: HostNetwork, env: Mapping[str, str]) -> Finding:
    """Judge NCCL's interface for connecting ranks, and the InfiniBand or RoCE ports for the data."""
    name = "NCCL network"
    if network.interfaces is None:
        return unknown(name)
    setting = env.get("NCCL_SOCKET_IFNAME")
    chosen = nccl_interfaces(network.interfaces, setting)
    if not chosen:
        given = (
            f"NCCL_SOCKET_IFNAME={setting}: no interface that is up matches" if setting else "no interface"
        )
        return Finding(
            name, "bad", f"{given}; there are {_names(network.interfaces)}", _choose("NCCL", network)
        )
    text = ", ".join(describe(interface) for interface in chosen)
    ports = network.ports or ()
    active = [port for port in ports if port.active]
    if active:
        text += f"; RDMA ports {', '.join(f'{port.name} {port.rate}' for port in active)}"
    if ports and not active:
        down = f"{text}; none of {len(ports)} RDMA ports is known to be active"
        return Finding(name, "caution", down, "ibstat shows why; on one machine it does not matter")
    return _reachable(name, text, chosen, "NCCL", network)


def gloo(network: HostNetwork, env: Mapping[str, str]) -> Finding:
    """Judge gloo's interface: GLOO_SOCKET_IFNAME, else where this host's name resolves to, else loopback.

    Source: PyTorch, ProcessGroupGloo.cpp, createDefaultDevice; exact names separated by commas.
    """
    name = "gloo network"
    if network.interfaces is None:
        return unknown(name)
    setting = env.get("GLOO_SOCKET_IFNAME")
    known = {interface.name: interface for interface in network.interfaces}
    if setting:
        words = setting.split(",")
        missing = [word for word in words if word not in known or not known[word].is_up]
        if missing:
            wrong = f"GLOO_SOCKET_IFNAME={setting}: {', '.join(missing)} is not there or not up"
            there = f"{wrong}; there are {_names(network.interfaces)}"
            return Finding(name, "bad", there, _choose("GLOO", network))
        chosen = [known[word] for word in words]
        return _reachable(name, ", ".join(describe(i) for i in chosen), chosen, "GLOO", network)
    if network.host_addresses is None:
        return unknown(name, "what this host's name resolves to is not known: the look-up took too long")
    chosen = [i for i in network.interfaces if set(i.addresses) & set(network.host_addresses)][:1]
    if chosen and not chosen[0].is_loopback:
        return _reachable(name, describe(chosen[0]), chosen, "GLOO", network)
    resolved = ", ".join(network.host_addresses) or "nothing"
    return Finding(
        name,
        "caution",
        f"loopback (this host's name resolves to {resolved}): one machine can run, several cannot meet",
        _choose("GLOO", network),
    )


def describe(interface: Interface) -> str:
    """`eth0 (192.0.2.2, 10000 Mbit/s)`."""
    speed = f", {interface.speed_mbit_per_s} Mbit/s" if interface.speed_mbit_per_s else ""
    return f"{interface.name} ({interface.addresses[0] if interface.addresses else 'no address'}{speed})"


def _reachable(
    name: str, text: str, chosen: Sequence[Interface], library: str, network: HostNetwork
) -> Finding:
    if all(interface.is_loopback for interface in chosen):
        alone = f"{text}, loopback only: one machine can run, several cannot meet"
        return Finding(name, "caution", alone, _choose(library, network))
    if all(interface.name.startswith(VIRTUAL_PREFIXES) for interface in chosen):
        bridge = f"{text}, a bridge inside this machine: several machines cannot meet"
        return Finding(name, "caution", bridge, _choose(library, network))
    return Finding(name, "ok", text)


def _choose(library: str, network: HostNetwork) -> str:
    outward = [i.name for i in network.interfaces or () if i.is_up and i.addresses and not i.is_loopback]
    route = network.default_route
    best = route if route in outward else outward[0] if outward else None
    if best is None:
        return "for several machines this one needs an interface besides loopback"
    return f"for several machines: export {library}_SOCKET_IFNAME={best}"


def _names(interfaces: Sequence[Interface]) -> str:
    return ", ".join(f"{i.name}{'' if i.is_up else ' (down)'}" for i in interfaces) or "none"


def torch_build(machine: HostReadings) -> Finding:
    """Judge whether torch loads and sees the GPUs that the driver shows."""
    found = machine.software
    if found.torch_error is not None:
        return Finding("torch", "bad", f"does not load: {found.torch_error}", REINSTALL)
    if found.torch is None:
        return unknown("torch")
    parts = [f"{found.torch}", f"Python {found.python}" if found.python else ""]
    parts += [f"CUDA {found.torch_cuda}" if found.torch_cuda else ""]
    parts += ["built without CUDA"] if found.torch_cuda == "" else []
    parts += [f"NCCL {found.nccl}" if found.nccl else ""]
    text = ", ".join(part for part in parts if part)
    if machine.gpus and found.torch_cuda == "":
        count = len(machine.gpus)
        return Finding("torch", "bad", f"{text}: it cannot use the {count} GPU(s) here", REINSTALL)
    if machine.gpus and found.num_cuda_devices == 0:
        return Finding(
            "torch",
            "bad",
            f"{text}: it sees none of the {len(machine.gpus)} GPU(s) that the driver shows",
            "python -c 'import torch; torch.cuda.init()' says why; see also the line CUDA driver",
        )
    return Finding("torch", "ok", text)


def torchvision(found: Software) -> Finding:
    """Judge whether torchvision was built for this torch: its own requirement, and whether it loads."""
    name = "torchvision"
    if found.torchvision is None:
        absent = Finding(name, "bad", f"does not load: {found.torchvision_error}", REINSTALL)
        return absent if found.torchvision_error else unknown(name)
    text = f"{found.torchvision}"
    if found.torchvision_needs and found.torch and not _fits(found.torch, found.torchvision_needs):
        return Finding(
            name, "bad", f"{text} needs {found.torchvision_needs}, here is {found.torch}", REINSTALL
        )
    if found.torchvision_error is not None:
        return Finding(name, "bad", f"{text} does not load: {found.torchvision_error}", REINSTALL)
    return Finding(name, "ok", f"{text}, made for this torch" if found.torchvision_needs else text)


def _fits(version: str, requirement: str) -> bool:
    try:
        return Requirement(requirement).specifier.contains(version, prereleases=True)
    except InvalidRequirement:
        return True


def driver(found: Software) -> Finding:
    """Judge whether the driver is new enough for the CUDA that torch was built with.

    Any of the same CUDA major version is ("CUDA Compatibility", minor version compatibility), and newer ones.
    """
    name = "CUDA driver"
    if found.driver is None and found.driver_cuda is None:
        return unknown(name)
    text = f"{found.driver or 'version unknown'}, up to CUDA {found.driver_cuda or '?'}"
    if not found.driver_cuda or not found.torch_cuda:
        return Finding(name, "ok" if found.driver_cuda else "unknown", text)
    if int(found.driver_cuda.split(".")[0]) < int(found.torch_cuda.split(".")[0]):
        return Finding(
            name,
            "bad",
            f"{text}; torch was built for {found.torch_cuda}",
            "update the driver, or install a torch built for this CUDA",
        )
    return Finding(name, "ok", text)


def settings(env: Mapping[str, str]) -> Finding:
    """Name environment variables for debugging that would be measured along with the step."""
    found = [
        (f"{key}={env[key]}", key, grave)
        for key, values, grave in SLOW_SETTINGS
        if env.get(key, "").strip().upper() in values
    ]
    if not found:
        return Finding("settings", "ok", "none that slow a step down")
    text = ", ".join(pair for pair, _, _ in found)
    bad = any(grave == "bad" for _, _, grave in found)
    keys = " ".join(key for _, key, _ in found)
    return Finding("settings", "bad" if bad else "caution", f"{text}: slower steps", f"unset {keys}")


def threads(machine: HostReadings) -> Finding:
    """Judge the OpenMP and MKL settings that every rank would inherit."""
    name, env = "threads", machine.env
    pinned = [key for key in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY") if env.get(key)]
    if pinned:
        what = ", ".join(f"{key}={env[key]}" for key in pinned)
        return Finding(
            name, "caution", f"{what}: every rank is pinned to the same cores", f"unset {' '.join(pinned)}"
        )
    most = 0
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = env.get(key)
        if not value:
            continue
        first = value.split(",")[0].strip()
        if not first.isdecimal() or int(first) < 1:
            return Finding(name, "caution", f"{key}={value} is no number of threads", f"export {key}=1")
        most = max(most, int(first))
    if not most:
        return Finding(name, "ok", "OMP_NUM_THREADS unset: bench.run and torchrun give each rank 1")
    if not machine.num_gpus:
        return Finding(name, "ok", f"{most} set; a CPU core standing in for a GPU runs 1 all the same")
    text = f"{most} per rank x {machine.num_gpus} GPU(s)"
    if machine.usable_cores is not None and most * machine.num_gpus > machine.usable_cores:
        fits = max(int(machine.usable_cores) // machine.num_gpus, 1)
        over = f"{text} on {figures(machine.usable_cores)} cores: ranks push each other off their cores"
        return Finding(name, "caution", over, f"export OMP_NUM_THREADS={fits} MKL_NUM_THREADS={fits}")
    return Finding(name, "ok", text)
