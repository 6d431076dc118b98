"""Failures of ranks: time limits, the status and reason of a failed case, and when to start them again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..common.text import escape_lines, format_list
from ..machine.host import format_ranges
from ..plan.case import Case, split_batch
from ..plan.settings import ResolvedSettings
from ..results.block_times import Fault
from ..results.journal import State
from ..worker.messages import RankStatus, Report

INSPECTOR_RANK = -1
"""Stands for the rank of the worker that looks at the model, and then ends: what user's code keeps of the
look, such as tensors on the meta device, is in no process that trains or forks."""

MAX_IDLE_ATTEMPTS = 2
"""Attempts in a row that may achieve nothing: one can be chance, two have a cause that stays."""

START_TIMEOUT_S = 600.0
"""Limit for what is done before the first case, such as reading drivers and slow file systems."""

PREPARATION_TIMEOUT_S = 600.0
"""Limit for a case's construction, proof and warm-up: compiling a large model takes minutes."""

FORWARD_TIMEOUT_S = 4.0
"""More for every forward of a step over all ranks: rank 0 trains them one after another, for 2 steps, twice
where rounding is to be known; a forward and backward that fills a device takes less than a second."""

AUTOTUNE_FACTOR = 3
"""Factor on limits where the compiler times its choices: with a cold cache for every convolution."""

MIN_BLOCK_TIMEOUT_S = 60.0
"""No block is given up sooner: a busy machine or network can stop a process for seconds."""

TIMEOUT_FACTOR = 20
"""A block may take this many times what its steps took in the warm-up."""

MIN_BLOCK_STEPS = 4
"""A block counts as so many steps at least: some phases take several whatever `--steps` says."""

TURN_TIMEOUT_S = 900.0
"""Limit for the blocks of another run's turn; a turn may also be the preparation of a case."""


MAX_NAMED = 4
"""Ranks that a message names; of more it gives the number."""

DEBUG = "TORCH_DISTRIBUTED_DEBUG"
DEBUG_CRASH_NOTE = f"; {DEBUG}=DETAIL is set, with which some versions of torch crash by themselves: unset it"

IDLE_PLACE = "its wait for the next command"
"""Place where a rank died that had not begun with what it was told last."""

FAILED_AFTER_ANOTHER = "ended because another rank failed"
"""Text for a rank that is not the cause."""


@dataclass(frozen=True, kw_only=True)
class Failure(Fault):
    """The fault that ended a case, and what is known of its ranks."""

    ranks: Mapping[int, str] = field(default_factory=dict, compare=False)
    """Account of each rank that is known of, for the kept file: one line, then a traceback or stacks."""
    was_idle: bool = False
    """True where it came before what is noted as under way had begun, which is not to blame then."""


class RestartError(Exception):
    """These workers can measure no further: all of them have to start again."""

    def __init__(self, failure: Failure | None = None) -> None:
        super().__init__(failure.reason if failure else "")
        self.failure = failure
        """Failure that is to be written down; None where that has been done."""


def name_worker(rank: int) -> str:
    """Name a worker in a message."""
    return "the worker that looks at the model" if rank == INSPECTOR_RANK else f"rank {rank}"


def add_location(reason: str, *where: str) -> str:
    """Return a reason with its known location: `ValueError: late bug (net.py:31, in forward)`."""
    known = "; ".join(filter(None, where))
    return f"{reason} ({known})" if known else reason


def format_failure(title: str, found: Failure) -> str:
    """Write a failure as it is kept: what failed when and why, then each rank; equal accounts as one."""
    told: dict[str, list[int]] = {}
    for rank, text in sorted(found.ranks.items()):
        told.setdefault(text.strip(), []).append(rank)
    parts = [title, found.reason, ""]
    for text, ranks in told.items():
        parts += [f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks)}: {text}", ""]
    return escape_lines("\n".join(parts)) + "\n"


def find_cause(reports: Mapping[int, Report]) -> tuple[int, Fault] | None:
    """Find the rank that failed by itself, else the first that is not well, and its fault."""
    bad = [(rank, report.fault) for rank, report in reports.items() if report.fault is not None]
    own = (one for one in bad if reports[one[0]].is_failure and one[1].is_cause)
    return next(own, next(iter(bad), None))


def find_failure(reports: Mapping[int, Report], *, waiting: Iterable[int] = ()) -> Failure | None:
    """Find what ended a case, from the reports of its ranks; None where all are well.

    A rank that failed because another one did is no cause, unless no other is known. Where some of the ranks
    that are `waiting` have not reported, the reason says which rank it was.
    """
    if (cause := find_cause(reports)) is None:
        return None
    first, fault = cause
    any_cause = reports[first].is_failure and fault.is_cause
    ranks = dict.fromkeys(waiting, FAILED_AFTER_ANOTHER)
    rank = name_worker(first) if ranks else ""
    ranks |= {rank: _describe_report(r, any_cause=any_cause) for rank, r in reports.items()}
    reason = add_location(fault.reason, reports[first].place, rank)
    return Failure(fault.status, reason, fault.reason_code, ranks=ranks)


def describe_timeout(
    told: Mapping[int, RankStatus], names: Mapping[int, str], what: str, limit_s: float
) -> Failure:
    """Describe what came to no end: who of those with `names` is late, by ranks that answer at all."""
    ranks = {
        rank: f"{f'waited for {one.waits_for}' if one.waits_for else 'was at work'}\n{one.stacks}"
        for rank, one in sorted(told.items())
    }
    silent = [rank for rank in names if rank not in told]
    working = [f"{names[rank]} {one.where}" for rank, one in sorted(told.items()) if not one.waits_for]
    # Who is at work may wait, deep in a step, for one that gives no answer.
    if late := [f"{names[rank]} gave no answer" for rank in sorted(silent)] or working:
        who = format_list(late, MAX_NAMED)
    else:
        first = min(told)
        who = f"{names[first]} waits for {told[first].waits_for}"
    return Failure(
        "timeout",
        f"no end of {what} within {limit_s:g} s: {who}",
        ranks=ranks | dict.fromkeys(silent, "gave no answer"),
    )


def _describe_report(report: Report, *, any_cause: bool) -> str:
    if report.fault is None or not report.is_failure:
        return "did not fail"
    if any_cause and not report.fault.is_cause:
        return f"{FAILED_AFTER_ANOTHER}: {report.fault.reason}"
    return f"raised\n{report.traceback}"


def compute_preparing_limit_s(settings: ResolvedSettings, case: Case | None = None) -> float:
    """Compute the limit in seconds of a case's construction, proof and warm-up, or of an all-reduce curve."""
    num_forwards = split_batch(case).num_forwards * case.accumulate if case else 0
    usual_s = PREPARATION_TIMEOUT_S * (AUTOTUNE_FACTOR if "max-autotune" in settings.axes["compile"] else 1)
    return settings.case_timeout or usual_s + FORWARD_TIMEOUT_S * num_forwards


def compute_block_limit_s(settings: ResolvedSettings, longest_step_s: float, step_s: float) -> float:
    """Compute the limit of a block in seconds, by the longest step of its warm-up and a usual one."""
    usual_s = max(longest_step_s * MIN_BLOCK_STEPS, step_s * settings.count_steps_per_block(step_s))
    return settings.case_timeout or max(MIN_BLOCK_TIMEOUT_S, TIMEOUT_FACTOR * usual_s)


def compute_progress(state: State) -> tuple[int, ...]:
    """Return how far a run has come: blocks, cases settled and failed, curves done."""
    num_failed = sum(case.status != "ok" for case in state.settled.values())
    return (state.num_blocks, len(state.settled), num_failed, len(state.curves))


def is_stuck(progress: Sequence[object]) -> bool:
    """Tell whether to start the ranks no more: the last `MAX_IDLE_ATTEMPTS` attempts achieved nothing.

    `progress` is that before each attempt, and that of now.
    """
    last = progress[-MAX_IDLE_ATTEMPTS - 1 :]
    return len(last) > MAX_IDLE_ATTEMPTS and all(one == last[-1] for one in last)


def describe_exit(exit_codes: Mapping[int, int | None], *, what: str, out_of_memory: bool) -> Failure:
    """Status and reason of the case in whose `what` (`round 3 (timed)`) ranks ended.

    `exit_codes` are by rank in the order of their ends, None where another process has started it;
    `out_of_memory` says that the kernel's OOM killer struck meanwhile.
    """
    known = {rank: code for rank, code in exit_codes.items() if code is not None}
    killed = [rank for rank, code in known.items() if code < 0]
    ranks = {rank: _describe_end(code) for rank, code in exit_codes.items()}
    first = next(iter(killed or known or exit_codes), None)
    who, how = ("a rank", _describe_end(None)) if first is None else (name_worker(first), ranks[first])
    if out_of_memory and (not killed or -signal.SIGKILL in known.values()):
        status, reason = "oom", f"{who} was killed by the kernel for want of host memory in {what}"
    else:
        crashes = -signal.SIGSEGV in known.values() and os.environ.get(DEBUG) == "DETAIL"
        status, reason = "failed", f"{who} {how} in {what}{DEBUG_CRASH_NOTE if crashes else ''}"
    return Failure(status, reason, ranks=ranks, was_idle=what == IDLE_PLACE)


def _describe_end(code: int | None) -> str:
    if code is None:
        return "ended unexpectedly"
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((known.name for known in signal.Signals if known == -code), "unknown")
    return f"was killed by signal {-code} ({name})"
