"""Network namespaces joined by links of a chosen rate: everything that the lab asks of the kernel.

A link of rate R is a `tc tbf` on both of its ends: on the host's own interface (what leaves the host) and on
the switch's port to it (what reaches the host). docs/lab.md says what to know about such links.

Nothing here has a name outside the lab: a namespace is held by an open file descriptor of the lab's process
and by the processes inside it, without a file under /run/netns or an interface in the machine's own
namespace. So somebody else's namespace cannot be touched, two labs cannot collide, and when the lab's
processes are gone, by whatever cause, the kernel takes namespaces, bridge and links back. The processes
follow the lab: each host is a PID namespace whose first process dies with the lab (PR_SET_PDEATHSIG), and
with it every other one in it, also those that moved to a session of their own.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.errors import UsageError

MIN_RATE_BIT_PER_S, MAX_RATE_BIT_PER_S = 1_000_000, 100_000_000_000

BURST_S = 0.002
"""Content of a bucket as seconds on the link: it has to outlast a kernel that comes back late on busy cores.
Measured: 2 ms are enough, 0.5 ms cost up to a third of 1 Gbit/s."""

MIN_BURST_BYTES = 70_000
"""More than the 64 KiB that TCP hands down at once: the kernel would cut them into packets in software, which
at 200 Mbit/s took 41% of two cores."""

QUEUE_BYTES, QUEUE_S, MAX_QUEUE_S = 8_000_000, 0.05, 0.5
"""Bytes that wait for a link before a packet is dropped, but at least 50 ms and at most 0.5 s of its
rate. A connection has at most 4 MB in flight (tcp_wmem); no drop was seen. One at the end of a
message would cost TCP's least timeout, 200 ms."""

INTERFACE = "eth0"
NETWORK = "10.77.0"

_BITS_PER_S = {"mbit": 10**6, "gbit": 10**9}
_CLONE_NEWNET = 0x40000000
_TOOLS = {"iproute2": ("ip", "tc"), "util-linux": ("nsenter", "setpriv", "unshare")}
_UNSHARE_USER = ("unshare", "--user", "--map-root-user")
_UNSHARE_HOST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class ShapedLink:
    """One host's link to the switch: `rate_bit_per_s` each way."""

    rate_bit_per_s: int

    @property
    def label(self) -> str:
        """The rate in results, such as `1gbit`, however the user spelled it."""
        unit = "gbit" if self.rate_bit_per_s >= _BITS_PER_S["gbit"] else "mbit"
        return f"{self.rate_bit_per_s / _BITS_PER_S[unit]:.10g}{unit}"

    @property
    def burst_bytes(self) -> int:
        """Bytes that pass an idle link at once: 2 ms of its rate, never less than one TCP segment train."""
        return max(MIN_BURST_BYTES, int(self.rate_bit_per_s * BURST_S / 8))

    @property
    def queue_bytes(self) -> int:
        """Bytes that wait for the link before a packet is dropped."""
        brief = min(QUEUE_BYTES, int(self.rate_bit_per_s * MAX_QUEUE_S / 8))
        return self.burst_bytes + max(brief, int(self.rate_bit_per_s * QUEUE_S / 8))


def parse_rate(text: str) -> int:
    """Parse `200mbit`, `1gbit` or `2.5gbit` to bit/s (decimal units, as networks count)."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)(mbit|gbit)", text)
    if not match:
        raise UsageError(f"rate {text!r} is not understood; write it as 200mbit, 1gbit or 2.5gbit")
    rate = round(float(match[1]) * _BITS_PER_S[match[2]])
    if not MIN_RATE_BIT_PER_S <= rate <= MAX_RATE_BIT_PER_S:
        raise UsageError(f"rate {text!r} is out of range; choose one from 1mbit to 100gbit")
    return rate


def name_host(host: int) -> str:
    """`host0`, `host1`, ...: the host, and the switch's port to it."""
    return f"host{host}"


def get_address(host: int) -> str:
    """Return the host's IPv4 address: private, and reachable inside the lab only."""
    return f"{NETWORK}.{host + 1}"


def make_switch_commands(namespaces: Sequence[str]) -> list[str]:
    """`ip` batch lines for the switch's namespace: a bridge and a veth pair to each host's (a path)."""
    lines = ["link add switch type bridge", "link set switch up"]
    for host, namespace in enumerate(namespaces):
        port = name_host(host)
        lines.append(f"link add {port} type veth peer name {INTERFACE} netns {namespace}")
        lines.append(f"link set {port} addrgenmode none master switch up")
    return lines


def make_host_commands(host: int) -> list[str]:
    """`ip` batch lines, run in the host's namespace.

    IPv4 only, so that nobody waits for IPv6 discovery. TCP uses Reno, which every kernel has and which keeps
    a link without losses full; BBR, some machines' default, probes for its rate instead.
    """
    return [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none up",
        f"address add {get_address(host)}/24 dev {INTERFACE}",
        f"route replace {NETWORK}.0/24 dev {INTERFACE} src {get_address(host)} congctl reno",
    ]


def make_shaping_commands(interface: str, link: ShapedLink) -> list[str]:
    """`tc` batch lines for one end of a link."""
    bucket = f"burst {link.burst_bytes} limit {link.queue_bytes}"
    return [f"qdisc add dev {interface} root tbf rate {link.rate_bit_per_s}bit {bucket}"]


def require_support() -> None:
    """Check for Linux, the tools, and the right to make namespaces.

    Raises UsageError for the first thing that is missing, and says what would bring it.
    """
    if sys.platform != "linux":
        raise UsageError("a lab needs Linux network namespaces; run it on Linux, or torchrun on real hosts")
    path = get_environment()["PATH"]
    for package, tools in _TOOLS.items():
        for tool in tools:
            if shutil.which(tool, path=path) is None:
                raise UsageError(f"a lab needs the command {tool!r}, which is missing; install {package}")
    user = () if os.geteuid() == 0 else _UNSHARE_USER[1:]
    if _run(["unshare", *user, "--net", *_UNSHARE_HOST[1:], "true"]).returncode:
        raise UsageError(
            "a lab needs root or user namespaces and may make neither network nor PID namespaces here; "
            "run it as root, or the container as privileged"
        )


def become_root(command: Sequence[str]) -> None:
    """Replace this process by `command` as root of a user namespace of its own, unless it is root already."""
    if os.geteuid() != 0:
        os.execvp(_UNSHARE_USER[0], [*_UNSHARE_USER, *command])


def make_network(num_hosts: int, link: ShapedLink) -> list[list[str]]:
    """Make hosts in namespaces of their own, joined by a switch in another, to which this process moves.

    Returns by host what comes before the command of its first process, whose parent has to be the main thread
    of this process. Raises UsageError where the kernel lacks something.
    """
    paths = [f"/proc/{os.getpid()}/fd/{_make_namespace()}" for _ in range(num_hosts)]
    os.close(_make_namespace())
    _run_batch("ip", make_switch_commands(paths))
    inside = [["nsenter", f"--net={path}"] for path in paths]
    for host, enter in enumerate(inside):
        _run_batch("ip", make_host_commands(host), enter)
        _run_batch("tc", make_shaping_commands(INTERFACE, link), enter)
        _run_batch("tc", make_shaping_commands(name_host(host), link))
    return [[*enter, "setpriv", "--pdeathsig", "KILL", *_UNSHARE_HOST] for enter in inside]


def _make_namespace() -> int:
    """Move this thread to a new network namespace and return a file descriptor that keeps it alive."""
    # os.unshare is there from Python 3.12 on
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise UsageError(
            f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}; run it as root"
        )
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _run_batch(tool: str, lines: Sequence[str], inside: Sequence[str] = ()) -> None:
    done = _run([*inside, tool, "-batch", "-"], "\n".join(lines) + "\n")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise UsageError(
            f"the kernel refused the lab's network: {tool} says {reason!r}; it needs veth, bridge and sch_tbf"
        )


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=text, env=get_environment(), capture_output=True, text=True, check=False
    )


def get_environment() -> dict[str, str]:
    """Return the environment, with the folders of administrators' tools on PATH, which users often lack."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin", "LC_ALL": "C"}
