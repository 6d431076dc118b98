"""What can befall a rank: from how a process ended to the status and reason of a case; time limits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.cluster.turns import TURNS_ENV
from bench.settings import Settings

RESTART_EXIT_CODE = 75
"""A rank that cannot go on alone (EX_TEMPFAIL): the launcher is to start all ranks again."""

TIMEOUT_EXIT_CODE = 76
"""A rank whose watchdog ended it because the first rank did not."""

STARTED_ENV = "BENCH_STARTED_S"
"""When this attempt began, in seconds of the monotonic clock: set where bench.run starts its own ranks."""

FAILURE_ENV = "BENCH_FAILURE"
"""How the ranks ended last time, as JSON from rank to exit code: from the launcher to the ranks after."""


@dataclass(frozen=True)
class Failure:
    """Status and reason of a case that a fault ended."""

    status: str
    reason: str


def is_restartable(exit_codes: Mapping[int, int]) -> bool:
    """Whether ranks that ended so are to be started again: none with a code it chose itself, such as 2."""
    return all(code < 0 or code in (0, RESTART_EXIT_CODE, TIMEOUT_EXIT_CODE) for code in exit_codes.values())


def failure_of(exit_codes: Mapping[int, int], *, what: str, out_of_memory: bool) -> Failure:
    """Status and reason of the case in whose `what` (`round 3 (timed)`) the ranks ended.

    `exit_codes` may be empty where the launcher does not tell; `out_of_memory` says that the kernel's OOM
    killer struck meanwhile.
    """
    # The launcher ends the survivors with SIGTERM: that tells of no cause.
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM}
    # A rank that has lost a peer leaves with RESTART_EXIT_CODE; only who died first is the cause.
    who = f"rank {min(killed)}" if killed else "a rank"
    if out_of_memory and (not killed or signal.SIGKILL in killed.values()):
        return Failure("oom", f"{who} was killed by the kernel for want of host memory in {what}")
    # Before killed ones: who leaves so has waited for long, and only then was the first rank killed.
    if TIMEOUT_EXIT_CODE in exit_codes.values():
        return Failure("timeout", f"rank 0 did not answer in {what}; stacks are on standard error")
    if killed:
        number = killed[min(killed)]
        return Failure("failed", f"{who} was killed by signal {number} ({_signal_name(number)}) in {what}")
    if exit_codes.get(0) == -signal.SIGTERM or any(code == -signal.SIGTERM for code in exit_codes.values()):
        return Failure("failed", f"a rank was ended by signal 15 (SIGTERM) in {what}")
    return Failure("failed", f"a rank ended unexpectedly in {what}")


def oom_kills() -> int | None:
    """Processes that the kernel has ended for want of memory, here or in this group; None if unknown."""
    text = "\n".join(map(_read, _oom_files()))
    counts = [int(number) for number in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)]
    return sum(counts) if counts else None


def _oom_files() -> list[Path]:
    groups = re.findall(r"^(\d+):([^:]*):(.*)$", _read(Path("/proc/self/cgroup")), re.MULTILINE)
    root = Path("/sys/fs/cgroup")
    files = [Path("/proc/vmstat")]
    files += [root / path.lstrip("/") / "memory.events" for _, names, path in groups if not names]
    files += [
        root / "memory" / path.lstrip("/") / "memory.oom_control" for _, n, path in groups if n == "memory"
    ]
    return files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


PREPARING_S = 600.0
LEAST_S = 60.0
PATIENCE = 20
"""A block may take this many times what its steps took in the warm-up."""

LEAST_STEPS = 4
"""A block counts as so many steps at least: some phases take several whatever `--steps` says."""

OTHERS_S = 900.0
"""Beside other runs a block waits for its turn."""


def preparing_s(settings: Settings) -> float:
    """For a case's construction, proof and warm-up, or for one all-reduce curve."""
    return settings.case_timeout or PREPARING_S


def block_s(settings: Settings, longest_step_s: float) -> float:
    """For a block of a case whose longest step of the warm-up took so long."""
    usual_s = longest_step_s * max(settings.steps or 1, LEAST_STEPS)
    return settings.case_timeout or max(LEAST_S, PATIENCE * usual_s)


def waiting_s() -> float:
    """For the turns of other runs, where there are any."""
    return OTHERS_S if TURNS_ENV in os.environ else 0.0
