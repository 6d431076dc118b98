"""Network namespaces joined by shaped links: everything that the lab asks of the kernel.

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
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ..errors import UsageError
from .link import (
    INTERFACE,
    ShapedLink,
    host_commands,
    host_name,
    shaping_commands,
    switch_commands,
)

_CLONE_NEWNET = 0x40000000
_TOOLS = {"iproute2": ("ip", "tc"), "util-linux": ("nsenter", "setpriv", "unshare")}
_OWN_USER = ("unshare", "--user", "--map-root-user")
_HOST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def require_support() -> None:
    """Check for Linux, the tools, and the right to make namespaces.

    Raises UsageError for the first thing that is missing, and says what would bring it.
    """
    if sys.platform != "linux":
        raise UsageError("a lab needs Linux network namespaces; run it on Linux, or torchrun on real hosts")
    path = environment()["PATH"]
    for package, tools in _TOOLS.items():
        for tool in tools:
            if shutil.which(tool, path=path) is None:
                raise UsageError(f"a lab needs the command {tool!r}, which is missing; install {package}")
    user = () if os.geteuid() == 0 else _OWN_USER[1:]
    if _run(["unshare", *user, "--net", *_HOST[1:], "true"]).returncode:
        raise UsageError(
            "a lab needs root or user namespaces and may make neither network nor PID namespaces here; "
            "run it as root, or the container as privileged"
        )


def become_root(command: Sequence[str]) -> None:
    """Replace this process by `command` as root of a user namespace of its own, unless it is root already."""
    if os.geteuid() != 0:
        os.execvp(_OWN_USER[0], [*_OWN_USER, *command])


def make_network(num_hosts: int, link: ShapedLink) -> list[list[str]]:
    """Make hosts in namespaces of their own, joined by a switch in another, to which this process moves.

    Returns by host what comes before the command of its first process, whose parent has to be the main thread
    of this process. Raises UsageError where the kernel lacks something, such as netem for a delay.
    """
    paths = [f"/proc/{os.getpid()}/fd/{_new_namespace()}" for _ in range(num_hosts)]
    os.close(_new_namespace())
    netem_probe = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    if link.delay_s and _run(netem_probe).returncode:
        raise UsageError("--delay needs the kernel's netem (module sch_netem), not here; leave it out")
    _batch("ip", switch_commands(paths))
    inside = [["nsenter", f"--net={path}"] for path in paths]
    for host, enter in enumerate(inside):
        _batch("ip", host_commands(host), enter)
        _batch("tc", shaping_commands(INTERFACE, link, leaves_host=True), enter)
        _batch("tc", shaping_commands(host_name(host), link, leaves_host=False))
    return [[*enter, "setpriv", "--pdeathsig", "KILL", *_HOST] for enter in inside]


def _new_namespace() -> int:
    """Move this thread to a new network namespace and return a file descriptor that keeps it alive."""
    # os.unshare is there from Python 3.12 on
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise UsageError(
            f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}; run it as root"
        )
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _batch(tool: str, lines: Sequence[str], inside: Sequence[str] = ()) -> None:
    done = _run([*inside, tool, "-batch", "-"], "\n".join(lines) + "\n")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise UsageError(
            f"the kernel refused the lab's network: {tool} says {reason!r}; it needs veth, bridge and sch_tbf"
        )


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, env=environment(), capture_output=True, text=True, check=False)


def environment() -> dict[str, str]:
    """The environment, with the folders of administrators' tools on PATH, which users often lack."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin", "LC_ALL": "C"}
