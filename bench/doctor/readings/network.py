"""Reads network interfaces, the default route, RDMA ports and what this host's name resolves to."""

from __future__ import annotations

import ipaddress
import socket
import threading
from pathlib import Path

import psutil

from bench.doctor.machine import HostNetwork, Interface, Port
from bench.doctor.readings import sysfs
from bench.doctor.readings.system import attempt

LOOK_UP_S = 1.0
"""How long to wait for the name service; gloo itself would wait for as long as it takes."""

ROUTE_UP, ANYWHERE = 0x1, "00000000"


def read_network(root: Path = Path("/")) -> HostNetwork:
    """Everything that decides which interface gloo and NCCL would use."""
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
    """The interface of the IPv4 default route: /proc/net/route, columns Iface Destination … Flags … Mask."""
    for line in (sysfs.text(root / "proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == words[7] == ANYWHERE and int(words[3], 16) & ROUTE_UP:
            return words[0]
    return None


def _host_addresses() -> tuple[str, ...] | None:
    """What gloo's own look-up of this host's name gives; empty where it gives nothing, None if too slow."""
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
