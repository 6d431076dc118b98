"""Measures how much of the cores of a run's ranks other programs used while it measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddp_bench.bench.cluster.messages import may_be_sent
from ddp_bench.bench.cluster.ranks import allowed_cores

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class LoadReading:
    """What one rank reads at one moment; CPU seconds since its machine or its process started."""

    machine: str
    """Alike of ranks that share a kernel, whatever their hosts are called."""
    cores: tuple[int, ...]
    """Where the rank may run."""
    at_s: float
    own_s: float
    """Of this process and its descendants."""
    busy_s: tuple[float, ...]
    """Of every core of the machine, by its number: time in programs, interrupts left out."""
    steal_s: tuple[float, ...]
    """Likewise: time that the hypervisor gave to other guests; 0 where the system does not tell."""


may_be_sent(LoadReading)


@dataclass(frozen=True)
class OtherLoad:
    """Mean use, between two readings, of the cores on which the ranks of one machine may run."""

    cores: int
    others: float
    """Cores' worth of time in programs that are no rank."""
    steal: float
    """Cores' worth of time that the hypervisor gave to other guests."""
    seconds: float
    """Between the readings."""

    def after(self, earlier: Mapping[str, Any]) -> OtherLoad:
        """The mean of this and of what an earlier part of the run was told, as a manifest has it."""
        total_s = self.seconds + (earlier.get("seconds") or 0.0)
        share = self.seconds / total_s if total_s else 1.0
        others, steal = (
            round(share * now + (1 - share) * earlier[name], 3)
            for name, now in (("others", self.others), ("steal", self.steal))
        )
        return OtherLoad(self.cores, others, steal, round(total_s, 1))


def read_load() -> LoadReading | None:
    """Read the load of this rank's machine; None where the system does not tell it."""
    try:
        times = psutil.cpu_times(percpu=True)
        process = psutil.Process()
        own_s = sum(sum(_cpu_s(one)) for one in [process, *process.children(recursive=True)])
        return LoadReading(
            machine=_BOOT_ID.read_text(encoding="ascii").strip(),
            cores=tuple(core for core in allowed_cores() if core < len(times)),
            at_s=time.monotonic(),
            own_s=own_s,
            # User time includes guests' (proc(5)); interrupts are mostly of the ranks' own traffic.
            busy_s=tuple(core.user + core.nice + core.system for core in times),
            steal_s=tuple(core.steal for core in times),
        )
    except (OSError, AttributeError, psutil.Error):
        return None


def _cpu_s(process: psutil.Process) -> tuple[float, ...]:
    found = process.cpu_times()
    return (found.user, found.system, found.children_user, found.children_system)


def other_loads(before: Sequence[LoadReading | None], after: Sequence[LoadReading | None]) -> list[OtherLoad]:
    """Compute the load between two readings of every rank, in rank order: one per machine, if known."""
    if None in before or None in after:
        return []
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    machines = dict.fromkeys(first.machine for first, _ in pairs)
    return [_of_machine([pair for pair in pairs if pair[0].machine == machine]) for machine in machines]


def _of_machine(pairs: Sequence[tuple[LoadReading, LoadReading]]) -> OtherLoad:
    first, last = pairs[0]
    cores = sorted({core for reading, _ in pairs for core in reading.cores})
    elapsed_s = max(last.at_s - first.at_s, 1e-9)

    def mean(then: Sequence[float], now: Sequence[float]) -> float:
        return sum(now[core] - then[core] for core in cores) / elapsed_s

    own = sum(now.own_s - then.own_s for then, now in pairs) / elapsed_s
    others = mean(first.busy_s, last.busy_s) - own
    steal = mean(first.steal_s, last.steal_s)
    return OtherLoad(len(cores), round(max(others, 0.0), 3), round(max(steal, 0.0), 3), round(elapsed_s, 1))
