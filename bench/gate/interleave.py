"""Measures two checkouts, or two environments, in turns on one machine: the strongest comparison there is.

Each is an ordinary `bench.run` of its own code and interpreter; a turn server lets one of them compute at a
time, in random order, so that a slow minute of the machine meets both.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.cluster.process import end_all, ended_with_us, huge_pages_env, uninterrupted
from bench.cluster.scratch import PREFIX, locks, scratch_folder
from bench.cluster.turns import turn_server
from bench.errors import ExitCode, NotMeasuredError, UsageError

HERE = Path(__file__).resolve().parents[2]
"""This checkout."""

GIT_TIMEOUT_S = 60

END_S = 60.0
"""How long an interrupted run may take to write its summary; one that has hung would take for ever."""


@dataclass(frozen=True)
class Checkout:
    """Code and interpreter of one side of the comparison."""

    name: str
    folder: Path
    python: str


def measure_in_turns(
    checkouts: Sequence[Checkout], arguments: Sequence[str], folder: Path, *, seed: int = 0
) -> list[Path]:
    """Run `bench.run arguments` of all checkouts in turns; their results folders, in that order.

    Whatever is raised meanwhile, such as by a signal's handler, first ends the runs. Raises UsageError with
    the last line that a run said if it fails, NotMeasuredError where it could not measure what was asked for.
    """
    outs = [folder / checkout.name for checkout in checkouts]
    runs: list[subprocess.Popen[str]] = []
    with turn_server(len(checkouts), seed) as server, ThreadPoolExecutor(len(checkouts)) as reading:

        def ended(run: subprocess.Popen[str]) -> str:
            said = run.communicate()[1]
            server.client_left()  # one that failed at its start would be waited for
            return said

        try:
            for checkout, out in zip(checkouts, outs, strict=True):
                whole = [*arguments, "--quiet", "--out", str(out.absolute())]
                with uninterrupted():
                    runs.append(_start(checkout, whole, server.environment))
            accounts = list(reading.map(ended, runs))
        finally:
            end_all(runs, within_s=END_S)
    for checkout, run, account in zip(checkouts, runs, accounts, strict=True):
        if run.returncode != 0:
            last = (account.strip().splitlines() or ["it said nothing"])[-1]
            measured_nothing = run.returncode == ExitCode.NOT_MEASURED
            error = NotMeasuredError if measured_nothing else UsageError
            raise error(f"the {checkout.name} side ended with status {run.returncode}: {last}")
    if server.turns == 0:
        raise UsageError("the two sides did not take turns; the older one may know nothing of them yet")
    return outs


def _start(
    checkout: Checkout, arguments: Sequence[str], environment: dict[str, str]
) -> subprocess.Popen[str]:
    if shutil.which(checkout.python) is None:
        raise UsageError(
            f"{checkout.python} cannot be started: it is missing or no program; name a Python interpreter "
            "with --python"
        )
    return subprocess.Popen(
        ended_with_us([checkout.python, "-m", "bench.run", *arguments]),
        cwd=checkout.folder,
        env={**os.environ, **huge_pages_env(os.environ), **environment},
        pass_fds=locks(),  # if this process is killed, the run still needs its checkout to come to its end
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def checkout_of(reference: str) -> Iterator[Path]:
    """The project at a git reference, in a worktree of its own that is gone afterwards.

    `.` is this checkout as it stands. Raises UsageError where git does not know the reference.
    """
    if reference == ".":
        yield HERE
        return
    _git("rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}", why=f"git knows no {reference!r}")
    with scratch_folder() as folder:
        # What a gate that was killed had checked out has just gone, but git still knows of it.
        _forget_lost_worktrees()
        place = folder / "checkout"
        try:
            # A git that is ended in the middle leaves a worktree that it takes for locked.
            with uninterrupted():
                _git("worktree", "add", "--detach", str(place), reference, why="git cannot check it out")
            yield place
        finally:
            _remove_worktree(place)


def _forget_lost_worktrees() -> None:
    """Let git forget the worktrees of gates that were killed; other lost ones are not ours to forget."""
    with contextlib.suppress(UsageError):
        known = _git("worktree", "list", "--porcelain", why="git cannot list its worktrees")
        for place in (Path(path) for path in re.findall(r"^worktree (.+)$", known, re.MULTILINE)):
            if place.parent.name.startswith(PREFIX) and not place.exists():
                _remove_worktree(place)


def _remove_worktree(place: Path) -> None:
    # Twice: one that git was ended in the middle of making is locked.
    with contextlib.suppress(UsageError):
        _git("worktree", "remove", "--force", "--force", str(place), why="git cannot remove its worktree")


def _git(*arguments: str, why: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=HERE, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"--interleave: git cannot be run here: {error}") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"--interleave: {why}: {said}; name a commit, a branch or a tag")
    return done.stdout


def both_checkouts(baseline: Path, baseline_python: str | None) -> list[Checkout]:
    """Baseline and candidate: the candidate is this checkout under this interpreter."""
    python = baseline_python or sys.executable
    if os.sep in python:
        python = str(Path(python).absolute())  # the runs start in another folder
    return [Checkout("baseline", baseline, python), Checkout("candidate", HERE, sys.executable)]
