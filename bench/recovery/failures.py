"""What befalls ranks: time limits, the status and reason of a failed case, and when to start them again."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_bench.bench.results.journal import JOURNAL, State, read
from ddp_bench.bench.settings import ResolvedSettings
from ddp_bench.bench.sysfs import ranges
from ddp_bench.bench.text import visible

RESTART_EXIT_CODE = 75
"""A rank that cannot go on alone (EX_TEMPFAIL): the launcher is to start all ranks again."""

TIMEOUT_EXIT_CODE = 76
"""A rank whose watchdog ended it because the first rank did not."""

STARTED_ENV = "BENCH_STARTED_S"
"""When this attempt began, in seconds of the monotonic clock: set where bench.run starts its own ranks."""

FAILURE_ENV = "BENCH_FAILURE"
"""How the ranks ended last time, as JSON from rank to exit code: from the launcher to the ranks after."""

MOST_IDLE_ATTEMPTS = 2
"""So many attempts in a row may achieve nothing: one can be chance, two have a cause that stays."""

PREPARING_S = 600.0
"""Limit for a case's construction, proof and warm-up: compiling a large model takes minutes."""

FORWARD_S = 4.0
"""More for every forward of a step over all ranks: rank 0 trains them one after another, for 2 steps, twice
where rounding is to be known; a forward and backward that fills a device takes less than a second."""

AUTOTUNE = 3
"""So many times as long where the compiler times its choices: with a cold cache for every convolution."""

LEAST_S = 60.0
"""No block is given up sooner: a busy machine or network can stop a process for seconds."""

PATIENCE = 20
"""A block may take this many times what its steps took in the warm-up."""

LEAST_STEPS = 4
"""A block counts as so many steps at least: some phases take several whatever `--steps` says."""

TURN_S = 900.0
"""Limit for the blocks of another run's turn; a turn may also be the preparation of a case."""


AFTER_ANOTHER = "ended because another rank failed"
"""What is said of a rank that is not the cause."""


@dataclass(frozen=True)
class Failure:
    """Status and reason of a case that a fault ended."""

    status: str
    reason: str
    ranks: Mapping[int, str] = field(default_factory=dict, compare=False)
    """How it went on each rank that is known of, for the kept file: one line, then a traceback or stacks."""


def placed(reason: str, *where: str) -> str:
    """A reason with what is known of where it came from: `ValueError: late bug (net.py:31, in forward)`."""
    known = "; ".join(filter(None, where))
    return f"{reason} ({known})" if known else reason


def written(title: str, found: Failure) -> str:
    """What is kept of a failure: what failed when and why, then each rank; ranks that say the same as one."""
    told: dict[str, list[int]] = {}
    for rank, text in sorted(found.ranks.items()):
        told.setdefault(text.strip(), []).append(rank)
    parts = [title, found.reason, ""]
    for text, ranks in told.items():
        parts += [f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}: {text}", ""]
    return "\n".join(visible(line.expandtabs()) for part in parts for line in part.split("\n")) + "\n"


def preparing_s(settings: ResolvedSettings, num_forwards: int = 0) -> float:
    """The time limit of a case's construction, proof and warm-up, or of one all-reduce curve, in seconds.

    `num_forwards` is how many the proof's reference needs for a step.
    """
    usual_s = PREPARING_S * (AUTOTUNE if "max-autotune" in settings.compile else 1)
    return settings.case_timeout or usual_s + FORWARD_S * num_forwards


def block_s(settings: ResolvedSettings, longest_step_s: float, step_s: float) -> float:
    """The time limit of a block, in seconds.

    Args:
        settings: of the run.
        longest_step_s: the longest step of the case's warm-up, which may have compiled it.
        step_s: its usual step.
    """
    usual_s = max(longest_step_s * LEAST_STEPS, step_s * settings.steps_per_block(step_s))
    return settings.case_timeout or max(LEAST_S, PATIENCE * usual_s)


def turn_s(settings: ResolvedSettings) -> float:
    """The time limit of the wait for this run's turn, in seconds: the other runs have the same settings."""
    return TURN_S + preparing_s(settings)


def is_restartable(exit_codes: Mapping[int, int]) -> bool:
    """Whether ranks that ended so are to be started again: none with a code it chose itself, such as 2."""
    return all(code < 0 or code in (0, RESTART_EXIT_CODE, TIMEOUT_EXIT_CODE) for code in exit_codes.values())


def progress_of(state: State, table_bytes: int) -> tuple[int, ...]:
    """How far the next attempt starts out: bytes of blocks.csv, cases settled and failed, curves done.

    What was under way when the ranks died counts as done: the next attempt gives it up.
    """
    statuses = {index: case.status for index, case in state.settled.items()}
    curves = set(state.curves)
    if state.under_way and state.under_way.index is not None:
        statuses[state.under_way.index] = "failed"
    if state.under_way and state.under_way.curve is not None:
        curves.add(state.under_way.curve)
    num_failed = sum(status != "ok" for status in statuses.values())
    return (table_bytes, len(statuses), num_failed, len(curves))


def is_stuck(progress: Sequence[object]) -> bool:
    """Whether to start the ranks no more: the last `MOST_IDLE_ATTEMPTS` attempts achieved nothing.

    `progress` is that before each attempt, and that of now.
    """
    last = progress[-MOST_IDLE_ATTEMPTS - 1 :]
    return len(last) > MOST_IDLE_ATTEMPTS and all(one == last[-1] for one in last)


def progress_in(folder: Path) -> tuple[int, ...]:
    """`progress_of` the run in a results folder; empty before it has begun. Raises UsageError."""
    if not (folder / JOURNAL).is_file():
        return ()
    blocks = folder / "blocks.csv"
    return progress_of(read(folder), blocks.stat().st_size if blocks.exists() else 0)


def failure_of(exit_codes: Mapping[int, int], *, what: str, out_of_memory: bool) -> Failure:
    """Status and reason of the case in whose `what` (`round 3 (timed)`) the ranks ended.

    `exit_codes` may be empty where the launcher does not tell; `out_of_memory` says that the kernel's OOM
    killer struck meanwhile.
    """
    found = _cause(exit_codes, what, out_of_memory=out_of_memory)
    return replace(found, ranks={rank: _end(code) for rank, code in exit_codes.items()})


def _end(code: int) -> str:
    """How a rank ended, by its exit code."""
    if code == RESTART_EXIT_CODE:
        return AFTER_ANOTHER
    if code == TIMEOUT_EXIT_CODE:
        return "ended itself: rank 0 did not answer"
    return f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"


def _cause(exit_codes: Mapping[int, int], what: str, *, out_of_memory: bool) -> Failure:
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
        return Failure("failed", f"{who} was killed by {_signal(killed[min(killed)])} in {what}")
    if any(code == -signal.SIGTERM for code in exit_codes.values()):
        return Failure("failed", f"a rank was ended by {_signal(signal.SIGTERM)} in {what}")
    return Failure("failed", f"a rank ended unexpectedly in {what}")


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    return f"signal {int(number)} ({name})"


def oom_kills() -> int | None:
    """Processes that the kernel has ended for want of memory, here or in this group; None if unknown."""
    text = "\n".join(map(_text, _oom_files()))
    counts = [int(number) for number in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)]
    return sum(counts) if counts else None


def _oom_files() -> list[Path]:
    groups = re.findall(r"^(\d+):([^:]*):(.*)$", _text(Path("/proc/self/cgroup")), re.MULTILINE)
    root = Path("/sys/fs/cgroup")
    files = [Path("/proc/vmstat")]
    files += [root / path.lstrip("/") / "memory.events" for _, names, path in groups if not names]
    files += [
        root / "memory" / path.lstrip("/") / "memory.oom_control" for _, n, path in groups if n == "memory"
    ]
    return files


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
