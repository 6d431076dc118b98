"""Opens the results folder: claimed for a new run, or reopened after a fault or for `--resume`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..common.cli import format_command, quote_word
from ..common.errors import NotComparableError, NotMeasuredError, UsageError
from ..common.process import get_host_name
from ..common.turns import PROOFS_ENV, is_later_launch
from ..findings.notes import explain_not_measured
from ..machine.conditions import Question, describe_devices, find_differences
from ..machine.launch import read_launch
from ..machine.manifest import Manifest, Resumed
from ..plan.settings import Settings
from ..plan.sweep import Planned
from ..results import store
from ..results.case_result import read_case_results
from ..results.disk import FolderLock
from ..results.journal import Attempt, Completion, Curve, Retry, Settled, UnderWay, read
from ..results.recorder import Recorder
from ..results.run_folder import claim_folder, format_path, name_default_folder, write_manifest
from ..results.store import read_manifest
from .failures import IDLE_PLACE, Failure, compute_progress, describe_exit, format_failure, is_stuck

RESUME_SETTINGS = ("rounds", "max_time", "precision_target", "case_timeout")
"""Settings that `--resume` takes anew: how long to measure, not what is measured."""

CODE = "workload"
"""The setting that names code to import: the user says it again, a folder alone is not believed."""


def open_run(
    settings: Settings,
    plan: Sequence[Planned],
    manifest: Manifest,
    oom_kills: Mapping[str, int],
    *,
    resume: Path | None,
) -> tuple[Recorder, FolderLock, list[str]]:
    """Claim a new folder, or go on in the one of this launch's earlier attempt, or in `resume`, and lock it.

    `oom_kills` are those of each host so far. The last value is what the user is told of the attempt
    before. Raises UsageError where the folder is not to be had, NotMeasuredError where restarts lead nowhere.
    """
    folder = resume or (Path(settings.out) if settings.out else None)
    earlier = _find_earlier(folder, _get_run_id())
    notes: list[str] = []
    if (there := earlier or resume) is None:
        with claim_folder(folder or name_default_folder(host=get_host_name(), name=settings.name)) as there:
            lock = FolderLock(there)
            write_manifest(there, manifest)
            recorder = Recorder.begin(plan, there)
            begin_attempt(recorder, oom_kills)
    else:
        lock = FolderLock(there)
        recorder = Recorder.reopen(there)
        _check_code(recorder, manifest)
        if earlier is not None:
            notes = _close_earlier_attempt(recorder, settings, manifest, oom_kills)
            recorder.update_manifest(restarts=recorder.manifest.restarts + 1)
        else:
            _record_resume(recorder, manifest)
        begin_attempt(recorder, oom_kills)
    return recorder, lock, notes


def _get_run_id() -> str:
    """Return the id of this launch by torchrun or srun; empty where there is none."""
    there = read_launch(os.environ)
    return there.torchelastic_run_id if there else ""


def _close_earlier_attempt(
    recorder: Recorder, settings: Settings, manifest: Manifest, oom_kills: Mapping[str, int]
) -> list[str]:
    """Settle what the attempt before has died of; what to tell the user. Raises NotMeasuredError."""
    state = recorder.journal.state
    reasons = explain_not_measured(read_case_results(recorder.tables.cases), settings.modes)
    if state.ended in tuple(Completion) and reasons:
        raise NotMeasuredError(
            f"the run has ended, and to start its ranks again changes nothing: {reasons[0]}"
        )
    before = state.attempts[-1].oom_kills
    starved = any(kills > before.get(host, kills) for host, kills in oom_kills.items())
    found = describe_exit({}, what=_get_under_way(recorder).what, out_of_memory=starved)
    notes = assign_fault(recorder, found)
    if not notes and is_stuck([*(one.progress for one in state.attempts), compute_progress(state)]):
        raise NotMeasuredError(f"gave up: {found.reason}, again and again; see the messages above")
    _check_devices(recorder.manifest, manifest)
    return notes


def find_proved(manifest: Manifest) -> dict[int, Settled]:
    """Return what an earlier launch of a gate has proved of this very plan, by place in it.

    Empty where the run takes no turns, and where plan, code or torch are not the same.
    """
    if not is_later_launch():
        return {}
    folder = Path(os.environ[PROOFS_ENV])
    with store.suppress_errors():
        earlier = read_manifest(folder)
        found = find_differences(earlier, manifest, Question.RESUME)
        alike = all(d.then == d.now for d in found if d.blocking)
        if alike and (earlier.workload, earlier.git) == (manifest.workload, manifest.git):
            return {i: one for i, one in read(folder).settled.items() if one.status == "ok"}
    return {}


def begin_attempt(recorder: Recorder, oom_kills: Mapping[str, int]) -> None:
    """Note that workers have met."""
    progress = compute_progress(recorder.journal.state)
    recorder.append_event(Attempt(run_id=_get_run_id(), progress=progress, oom_kills=dict(oom_kills)))


def _check_code(recorder: Recorder, now: Manifest) -> None:
    """Raise NotComparableError where the workload's code is another than the run began with."""
    hashes = {one.workload.code_sha256 for one in (recorder.manifest, now) if one.workload} - {None}
    if len(hashes) > 1:
        raise NotComparableError(
            f"{recorder.folder}: the workload's code has changed since the run began; start anew, or go back "
            "to the code as it was"
        )


def _find_earlier(folder: Path | None, run_id: str) -> Path | None:
    """Find the folder that an earlier attempt of this very launch has begun, if there was one."""
    there = read_launch(os.environ)
    if not run_id or (run_id == "none" and not (there and there.torchelastic_restart_count)):
        return None  # torchrun calls every run of one node "none"
    if folder is not None:
        return folder if _has_run_id(folder, run_id) else None
    others = sorted(Path("results").glob("*"), reverse=True)
    return next(
        (one for one in others if store.is_folder_of(one, os.geteuid()) and _has_run_id(one, run_id)), None
    )


def _has_run_id(folder: Path, run_id: str) -> bool:
    with store.suppress_errors():
        attempts = read(folder).attempts
        return bool(attempts) and attempts[-1].run_id == run_id
    return False


def _check_devices(then: Manifest, now: Manifest) -> None:
    """Raise NotMeasuredError where ranks that started again have other devices: a GPU is off the bus."""
    gpus = [[rank.gpu for rank in one.ranks] for one in (then, now)]
    if then.plan_hash == now.plan_hash and gpus[0] == gpus[1]:
        return
    before, after = (describe_devices(one.ranks) for one in (then, now))
    raise NotMeasuredError(
        f"gave up: started again, the ranks have other devices ({before} before, {after} now); "
        f"{format_command('doctor')}, then go on with --resume on whole hardware"
    )


def _get_under_way(recorder: Recorder) -> UnderWay:
    return recorder.journal.state.under_way or UnderWay(what="between cases")


def assign_fault(recorder: Recorder, found: Failure) -> list[str]:
    """Put a fault down to the case or curve that was under way, if any was; what to tell the user."""
    if found.was_idle:
        recorder.record_start(None, IDLE_PLACE)
    under_way = _get_under_way(recorder)
    if under_way.index is not None:
        return [fail_case(recorder, under_way.index, found)]
    if found.ranks:
        _keep_failure(recorder, "run", found, under_way.what)
    if under_way.curve is None:
        return []
    num_ranks, backend = under_way.curve
    recorder.append_event(Curve(num_ranks=num_ranks, backend=backend))
    return [f"all-reduce curve left out: {found.reason}"]


def fail_case(recorder: Recorder, index: int, found: Failure) -> str:
    """Write down why a case ends here, and what its ranks say; the sentence for the user."""
    state = recorder.journal.state
    case_id = state.plan[index].case.case_id
    what = state.under_way.what if state.under_way else ""
    kept = any(c == case_id and phase == "timed" for c, phase, _ in recorder.list_measured())
    reason = f"{found.reason}; its finished rounds are kept" if kept else found.reason
    recorder.set_outcome(index, found.status, reason, {"reason_code": found.reason_code})
    said = f"{case_id}: {found.status}: {reason}"
    if found.status == "skipped":
        return said
    return f"{said}; {_keep_failure(recorder, case_id, found, what)}"


def _keep_failure(recorder: Recorder, name: str, found: Failure, what: str) -> str:
    """Keep what ranks say of a failure in the file of a case, or of the run; the file."""
    now = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    return format_path(
        recorder.add_failure(name, format_failure(f"{now}  {name}: {found.status} in {what}", found))
    )


def _record_resume(recorder: Recorder, new: Manifest) -> None:
    """Have the cases that failed tried again, and note who goes on with what."""
    settled = recorder.journal.state.settled
    failed = [index for index, s in settled.items() if s.status in ("failed", "oom", "timeout")]
    recorder.record_start(None, "between attempts")
    recorder.append_event(Retry(indices=tuple(failed)))
    old = recorder.manifest
    utc = datetime.now(UTC).isoformat(timespec="seconds")
    again = Resumed(utc=utc, command=new.command, git=new.git)
    recorder.update_manifest(
        settings=replace(new.settings, out=old.settings.out),
        ranks=new.ranks,
        resumed=(*old.resumed, again),
    )


def read_settings(folder: Path, changes: Mapping[str, Any]) -> Settings:
    """Read the settings in a run's manifest with `changes`, parsed values by name.

    Raises UsageError where there is no run to resume, or for a change of what is measured.
    """
    read(folder)
    stored = read_manifest(folder).settings
    refused = [f"--{name.replace('_', '-')}" for name in changes if name not in (*RESUME_SETTINGS, CODE)]
    if refused:
        allowed = ", ".join(f"--{name.replace('_', '-')}" for name in RESUME_SETTINGS)
        raise UsageError(
            f"--resume takes its settings from {folder}: leave out {', '.join(refused)} (with it "
            f"go {allowed}, --quiet, --json)"
        )
    found = replace(stored, max_time=None) if "rounds" in changes else stored
    _check_workload(folder, found.workload, changes.get(CODE))
    return replace(found, **changes, out=None)


def _check_workload(folder: Path, stored: str | None, given: str | None) -> None:
    """Nothing that a folder names is imported: the user must have named it, too."""
    if stored is not None and given is None:
        raise UsageError(
            f"--resume {folder}: it trains a workload, which is code; name it again if you trust it: "
            f"--workload {quote_word(stored)}"
        )
    if stored != given:
        raise NotComparableError(
            f"--resume {folder}: not the same run: workload: then {stored or 'none'}, now {given}; go where "
            "it began, or start anew"
        )


def check_same(folder: Path, then: Manifest, now: Manifest) -> None:
    """Raise NotComparableError, with every difference, unless plan and environment are the same."""
    found = [
        f"{d.name}: then {d.then}, now {d.now}"
        for d in find_differences(then, now, Question.RESUME)
        if d.blocking
    ]
    if found:
        raise NotComparableError(
            f"--resume {folder}: not the same run: {'; '.join(found)}; go where it began, or start anew"
        )
