"""Brings the files of a run that broke off up to date and builds its report, without its ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from ddp_bench.bench.cli import speaker
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.manifest import Timing
from ddp_bench.bench.results.journal import JOURNAL, read
from ddp_bench.bench.results.recorder import Recorder, resume_command

STOPPED_BY_ERROR = "stopped by an error"
"""Why a run ended that said itself what was wrong: nothing more is printed then."""


def finish(folder: Path, because: str) -> str:
    """Bring every file of a broken-off run up to date and build its report; what is kept, and how to go on.

    Empty where nothing is to be done. Raises UsageError where the folder cannot be written.
    """
    if not os.path.lexists(folder / JOURNAL) or read(folder).ended:
        return ""
    recorder = Recorder.reopen(folder)
    recorder.tell(timing=timing_of(recorder, recorder.elapsed_s, because))
    num_measured = recorder.cases["images_per_s"].notna().sum()
    recorder.close(because)
    # The report is a separate package that never imports torch; only a finished run reaches for it.
    from ddp_bench.report.build import build

    try:
        build([folder], folder / "report.html")
    except UsageError as error:
        print(f"{speaker()}: no report: {error}", file=sys.stderr)
    return (
        f"{because}; {num_measured} of {len(recorder.cases)} cases have results in {folder}\n"
        f"{speaker()}: to finish the rest: {resume_command(folder)}"
    )


def finish_and_say(folder: Path, because: str) -> None:
    """`finish`, and tell on stderr what came of it; never raises for a folder in a bad way."""
    try:
        said = finish(folder, because)
    except UsageError as error:
        said = f"error: {error}"
    if said and because != STOPPED_BY_ERROR:
        print(f"{speaker()}: {said}", file=sys.stderr, flush=True)


def timing_of(recorder: Recorder, measuring_s: float, because: str) -> Timing:
    """The time of a run that ended `because`, with what is known of it by then."""
    return msgspec.structs.replace(
        recorder.manifest.timing,
        measuring_s=round(measuring_s, 2),
        timed_steps_s=round(recorder.timed_s, 2),
        rounds=recorder.rounds,
        stopped_because=because,
    )
