"""The sides of an interleaved gate before anything is timed: what was asked for, every check, the plan."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.cli import get_message_prefix
from ..common.console import Console, format_s
from ..common.errors import ExitCode, NothingToCompareError, NotMeasuredError, UsageError
from ..common.numbers import format_count
from ..common.process import end_all, hold_signals, yield_exit_codes
from ..common.scratch import make_scratch_folder
from ..common.text import format_list
from ..common.turns import VARIABLES_ENV
from ..plan.settings import Settings
from ..run.main import make_parser as run_parser
from ..run.main import parse_settings
from .checkouts import WORKING_TREE, Checkout, check_out_both
from .preflight import check_evidence, check_interpreter, check_variables

END_TIMEOUT_S = 60.0
"""Seconds that an interrupted run may take to write its summary; one that has hung would take for ever."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The comparison that an interleaved gate was asked to make."""

    reference: str
    """The git reference of the baseline."""
    arguments: Sequence[str]
    """Those of `bench.run`, for both sides."""
    looks: Sequence[int]
    """The numbers of launches after which the gate may end."""
    python: str | None = None
    """The baseline's interpreter; None for this one."""
    environments: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    """Variables of the baseline and of the candidate alone."""
    max_time_s: float = math.inf
    """Seconds within which the last launch is to end."""


@dataclass(frozen=True)
class GatePlan:
    """The measurement of a gate, as both sides plan it before anything is timed."""

    cases: tuple[str, ...]
    torch: Mapping[str, str]
    """Version of torch by side; a baseline of another ddp-bench is not asked."""
    launch_s: float
    """Seconds that a launch of both sides is expected to take."""

    def describe_time(self, asked: Request, spent_s: float = 0.0) -> list[str]:
        """Say how long the gate takes to its first and last look, and whether `--max-time` has that."""
        each_s, first, left_s = self.launch_s, asked.looks[0], max(asked.max_time_s - spent_s, 0.0)
        most_s = max(left_s, each_s)  # the first launch is made in any case
        ends = dict.fromkeys(format_s(min(each_s * look, most_s)) for look in (first, asked.looks[-1]))
        lines = [f"expected time: about {' to '.join(ends)}, at {format_s(each_s)} a launch"]
        if each_s * first > left_s:
            room = int(left_s / each_s)
            end = "will be undecided" if room < 2 else "may well be undecided"
            lines.append(
                f"--max-time {format_s(asked.max_time_s)} has room for {room} of at least {first} launches: "
                f"the result {end}; {first} take about {math.ceil(each_s * first / 60)} min"
            )
        return lines

    def describe_plan(self, asked: Request, sides: Sequence[Checkout]) -> list[str]:
        """Say what the gate compares and measures, and how long that takes; a line each."""
        found = []
        for side, variables in zip(sides, asked.environments, strict=True):
            is_other = side.name == "baseline" and asked.reference != WORKING_TREE
            code = f"git reference {asked.reference}" if is_other else "the code as it stands"
            torch = f", torch {self.torch[side.name]}" if side.name in self.torch else ""
            more = "".join(f", {name}={value}" for name, value in variables.items())
            found.append(f"{side.name}: {code}, {side.python}{torch}{more}")
        ends = " or ".join(map(str, asked.looks))
        early = ", as soon as they decide" if len(asked.looks) > 1 else ""
        found.append(f"{format_count(len(self.cases), 'case')} a side: {format_list(self.cases, 20)}")
        found.append(f"The gate launches both sides anew {ends} times{early}.")
        return [*found, *(f"{line[0].upper()}{line[1:]}." for line in self.describe_time(asked))]


@contextlib.contextmanager
def check_out_sides(
    asked: Request, console: Console
) -> Iterator[tuple[tuple[Checkout, Checkout], list[str], GatePlan]]:
    """Yield both sides, the arguments of their runs and their plan, once every check has passed.

    Raises UsageError for a mistake, before anything is timed.
    """
    settings = parse_settings(
        add_preset(asked.arguments), decided=("resume", "dry_run", "json", "out", "race")
    )
    check_evidence(settings, asked.looks)
    check_variables(settings, asked.environments)
    arguments = make_paths_absolute(add_preset(asked.arguments), settings)
    with check_out_both(asked.reference, settings, asked.python) as (baseline, candidate):
        check_interpreter(baseline)
        ours, theirs = asked.environments
        names = {VARIABLES_ENV: " ".join({**ours, **theirs})}
        sides = baseline.add_variables({**ours, **names}), candidate.add_variables({**theirs, **names})
        console.show_progress("the workload on both sides", 0.0, "checking")
        yield sides, arguments, check_sides(sides, arguments)


def add_preset(arguments: Sequence[str]) -> list[str]:
    """Return `bench.run` arguments that take the gate's preset unless they name another."""
    named = run_parser().parse_args(list(arguments)).preset
    return [*(() if named else ("--preset", "gate")), *arguments]


def make_paths_absolute(arguments: Sequence[str], settings: Settings) -> list[str]:
    """`bench.run` arguments that name the current folder's files from any folder, so from both sides'."""
    whole = list(arguments)
    config: Path | None = run_parser().parse_args(whole).config
    if config is not None:
        whole += ["--config", str(config.absolute())]
    if settings.data not in ("device", "host"):
        whole += ["--data", str(Path(settings.data).absolute())]
    return whole


def check_sides(checkouts: Sequence[Checkout], arguments: Sequence[str]) -> GatePlan:
    """Have both sides load the workload and plan `bench.run arguments` at once; no case is timed.

    Raises NothingToCompareError where the baseline alone has no such workload or option, UsageError or
    NotMeasuredError where a side fails.
    """
    # The plan of a baseline with a ddp-bench of its own may have another form.
    asked = [one for one in checkouts if one.name == "candidate" or not one.has_own_bench]
    begun_s, runs = time.monotonic(), list[subprocess.Popen[str]]()
    with make_scratch_folder() as folder:
        files = [(folder / f"{one.name}.txt", folder / f"{one.name}.json") for one in asked]
        try:
            for checkout, (log, plan) in zip(asked, files, strict=True):
                with hold_signals():
                    runs.append(checkout.start([*arguments, "--dry-run", "--json"], log, {}, plan))
            for _ in yield_exit_codes(runs):
                pass
        finally:
            end_all(runs, within_s=END_TIMEOUT_S)
        codes = [run.returncode for run in runs]
        if codes == [ExitCode.USAGE, ExitCode.OK]:
            raise NothingToCompareError(
                f"the baseline has no such workload or option ({read_last_line(files[0][0])}); "
                "--allow-new passes what is new"
            )
        for checkout, code, (log, _) in zip(asked, codes, files, strict=True):
            if code:
                raise make_failure(checkout, code, log)
        plans = {one.name: read_plan(one.name, file) for one, (_, file) in zip(asked, files, strict=True)}
    # Both sides start at once; then one has its rounds while the other waits.
    starting_s = time.monotonic() - begun_s + max(one["startup_s"] for one in plans.values())
    return GatePlan(
        cases=tuple(plans["candidate"]["cases"]),
        torch={name: one["versions"].get("torch", "unknown") for name, one in plans.items()},
        launch_s=starting_s + 2 * min(one["rounds_s"] for one in plans.values()),
    )


def read_plan(name: str, file: Path) -> dict[str, Any]:
    """Read the plan that a side printed. Raises UsageError where its output holds something else, too."""
    text = file.read_text(errors="replace")
    try:
        plan: dict[str, Any] = json.loads(text)
    except ValueError:
        began = text.strip().partition("\n")[0][:80]
        raise UsageError(
            f"the {name} side printed something beside its plan, from {began!r} on; let site hooks and the "
            "workload print to stderr"
        ) from None
    return plan


def read_last_line(log: Path) -> str:
    """Return the last line that a run wrote to its log, without the name of its command."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    return lines[-1].removeprefix(f"{get_message_prefix('run')}: error: ")


def make_failure(checkout: Checkout, code: int, log: Path) -> UsageError:
    """Return the error of a side that ended with `code`."""
    kind = NotMeasuredError if code == ExitCode.NOT_MEASURED else UsageError
    return kind(f"the {checkout.name} side ended with status {code}: {read_last_line(log)}")
