"""Measures two checkouts, or two environments, in turns on one machine: the strongest comparison there is.

Each is an ordinary `bench.run` of its own code and interpreter; a turn server lets one of them compute at a
time, in random order, so that a slow minute of the machine meets both.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..common.cli import speaker
from ..common.console import Console, format_s
from ..common.errors import (
    ExitCode,
    NotComparableError,
    NothingToCompareError,
    NotMeasuredError,
    UsageError,
)
from ..common.process import RUN_POLL_S, end_all, exit_codes, interrupted_by_signals, uninterrupted
from ..common.scratch import scratch_folder
from ..common.turns import PROVED_ENV, turn_server
from ..machine.manifest import MANIFEST
from ..plan.settings import Settings
from ..run.main import parser as run_parser
from ..run.main import settings_of
from .checkouts import Checkout, both_checkouts, check_loaded
from .compare import Gate
from .preflight import check_evidence, check_interpreter, check_variables
from .runs import Code, GateRun, both, check_one_code, read_run

END_S = 60.0
"""How long an interrupted run may take to write its summary; one that has hung would take for ever."""


def measure_launches(
    reference: str,
    arguments: Sequence[str],
    *,
    looks: Sequence[int],
    gate_of: Callable[[GateRun, GateRun], Gate],
    python: str | None = None,
    out: Path | None = None,
    quiet: bool = False,
    environments: Sequence[Mapping[str, str]] = ({}, {}),
) -> tuple[GateRun, GateRun]:
    """Baseline and candidate: `reference` and the code as it stands, by `bench.run arguments`.

    Both are launched until `gate_of` them is decided, which is asked after each number of launches in
    `looks`. `python` is the baseline's interpreter, `out` a folder that keeps the results, `environments` the
    variables of each side alone. Raises UsageError.
    """
    # A mistake is said before anything starts.
    settings = settings_of(arguments, decided=("resume", "dry_run", "json", "out", "race"))
    check_evidence(settings, looks)
    check_variables(settings, environments)
    arguments = from_any_folder(arguments, settings)
    with interrupted_by_signals(), contextlib.ExitStack() as stack:
        out = out or stack.enter_context(scratch_folder())
        console = Console(silent=quiet)
        stack.callback(console.progress_done)
        checkouts = stack.enter_context(both_checkouts(reference, settings, python))
        check_interpreter(checkouts[0])
        checkouts = (
            checkouts[0].with_variables(environments[0]),
            checkouts[1].with_variables(environments[1]),
        )
        begun, launches = time.monotonic(), list[tuple[GateRun, GateRun]]()
        for done in range(looks[-1]):
            until = next(look for look in looks if look > done)
            most = f", at most {looks[-1]}" if until < looks[-1] else ""
            how_far = f"launch {done + 1} of {until}{most}"
            if done:
                each_s = (time.monotonic() - begun) / done
                how_far += f", about {format_s(each_s * (until - done))} left"
            console.progress("baseline and candidate in turns", done / looks[-1], how_far)
            folder = out / f"launch{done + 1}"
            launches.append(measure_in_turns(checkouts, arguments, folder, seed=done + 1))
            if not done:  # what is proved once is not proved anew
                places = [{PROVED_ENV: str(folder.absolute() / side.name)} for side in checkouts]
                checkouts = checkouts[0].with_variables(places[0]), checkouts[1].with_variables(places[1])
            if not done:
                each_s = time.monotonic() - begun
                ends = dict.fromkeys(format_s(each_s * look) for look in (looks[0], looks[-1]))
                console.note(f"{speaker()}: a launch takes {format_s(each_s)}: {' to '.join(ends)} in all")
                ours, theirs = (run.manifest for run in launches[0])
                if checkouts[0].moved is not None:
                    check_loaded(ours, *checkouts[0].moved)
                for line in Code(ours, theirs, interleaved=True, environments=tuple(environments)).lines():
                    console.note(f"{speaker()}: {line}")
            if done + 1 in looks and not gate_of(*both(launches)).needs_more_launches:
                break
        for side in zip(*launches, strict=True):
            check_one_code([run.manifest for run in side])
        return both(launches)


def from_any_folder(arguments: Sequence[str], settings: Settings) -> list[str]:
    """`bench.run` arguments that name the current folder's files from any folder, so from both sides'."""
    whole = list(arguments)
    config: Path | None = run_parser().parse_args(whole).config
    if config is not None:
        whole += ["--config", str(config.absolute())]
    if settings.data not in ("device", "host"):
        whole += ["--data", str(Path(settings.data).absolute())]
    return whole


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
                if failed == [0] and not has_own_bench and sides[0].returncode == ExitCode.USAGE:
                    _await_begin(sides[1], outs[1])
                if failed and not has_own_bench:  # else the other one shows whether both fail alike
                    break
        finally:
            end_all(sides, within_s=END_S)
    if failed:
        code = sides[failed[0]].returncode
        kind = NotMeasuredError if code == ExitCode.NOT_MEASURED else UsageError
        said = logs[failed[0]].read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        last = said[-1].removeprefix(f"{speaker('run')}: error: ")
        if failed == [0] and code == ExitCode.USAGE and not has_own_bench and has_begun(outs[1]):
            raise NothingToCompareError(
                f"the baseline has no such workload or option ({last}); --allow-new passes what is new"
            )
        error = kind(f"the {checkouts[failed[0]].name} side ended with status {code}: {last}")
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


def has_begun(out: Path) -> bool:
    """Return whether a run has got as far as to write its manifest."""
    with contextlib.suppress(OSError):
        return (out / MANIFEST).stat().st_size > 0
    return False


def _await_begin(run: subprocess.Popen[str], out: Path) -> None:
    """Wait until the candidate has begun, or ended too: then the mistake is in what both were asked for."""
    while run.poll() is None and not has_begun(out):
        time.sleep(RUN_POLL_S)


def _other_format(error: UsageError) -> NotComparableError:
    return NotComparableError(f"other format: {error}; take a later commit as the baseline")
