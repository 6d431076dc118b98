"""Measures two checkouts, or two environments, in turns on one machine: the strongest comparison there is.

Each side is an ordinary `bench.run` of its own code and interpreter; a referee lets them compute one visit at
a time, in random order, so that a slow minute of the machine meets both.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.cluster.process import huge_pages_env
from bench.cluster.turns import refereed
from bench.errors import UsageError

GIT_TIMEOUT_S = 60


@dataclass(frozen=True)
class Side:
    """Code and interpreter of one side of the comparison."""

    name: str
    checkout: Path
    python: str


def measure_in_turns(
    sides: Sequence[Side], arguments: Sequence[str], folder: Path, *, seed: int = 0
) -> list[Path]:
    """Run `bench.run arguments` on both sides in turns; their results folders, in the order of `sides`.

    Raises UsageError with the last line of a side's own account if it fails.
    """
    outs = [folder / side.name for side in sides]
    with refereed(len(sides), seed) as referee:
        runs = [
            subprocess.Popen(
                [side.python, "-m", "bench.run", *arguments, "--quiet", "--out", str(out.absolute())],
                cwd=side.checkout,
                env={**os.environ, **huge_pages_env(os.environ), **referee.environment},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for side, out in zip(sides, outs, strict=True)
        ]

        def ended(run: subprocess.Popen[str]) -> str:
            said = run.communicate()[1]
            referee.excuse()  # a side that failed at its start would be waited for
            return said

        with ThreadPoolExecutor(len(runs)) as reading:
            try:
                accounts = list(reading.map(ended, runs))
            finally:
                for run in runs:
                    run.terminate()
    for side, run, account in zip(sides, runs, accounts, strict=True):
        if run.returncode != 0:
            last = (account.strip().splitlines() or ["it said nothing"])[-1]
            raise UsageError(f"the {side.name} side ended with status {run.returncode}: {last}")
    if referee.turns == 0:
        raise UsageError("the two sides did not take turns; the older one may know nothing of them yet")
    return outs


@contextlib.contextmanager
def checkout_of(reference: str) -> Iterator[Path]:
    """The project at a git reference, in a worktree of its own that is gone afterwards.

    `.` is this checkout as it stands. Raises UsageError where git does not know the reference.
    """
    here = Path(__file__).resolve().parents[2]
    if reference == ".":
        yield here
        return
    _git(
        here, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}", why=f"git knows no {reference!r}"
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "checkout")
        _git(here, "worktree", "add", "--detach", str(place), reference, why="git cannot check it out")
        try:
            yield place
        finally:
            _git(here, "worktree", "remove", "--force", str(place), why="git cannot remove its worktree")


def _git(where: Path, *arguments: str, why: str) -> None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=where, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"--interleave: git cannot be run here: {error}") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"--interleave: {why}: {said}; name a commit, a branch or a tag")


def sides_of(baseline_checkout: Path, baseline_python: str | None) -> list[Side]:
    """Baseline and candidate: the candidate is this checkout under this interpreter."""
    here = Path(__file__).resolve().parents[2]
    return [
        Side("baseline", baseline_checkout, baseline_python or sys.executable),
        Side("candidate", here, sys.executable),
    ]
