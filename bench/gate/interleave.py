"""Measures two checkouts, or two environments, in turns on one machine: the strongest comparison there is.

Each is an ordinary `bench.run` of its own code and interpreter; a turn server lets one of them compute at a
time, in random order, so that a slow minute of the machine meets both.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..common.cli import speaker
from ..common.console import Console, format_s
from ..common.errors import ExitCode, NotComparableError, UsageError
from ..common.process import end_all, exit_codes, interrupted_by_signals, uninterrupted
from ..common.scratch import scratch_folder
from ..common.text import visible
from ..common.turns import PROVED_ENV, turn_server
from ..findings.cautions import is_busy, said_load
from ..machine.load import other_loads, read_load
from .checkouts import Checkout, check_loaded
from .code import Code, check_one_code
from .compare import Gate
from .machine import with_load
from .runs import GateRun, both, read_run
from .sides import END_S, Request, checked_sides, failure_of


def show_plan(asked: Request) -> None:
    """Print what a gate would compare and measure, and how long that would take. Raises UsageError."""
    with interrupted_by_signals(), checked_sides(asked, Console(silent=True)) as (sides, _, plan):
        for line in plan.lines(asked, sides):
            print(visible(line))


def measure_launches(
    asked: Request,
    *,
    gate_of: Callable[[GateRun, GateRun], Gate],
    out: Path | None = None,
    quiet: bool = False,
) -> tuple[GateRun, GateRun]:
    """Measure baseline and candidate in turns; return each with the rounds of all launches.

    Both are launched until `gate_of` them is decided, which is asked after each number of launches in the
    looks, or until no further launch fits into the time. `out` is a folder that keeps the results. Raises
    UsageError.
    """
    looks, begun_s = asked.looks, time.monotonic()
    with interrupted_by_signals(), contextlib.ExitStack() as stack:
        out = out or stack.enter_context(scratch_folder())
        console = Console(silent=quiet)
        stack.callback(console.progress_done)
        checkouts, arguments, plan = stack.enter_context(checked_sides(asked, console))
        console.note(f"{speaker()}: expected time: {plan.duration(asked)}")
        launched_s, longest_s, launches = time.monotonic(), 0.0, list[tuple[GateRun, GateRun]]()
        gate: Gate | None = None
        for done in range(looks[-1]):
            before_s = time.monotonic()
            if done and before_s - begun_s + longest_s > asked.max_time_s:
                console.note(f"{speaker()}: --max-time has no room for launch {done + 1}")
                break
            until = next(look for look in looks if look > done)
            most = f", at most {looks[-1]}" if until < looks[-1] else ""
            each_s = (before_s - launched_s) / done if done else plan.launch_s
            left_s = min(each_s * (until - done), asked.max_time_s - (before_s - begun_s))
            how_far = f"launch {done + 1} of {until}{most}, about {format_s(left_s)} left"
            if gate is not None and (width := gate.resolvable(until)) is not None:
                how_far += f", can resolve changes of about ±{100 * width:.2g}% by then"
            if launches and is_busy(launches[-1][0].manifest):
                how_far += f"; {said_load(launches[-1][0].manifest)}"
            console.progress("baseline and candidate in turns", done / looks[-1], how_far)
            load, folder = read_load(), out / f"launch{done + 1}"
            runs = measure_in_turns(checkouts, arguments, folder, seed=done + 1)
            launches.append(with_load(runs, other_loads([load], [read_load()])))
            longest_s = max(longest_s, time.monotonic() - before_s)
            if not done:
                # What is proved once is not proved anew.
                places = [{PROVED_ENV: str(folder.absolute() / side.name)} for side in checkouts]
                checkouts = checkouts[0].with_variables(places[0]), checkouts[1].with_variables(places[1])
                ours, theirs = (run.manifest for run in launches[0])
                if checkouts[0].moved is not None:
                    check_loaded(ours, *checkouts[0].moved)
                code = Code(ours, theirs, interleaved=True, environments=asked.environments)
                for line in filter(None, (code.compared(), code.described())):
                    console.note(f"{speaker()}: {line}")
            gate = gate_of(*both(launches))
            if done + 1 in looks and not gate.needs_more_launches:
                break
        for side in zip(*launches, strict=True):
            check_one_code([run.manifest for run in side])
        return both(launches)


def measure_in_turns(
    checkouts: tuple[Checkout, Checkout], arguments: Sequence[str], folder: Path, *, seed: int = 0
) -> tuple[GateRun, GateRun]:
    """Run `bench.run arguments` of baseline and candidate in turns, results in `folder`, and read them.

    Whatever is raised meanwhile, such as by a signal's handler, first ends the runs. Raises UsageError with
    the last line that a run said if it fails, NotMeasuredError where it could not measure what was asked for,
    NotComparableError where the baseline is another commit of ddp-bench that this one cannot ask or read.
    """
    outs = [folder / checkout.name for checkout in checkouts]
    has_own_bench = checkouts[0].has_own_bench
    logs = [out.with_suffix(".txt") for out in outs]
    sides: list[subprocess.Popen[str]] = []
    failed: list[int] = []
    with turn_server(len(checkouts), seed) as server:
        try:
            for checkout, out, log in zip(checkouts, outs, logs, strict=True):
                whole = [*arguments, "--quiet", "--out", str(out.absolute())]
                with uninterrupted():
                    sides.append(checkout.start(whole, log, server.environment))
            for _ in exit_codes(sides):
                server.client_left()  # one that failed at its start would be waited for
                failed = [index for index, side in enumerate(sides) if side.poll()]
                if failed and not has_own_bench:  # else the other one shows whether both fail alike
                    break
        finally:
            end_all(sides, within_s=END_S)
    if failed:
        code = sides[failed[0]].returncode
        error = failure_of(checkouts[failed[0]], code, logs[failed[0]])
        # By itself a run that was killed, or could not measure its cases, says nothing of formats.
        if has_own_bench and failed == [0] and code in (ExitCode.FAILED, ExitCode.USAGE, ExitCode.BUG):
            raise _other_format(error)
        raise error
    try:
        if server.turns == 0:
            raise UsageError("the two sides did not take turns")
        baseline = read_run(outs[0])
    except UsageError as error:
        raise (_other_format(error) if has_own_bench else error) from None
    return baseline, read_run(outs[1])


def _other_format(error: UsageError) -> NotComparableError:
    return NotComparableError(f"other format: {error}; take a later commit as the baseline")
