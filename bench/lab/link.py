"""A lab on paper: links, addresses, the commands that make them, and each host's part of the job.

A link of rate R is a `tc tbf` on both of its ends: on the host's own interface (what leaves the host) and on
the switch's port to it (what reaches the host). docs/lab.md says what to know about such links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import UsageError

T = TypeVar("T")

MIN_RATE_BIT_PER_S, MAX_RATE_BIT_PER_S = 1_000_000, 100_000_000_000
MAX_DELAY_S = 10.0

BURST_S = 0.002
"""What a bucket holds, as time on the link: it has to outlast a kernel that comes back late on busy cores.
Measured: 2 ms are enough, 0.5 ms cost up to a third of 1 Gbit/s."""

MIN_BURST_BYTES = 70_000
"""More than the 64 KiB that TCP hands down at once: the kernel would cut them into packets in software, which
at 200 Mbit/s took 41% of two cores."""

QUEUE_BYTES, QUEUE_S, MAX_QUEUE_S = 8_000_000, 0.05, 0.5
"""What waits for a link before a packet is dropped: these bytes, but at least 50 ms and at most 0.5 s of its
rate. A connection has at most 4 MB in flight (tcp_wmem); no drop was seen. One at the end of a
message would cost TCP's least timeout, 200 ms."""

INTERFACE = "eth0"
NETWORK = "10.77.0"

RENDEZVOUS_PORT = 29500
"""torchrun's default for --master-port; in a lab's own network no other program can hold it."""

TORCHRUN_PORT = 29400
"""Where a torchrun that the job starts itself meets the others: the lab's own agents may hold the other."""

_BITS_PER_S = {"mbit": 10**6, "gbit": 10**9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"([0-9]{1,6}(?:\.[0-9]{1,9})?)"


@dataclass(frozen=True)
class ShapedLink:
    """One host's link to the switch: `rate_bit_per_s` each way, `delay_s` added to what leaves the host."""

    rate_bit_per_s: int
    delay_s: float = 0.0

    @property
    def label(self) -> str:
        """The link in results, `1gbit` or with a delay `1gbit+1ms`, however the user spelled it."""
        delay = f"+{_in_largest_unit(self.delay_s, _SECONDS)}" if self.delay_s else ""
        return f"{self.rate_label}{delay}"

    @property
    def rate_label(self) -> str:
        return _in_largest_unit(self.rate_bit_per_s, _BITS_PER_S)

    @property
    def burst_bytes(self) -> int:
        """Bytes that pass an idle link at once: 2 ms of its rate, never less than one TCP segment train."""
        return max(MIN_BURST_BYTES, int(self.rate_bit_per_s * BURST_S / 8))

    @property
    def queue_bytes(self) -> int:
        """Bytes that wait for the link before a packet is dropped."""
        brief = min(QUEUE_BYTES, int(self.rate_bit_per_s * MAX_QUEUE_S / 8))
        return self.burst_bytes + max(brief, int(self.rate_bit_per_s * QUEUE_S / 8))


@dataclass(frozen=True)
class HostJob:
    """One host's part of a job: which host it is, and the command that each of its ranks runs."""

    host: int
    num_hosts: int
    ranks_per_host: int
    run_id: str
    command: list[str]


def parse_rate(text: str) -> int:
    """Parse `200mbit`, `1gbit` or `2.5gbit` to bit/s (decimal units, as networks count)."""
    match = re.fullmatch(_NUMBER + "(mbit|gbit)", text)
    if not match:
        raise UsageError(f"rate {text!r} is not understood; write it as 200mbit, 1gbit or 2.5gbit")
    rate = round(float(match[1]) * _BITS_PER_S[match[2]])
    if not MIN_RATE_BIT_PER_S <= rate <= MAX_RATE_BIT_PER_S:
        raise UsageError(f"rate {text!r} is out of range; choose one from 1mbit to 100gbit")
    return rate


def parse_delay(text: str) -> float:
    """Parse `500us`, `1ms` or `0.1s` to seconds."""
    match = re.fullmatch(_NUMBER + "(us|ms|s)", text)
    delay_s = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 1e-6 <= delay_s <= MAX_DELAY_S:
        raise UsageError(f"delay {text!r} is not between 1us and 10s; write it as 500us, 1ms or 0.1s")
    return delay_s


def shares(items: Sequence[T], num_hosts: int) -> list[list[T]]:
    """Split cores or GPUs into equal contiguous shares, one per host; fewer items than hosts are shared."""
    size = max(1, len(items) // num_hosts)
    starts = [host * size % len(items) for host in range(num_hosts)] if items else [0] * num_hosts
    return [list(items[start : start + size]) for start in starts]


def host_name(host: int) -> str:
    """`host0`, `host1`, ...: the host, and the switch's port to it."""
    return f"host{host}"


def address(host: int) -> str:
    """The host's IPv4 address: private, and reachable inside the lab only."""
    return f"{NETWORK}.{host + 1}"


def switch_commands(namespaces: Sequence[str]) -> list[str]:
    """`ip` batch lines for the switch's namespace: a bridge and a veth pair to each host's (a path)."""
    lines = ["link add switch type bridge", "link set switch up"]
    for host, namespace in enumerate(namespaces):
        port = host_name(host)
        lines.append(f"link add {port} type veth peer name {INTERFACE} netns {namespace}")
        lines.append(f"link set {port} addrgenmode none master switch up")
    return lines


def host_commands(host: int) -> list[str]:
    """`ip` batch lines, run in the host's namespace.

    IPv4 only, so that nobody waits for IPv6 discovery. TCP uses Reno, which every kernel has and which keeps
    a link without losses full; BBR, some machines' default, probes for its rate instead.
    """
    return [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none up",
        f"address add {address(host)}/24 dev {INTERFACE}",
        f"route replace {NETWORK}.0/24 dev {INTERFACE} src {address(host)} congctl reno",
    ]


def shaping_commands(interface: str, link: ShapedLink, *, leaves_host: bool) -> list[str]:
    """`tc` batch lines for one end of a link; the delay sits on the host's end alone."""
    bucket = f"burst {link.burst_bytes} limit {link.queue_bytes}"
    lines = [f"qdisc add dev {interface} root handle 1: tbf rate {link.rate_bit_per_s}bit {bucket}"]
    if leaves_host and link.delay_s:
        in_flight = int((link.rate_bit_per_s / 8 * link.delay_s + link.queue_bytes) / 1500)
        queue = f"delay {link.delay_s * 1e6:.0f}us limit {max(1000, 2 * in_flight)}"
        lines.append(f"qdisc add dev {interface} parent 1:1 handle 10: netem {queue}")
    return lines


def host_environment(host: int, link: ShapedLink, gpus: Sequence[str]) -> dict[str, str]:
    """What a host's ranks find in their environment beside the user's own."""
    environment = {
        "BENCH_HOST": host_name(host),
        "BENCH_LINK": link.label,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        # NCCL must take the hosts for different machines and the link for the only way between them
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": host_name(host),
        "NCCL_IB_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def torchrun_environment(job: HostJob) -> dict[str, str]:
    """What tells a torchrun on this host, by the variables it reads in place of options, where it is."""
    return {
        "NODE_RANK": str(job.host),
        "PET_NNODES": str(job.num_hosts),
        "PET_NODE_RANK": str(job.host),
        "PET_NPROC_PER_NODE": str(job.ranks_per_host),
        "PET_MASTER_ADDR": address(0),
        "PET_MASTER_PORT": str(TORCHRUN_PORT),
        "PET_LOCAL_ADDR": address(job.host),
    }


def job_exit_code(codes: Sequence[int]) -> int:
    """Choose the exit code of a job from its processes' codes, in the order in which they ended.

    Peers of a failed process die of its absence, with 1 (an exception) or by a signal (negative, or above
    128), sometimes before it has ended itself. So a code that a program chose, such as 2, goes first; 0 only
    where all are 0.
    """
    failed = [128 - code if code < 0 else code for code in codes if code]
    chosen = [code for code in failed if 1 < code < 128]
    return (chosen or failed or [0])[0]


def _in_largest_unit(value: float, units: Mapping[str, float]) -> str:
    """Write it in the largest unit that it reaches; `units` go from small to large."""
    name, size = [unit for unit in units.items() if value >= unit[1] * 0.999999][-1]
    return f"{value / size:.10g}{name}"
