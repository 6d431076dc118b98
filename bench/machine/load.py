"""Use of a machine's cores by other programs, and by its hypervisor's other guests, while ranks run there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..common.numbers import format_number
from ..common.process import get_allowed_cores
from .host import read_text
from .manifest import Load, Manifest

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MAX_BUSY = 0.05
"""Share of the cores that other programs may use while every core stands in for a device. 5% is the gate's
default threshold: a load of that size can pass for a regression."""

MAX_STEAL = 0.02
"""Share of time that the hypervisor may give to other guests (proc(5), "steal")."""

MIN_STEAL = 0.005
"""Share of the time that is no rounding of 0%."""


@dataclass(frozen=True)
class LoadReading:
    """Readings of one rank at one moment; CPU seconds since its machine or its process started."""

    machine: str
    """Alike of ranks that share a kernel, whatever their hosts are called."""
    cores: tuple[int, ...]
    """Numbers of the cores on which the rank may run."""
    at_s: float
    own_s: float
    """CPU seconds of this process and its descendants."""
    busy_s: tuple[float, ...]
    """CPU seconds in programs of every core of the machine, by its number; interrupts left out."""
    steal_s: tuple[float, ...]
    """Likewise: time that the hypervisor gave to other guests; 0 where the system does not tell."""


def read_load_average() -> float | None:
    """Programs that ran or wanted to in the last minute, as a share of this machine's cores, if known."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 3)
    except OSError:
        return None


def read_load() -> LoadReading | None:
    """Read the load of this rank's machine; None where the system does not tell it."""
    try:
        times = psutil.cpu_times(percpu=True)
        process = psutil.Process()
        # User and system time, of itself and of children that have ended.
        own_s = sum(sum(one.cpu_times()[:4]) for one in [process, *process.children(recursive=True)])
        return LoadReading(
            machine=read_text(BOOT_ID) or socket.gethostname(),
            cores=tuple(core for core in get_allowed_cores() if core < len(times)),
            at_s=time.monotonic(),
            own_s=own_s,
            # User time includes guests' (proc(5)); interrupts are mostly of the ranks' own traffic.
            busy_s=tuple(core.user + core.nice + core.system for core in times),
            steal_s=tuple(getattr(core, "steal", 0.0) for core in times),
        )
    except (OSError, AttributeError, psutil.Error):
        return None


def compute_loads(before: Sequence[LoadReading | None], after: Sequence[LoadReading | None]) -> list[Load]:
    """Compute the load between two readings of every rank, in rank order: one per machine, if known."""
    if None in before or None in after:
        return []
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    machines = dict.fromkeys(first.machine for first, _ in pairs)
    return [
        _compute_machine_load([pair for pair in pairs if pair[0].machine == machine]) for machine in machines
    ]


def _compute_machine_load(pairs: Sequence[tuple[LoadReading, LoadReading]]) -> Load:
    first, last = pairs[0]
    cores = sorted({core for reading, _ in pairs for core in reading.cores})
    elapsed_s = max(last.at_s - first.at_s, 1e-9)

    def compute_mean(then: Sequence[float], now: Sequence[float]) -> float:
        return sum(now[core] - then[core] for core in cores) / elapsed_s

    own = sum(now.own_s - then.own_s for then, now in pairs) / elapsed_s
    others = compute_mean(first.busy_s, last.busy_s) - own
    steal = compute_mean(first.steal_s, last.steal_s)
    return Load(
        cores=len(cores),
        others=round(max(others, 0.0), 3),
        steal=round(max(steal, 0.0), 3),
        seconds=round(elapsed_s, 1),
    )


def average_loads(now: Load, earlier: Load) -> Load:
    """Return the mean over two parts of a run."""
    total_s = now.seconds + earlier.seconds
    share = now.seconds / total_s if total_s else 1.0
    return Load(
        cores=now.cores,
        others=round(share * now.others + (1 - share) * earlier.others, 3),
        steal=round(share * now.steal + (1 - share) * earlier.steal, 3),
        seconds=round(total_s, 1),
    )


def _get_load_shares(manifest: Manifest) -> tuple[float, float] | None:
    """Return the shares of a run's cores that other programs and other guests of the hypervisor used.

    Fractions over its rounds, the largest of any machine; None where the manifest does not tell.
    """
    found = [(load.others / load.cores, load.steal / load.cores) for load in manifest.load if load.cores]
    return (max(busy for busy, _ in found), max(steal for _, steal in found)) if found else None


def is_busy(manifest: Manifest) -> bool:
    """Return whether others used so much of the cores that steps on them took longer."""
    shares = _get_load_shares(manifest)
    return shares is not None and (shares[0] > MAX_BUSY or shares[1] > MAX_STEAL)


def describe_busy_cores(manifest: Manifest) -> str:
    """Say what others used of the cores; empty where that is not known."""
    if (shares := _get_load_shares(manifest)) is None:
        return ""
    busy, steal = (f"{100 * share:.0f}%" for share in shares)
    guests = f", other guests {steal}" if shares[1] >= MIN_STEAL else ""
    return f"other programs used {busy} of the cores{guests}"


def describe_load(manifest: Manifest) -> str:
    """Say what others used of the cores, and how many programs there were before; empty where not known."""
    used, waiting = describe_busy_cores(manifest), manifest.load_before
    before = "" if waiting is None else f"; before the run {format_number(waiting, 2)} programs per core"
    return f"{used}{before}" if used else ""
