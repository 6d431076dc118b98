"""Brings the files of a run that broke off up to date and builds its report, without its ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ddp_bench.bench.cli import speaker
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.manifest import Timing
from ddp_bench.bench.results.journal import JOURNAL, read
from ddp_bench.bench.results.recorder import Recorder, resume_command
from ddp_bench.bench.results.store import FolderLock

STOPPED_BY_ERROR = "stopped by an error"
"""Why a run ended that said itself what was wrong: nothing more is printed then."""


@dataclass(frozen=True)
class Finished:
    """What a run that broke off leaves: cases by whether they were measured, and its page."""

    num_measured: int
    num_cases: int
    page: Path | None


def finish(folder: Path, because: str, *, lock: FolderLock | None = None) -> Finished | None:
    """Bring every file of a broken-off run up to date and build its report; None where nothing is to be done.

    `lock` is the caller's own. Raises UsageError where the folder is in use or cannot be written.
    """
    if not os.path.lexists(folder / JOURNAL):
        return None
    held = lock or FolderLock(folder)
    try:
        if read(folder).ended:
            return None
        recorder = Recorder.reopen(folder)
        recorder.tell(timing=timing_of(recorder, recorder.elapsed_s, because))
        measured = recorder.cases["images_per_s"].notna().sum()
        recorder.close(because)
        return Finished(int(measured), len(recorder.cases), _page(folder))
    finally:
        if lock is None:
            held.release()


def timing_of(recorder: Recorder, measuring_s: float, because: str) -> Timing:
    """The time of a run that ended `because`, with what is known of it by then."""
    return msgspec.structs.replace(
        recorder.manifest.timing,
        measuring_s=round(measuring_s, 2),
        timed_steps_s=round(recorder.timed_s, 2),
        rounds=recorder.rounds,
        stopped_because=because,
    )


def _page(folder: Path) -> Path | None:
    # The report is a separate package that never imports torch; only a finished run reaches for it.
    from ddp_bench.report.build import build

    try:
        return build([folder], folder / "report.html")
    except UsageError as error:
        print(f"{speaker()}: no report: {error}", file=sys.stderr)
        return None


def finish_quietly(folder: Path, because: str, *, lock: FolderLock | None = None) -> None:
    """`finish` after an error that has been told, which may be that the folder cannot be written."""
    with contextlib.suppress(UsageError):
        finish(folder, because, lock=lock)


def finish_and_say(folder: Path, because: str, *, lock: FolderLock | None = None) -> None:
    """`finish`, and tell on stderr what is kept and how to go on; never raises for a folder in a bad way."""
    try:
        finished = finish(folder, because, lock=lock)
    except UsageError as error:
        print(f"{speaker()}: error: {error}", file=sys.stderr)
        return
    if finished is not None:
        print(
            f"{speaker()}: {because}; {finished.num_measured} of {finished.num_cases} cases have results in "
            f"{folder}\n"
            f"{speaker()}: to finish the rest: {resume_command(folder)}",
            file=sys.stderr,
            flush=True,
        )
