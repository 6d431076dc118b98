"""Interleaves two checkouts, or two environments, on one machine: the strongest comparison there is.

Each is an ordinary `bench.run` of its own code and interpreter; a turn server lets one of them compute at a
time, in random order, so that a slow minute of the machine meets both.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..common.cli import get_message_prefix
from ..common.console import Console, format_s
from ..common.errors import ExitCode, NotComparableError, UsageError
from ..common.process import end_all, hold_signals, raise_on_signals, yield_exit_codes
from ..common.scratch import make_scratch_folder
from ..common.text import escape_controls
from ..common.turns import PROOFS_ENV, serve_turns
from ..machine.load import compute_loads, describe_load, is_busy, read_load
from .checkouts import Checkout, check_loaded
from .code import check_one_code, describe_same_code, name_sides
from .machine import add_conditions
from .result import Gate
from .runs import GateRun, merge_sides, read_run
from .sides import END_TIMEOUT_S, Request, check_out_sides, make_failure


def show_plan(asked: Request) -> None:
    """Print what a gate would compare and measure, and how long that would take. Raises UsageError."""
    with raise_on_signals(), check_out_sides(asked, Console(silent=True)) as (sides, _, plan):
        for line in plan.describe_plan(asked, sides):
            print(escape_controls(line))


def measure_launches(
    asked: Request,
    *,
    gate_of: Callable[[GateRun, GateRun], Gate],
    out: Path | None = None,
    quiet: bool = False,
) -> Gate:
    """Measure baseline and candidate interleaved; return the gate of all launches.

    Both are launched until `gate_of` them is decided, which is asked after each number of launches in the
    looks, or until no further launch fits into the time. `out` is a folder that keeps the results. Raises
    UsageError.
    """
    looks, begun_s = asked.looks, time.monotonic()
    with raise_on_signals(), contextlib.ExitStack() as stack:
        out = out or stack.enter_context(make_scratch_folder())
        console = Console(silent=quiet)
        stack.callback(console.hide_progress)
        checkouts, arguments, plan = stack.enter_context(check_out_sides(asked, console))
        _print_notes(console, *plan.describe_time(asked, time.monotonic() - begun_s))
        launched_s, longest_s, launches = time.monotonic(), 0.0, list[tuple[GateRun, GateRun]]()
        gate: Gate | None = None
        for done in range(looks[-1]):
            before_s = time.monotonic()
            if done and before_s - begun_s + longest_s > asked.max_time_s:
                _print_notes(console, f"--max-time has no room for launch {done + 1}")
                break
            each_s = (before_s - launched_s) / done if done else plan.launch_s
            until, how_far = _describe_end(looks, done, each_s, asked.max_time_s - (before_s - begun_s))
            if gate is not None and (width := gate.compute_resolvable_change(until)) is not None:
                how_far += f", can resolve changes of about ±{100 * width:.2g}% by then"
            if launches and is_busy(launches[-1][0].manifest):
                how_far += f"; {describe_load(launches[-1][0].manifest)}"
            console.show_progress("baseline and candidate, interleaved", done / looks[-1], how_far)
            load, folder = read_load(), out / f"launch{done + 1}"
            runs = measure_in_turns(checkouts, arguments, folder, seed=done + 1)
            runs = add_conditions(runs, asked.environments, compute_loads([load], [read_load()]))
            launches.append(runs)
            longest_s = max(longest_s, time.monotonic() - before_s)
            if not done:
                # What is proved once is not proved anew.
                places = [{PROOFS_ENV: str(folder.absolute() / side.name)} for side in checkouts]
                checkouts = checkouts[0].add_variables(places[0]), checkouts[1].add_variables(places[1])
                if checkouts[0].moved is not None:
                    check_loaded(runs[0].manifest, *checkouts[0].moved)
                _print_notes(console, name_sides(*runs), describe_same_code(*runs, interleaved=True))
            gate = gate_of(*merge_sides(launches))
            if done + 1 in looks and not gate.needs_more_launches:
                break
        for side in zip(*launches, strict=True):
            check_one_code(side)
        assert gate is not None, "the first launch is made in any case"
        return gate


def _print_notes(console: Console, *lines: str) -> None:
    for line in filter(None, lines):
        console.print_note(f"{get_message_prefix()}: {line}")


def _describe_end(looks: Sequence[int], done: int, each_s: float, left_s: float) -> tuple[int, str]:
    """Return the number of launches after which the gate may next end, one more at least, and say it."""
    until = next(look for look in looks if look > done)
    most = f", at most {looks[-1]}" if until < looks[-1] else ""
    if each_s * (until - done) > left_s:
        until, most = done + max(int(left_s / each_s), 1), " within --max-time"
    return until, f"launch {done + 1} of {until}{most}, about {format_s(each_s * (until - done))} left"


def measure_in_turns(
    checkouts: tuple[Checkout, Checkout], arguments: Sequence[str], folder: Path, *, seed: int = 0
) -> tuple[GateRun, GateRun]:
    """Run `bench.run arguments` of baseline and candidate interleaved, results in `folder`, and read them.

    Whatever is raised meanwhile, such as by a signal's handler, first ends the runs. Raises UsageError with
    the last line that a run said if it fails, NotMeasuredError where it could not measure what was asked for,
    NotComparableError where the baseline is another commit of ddp-bench that this one cannot ask or read.
    """
    outs = [folder / checkout.name for checkout in checkouts]
    has_own_bench = checkouts[0].has_own_bench
    logs = [out.with_suffix(".txt") for out in outs]
    sides: list[subprocess.Popen[str]] = []
    failed: list[int] = []
    with serve_turns(len(checkouts), seed) as server:
        try:
            for checkout, out, log in zip(checkouts, outs, logs, strict=True):
                whole = [*arguments, "--quiet", "--out", str(out.absolute())]
                with hold_signals():
                    sides.append(checkout.start(whole, log, server.environment))
            for _ in yield_exit_codes(sides):
                server.drop_client()  # one that failed at its start would be waited for
                failed = [index for index, side in enumerate(sides) if side.poll()]
                if failed and not has_own_bench:  # else the other one shows whether both fail alike
                    break
        finally:
            end_all(sides, within_s=END_TIMEOUT_S)
    if failed:
        code = sides[failed[0]].returncode
        error = make_failure(checkouts[failed[0]], code, logs[failed[0]])
        # By itself a run that was killed, or could not measure its cases, says nothing of formats.
        if has_own_bench and failed == [0] and code in (ExitCode.FAILED, ExitCode.USAGE, ExitCode.BUG):
            raise _make_format_error(error)
        raise error
    try:
        if server.turns == 0:
            raise UsageError("the two sides did not take turns")
        baseline = read_run(outs[0])
    except UsageError as error:
        raise (_make_format_error(error) if has_own_bench else error) from None
    return baseline, read_run(outs[1])


def _make_format_error(error: UsageError) -> NotComparableError:
    return NotComparableError(f"other format: {error}; take a later commit as the baseline")
