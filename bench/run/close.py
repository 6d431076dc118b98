"""The end of a run: its files, its page, and what is said; also of one that broke off, without ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..common.cli import get_message_prefix, print_message
from ..common.console import Annotation, show_on_github
from ..common.errors import ExitCode, UsageError
from ..common.text import to_json
from ..common.turns import is_later_launch
from ..findings.findings import conclude_run, summarize_run
from ..findings.notes import explain_not_measured
from ..predict.from_pass import write_calibration
from ..results.case_result import read_case_results
from ..results.commands import write_resume_command
from ..results.journal import JOURNAL, read
from ..results.recorder import Recorder
from ..results.run_folder import FAILURES, format_path
from ..results.store import load_tables
from .job import Job

STOPPED_BY_ERROR = "stopped by an error"
"""Why a run ended that said itself what was wrong: nothing more is printed then."""

WIDTH = 100
"""Columns of what is printed where no terminal tells its own."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The way to carry out a run, not what is measured."""

    arguments: Sequence[str] = ()
    """The command line."""
    resume: Path | None = None
    quiet: bool = False
    as_json: bool = False


def close_run(
    recorder: Recorder, job: Job, how: RunOptions, *, total_s: float, measuring_s: float, because: str
) -> int:
    """Write what a run that came to its end leaves, and say what was found; the exit code.

    `measuring_s` of the `total_s` that all its attempts took were rounds.
    """
    folder = recorder.folder
    _write_files(
        recorder,
        measuring_s,
        because,
        startup_s=round(total_s - measuring_s, 2),
        total_s=round(total_s, 2),
        timed_share_pct=round(100 * recorder.times.fitted_s / max(measuring_s, recorder.times.fitted_s), 1),
    )
    if job.settings.calibrate and (missing := write_calibration(folder, list(job.inspected.parameters))):
        print_message(missing)
    missing_modes = explain_not_measured(read_case_results(recorder.tables.cases), job.settings.modes)
    # A later launch of a gate has no page: the gate's own is of all launches.
    has_page = is_later_launch() or _show_run(folder, how, missing_modes)
    recorder.close(because)
    if missing_modes and (folder / FAILURES).is_dir():
        print_message(f"tracebacks of all ranks: {format_path(folder / FAILURES)}")
    for why in missing_modes:
        print_message(f"error: {why}")
    return ExitCode.NOT_MEASURED if missing_modes else ExitCode.OK if has_page else ExitCode.USAGE


def _show_run(folder: Path, how: RunOptions, missing_modes: Sequence[str]) -> bool:
    """Write the page of a run, and print what was found; False where the page cannot be written.

    `missing_modes` says why modes were not measured.
    """
    # What reports never imports torch; only a finished run reaches for it.
    from ...report.build import build_page, write_page
    from ..page.render import render_markdown
    from ..page.terminal import print_page

    run = load_tables(folder)
    conclusion = conclude_run(run)
    page = build_page(run, folder, conclusion=conclusion)
    place = write_page(folder, page)
    if how.as_json:
        print(to_json(summarize_run(run, conclusion)))
    elif not how.quiet:
        print_page(page, place=str(place or ""), piped_width=WIDTH)
        wrong = [Annotation("error", get_message_prefix(), why) for why in missing_modes]
        show_on_github(wrong, lambda: render_markdown(page).rstrip("\n"))
    return place is not None


def close_broken_run(folder: Path, because: str) -> None:
    """Bring every file of a broken-off run up to date, build its page, and tell on stderr what is kept.

    Never raises for a folder in a bad way.
    """
    try:
        if not os.path.lexists(folder / JOURNAL) or read(folder).ended:
            return
        recorder = Recorder.reopen(folder)
        _write_files(recorder, recorder.times.rounds_s, because)
        rates = recorder.tables.cases["images_per_s"]
        recorder.close(because)
        from ...report.build import write_page

        write_page(folder)
    except UsageError as error:
        if because != STOPPED_BY_ERROR:  # the error that stopped the run, such as a full disk, has been told
            print_message(f"error: {error}")
        return
    if because != STOPPED_BY_ERROR:
        print_message(f"{because}; {rates.count()} of {len(rates)} cases have results in {folder}")
        print_message(f"to finish the rest: {write_resume_command(recorder.manifest, folder)}")


def _write_files(recorder: Recorder, measuring_s: float, because: str, **known: float) -> None:
    """Write the tables of a run that ended `because`, and the time that it took."""
    recorder.write()
    timing = msgspec.structs.replace(
        recorder.manifest.timing,
        measuring_s=round(measuring_s, 2),
        rounds=recorder.rounds,
        stopped_because=because,
        **known,
    )
    recorder.update_manifest(timing=timing)
