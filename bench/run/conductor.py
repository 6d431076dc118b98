"""The conductor of a run: has it resolved, opens its folder, measures, and goes on where workers are lost.

One process decides, keeps time and writes; it imports no torch. On one machine it is the command itself.
Under torchrun or srun it is the first rank's process, and that rank a child of it; there a lost worker ends
the attempt, for another process has to start it again.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from ..common.cli import get_message_prefix, print_message
from ..common.console import Console
from ..common.errors import ExitCode, UsageError
from ..common.process import ignore_signals, raise_on_signals
from ..common.text import escape_controls, format_list
from ..common.turns import get_interleaved_id
from ..machine.launch import read_parent_command, write_launched_command
from ..machine.load import read_load_average
from ..machine.manifest import Manifest
from ..machine.provenance import describe_run
from ..plan import sweep as plan
from ..plan.case import Case
from ..plan.settings import Settings
from ..results.recorder import Recorder
from ..results.store import read_manifest
from ..worker import messages as m
from ..worker.facts import Begun, Gpus
from .close import STOPPED_BY_ERROR, RunOptions, close_broken_run, close_run
from .failures import (
    MAX_IDLE_ATTEMPTS,
    START_TIMEOUT_S,
    Failure,
    RestartError,
    compute_progress,
    is_stuck,
)
from .job import Job, plan_on_workers
from .open_folder import assign_fault, begin_attempt, check_same, open_run
from .rounds import Rounds
from .workers import Workers


class Conductor:
    """Conducts a run of what was `asked` for on `workers`."""

    def __init__(self, asked: Settings, how: RunOptions, workers: Workers, *, began_s: float) -> None:
        """Know what is to be done; `began_s` is when the command began, on the monotonic clock."""
        self._asked = asked
        self._how = how
        self._workers = workers
        self._began_s = began_s
        self._load_before = read_load_average()
        self._job: Job | None = None
        """Job as the first attempt has found it."""
        self._recorder: Recorder | None = None
        self._console = Console(silent=how.quiet)
        self._startup_s: float | None = None

    def run(self) -> int:
        """Measure; the exit code. Raises UsageError for what a user can mend before anything is measured."""
        try:
            with raise_on_signals():
                return self._run_attempts()
        except KeyboardInterrupt:
            ignore_signals()
            return self._handle_interrupt()
        except UsageError as error:
            if self._recorder is None:
                raise
            return self._close_files(STOPPED_BY_ERROR, error.exit_code, f"{error.label}: {error}")

    def _run_attempts(self) -> int:
        progress: list[tuple[int, ...]] = [self._read_progress()]
        while True:
            try:
                code = self._run_attempt()
            except RestartError as lost:
                self._console.hide_progress()
                if self._workers.launched is not None:
                    return self._leave_to_launcher(lost)
                self._write_down(lost.failure)
                self._workers.end_at_once()
                if self._workers.stuck:  # it may go on to compute, beside what would be measured
                    return self._close_files("a process does not end", ExitCode.NOT_MEASURED)
                progress.append(self._read_progress())
                if is_stuck(progress):
                    why = lost.failure.reason if lost.failure else "the workers cannot go on"
                    said = f"error: gave up: {why}, {MAX_IDLE_ATTEMPTS} times in a row"
                    return self._close_files("the ranks died", ExitCode.NOT_MEASURED, said)
            else:
                self._workers.end()
                return code

    def _run_attempt(self) -> int:
        workers = self._workers
        job = self._job = self._job or plan_on_workers(workers, self._asked)
        begun = self._start(job)
        recorder = self._open_recorder(job, begun)
        if self._startup_s is None:
            self._startup_s = round(time.monotonic() - self._began_s, 2)
        rounds = Rounds(workers, job.settings, job.plan, begun, recorder, self._console)
        because = rounds.run()
        total_s, measuring_s = self._startup_s + rounds.get_elapsed_s(), rounds.get_measuring_s()
        return close_run(recorder, job, self._how, total_s=total_s, measuring_s=measuring_s, because=because)

    def _start(self, job: Job) -> list[Begun]:
        workers = self._workers
        workers.open()
        workers.grow(plan.count_ranks(job.plan))
        run = [p.case for p in job.plan if p.skip_reason is None]
        kinds = {(case.mode, case.num_devices, case.backend): case for case in run}
        begun = begin_ranks(workers, job, [*kinds.values()], len(workers))
        check_alike(begun)
        return begun

    def _open_recorder(self, job: Job, begun: Sequence[Begun]) -> Recorder:
        """Open the record of the run, whose folder is opened with the first attempt."""
        oom_kills = {one.place.host: one.oom_kills for one in begun if one.oom_kills is not None}
        if (recorder := self._recorder) is not None:
            recorder.update_manifest(restarts=recorder.manifest.restarts + 1)
            begin_attempt(recorder, oom_kills)
            return recorder
        how = self._how
        manifest = make_manifest(job, how.arguments, begun, self._load_before)
        if how.resume is not None:
            check_same(how.resume, read_manifest(how.resume), manifest)
        self._recorder, _, notes = open_run(job.settings, job.plan, manifest, oom_kills, resume=how.resume)
        for note in notes:
            self._console.print_note(note, is_fault=True)
        return self._recorder

    def _read_progress(self) -> tuple[int, ...]:
        return () if self._recorder is None else compute_progress(self._recorder.journal.state)

    def _leave_to_launcher(self, lost: RestartError) -> int:
        self._write_down(lost.failure)
        why = "a rank was lost" if lost.failure else "the ranks have to start again"
        return self._close_files(why, ExitCode.START_AGAIN)

    def _write_down(self, failure: Failure | None) -> None:
        if failure is None:
            return
        said = assign_fault(self._recorder, failure) if self._recorder else []
        for line in said or [f"{get_message_prefix()}: error: {failure.reason}"]:
            print(escape_controls(line), file=sys.stderr, flush=True)

    def _close_files(self, why: str, code: int, said: str = "") -> int:
        """Bring the files up to date where no worker goes on, before the workers are ended; the exit code."""
        ignore_signals()
        self._console.hide_progress()
        if said or self._recorder is None:
            print_message(said or "error: the ranks ended before the run began")
        # Nothing is written where another folder has come to the place of the run's.
        if self._recorder is not None and self._recorder.journal.is_in_place():
            close_broken_run(self._recorder.folder, why)
        return code

    def _handle_interrupt(self) -> int:
        """After Ctrl-C, or after a launcher's signal, which may be about a worker that has died."""
        self._console.hide_progress()
        if self._workers.launched is not None and self._workers.is_anyone_lost():
            what = "start-up"
            if self._recorder is not None and (under_way := self._recorder.journal.state.under_way):
                what = under_way.what
            return self._leave_to_launcher(self._workers.make_death_error(what))
        if self._recorder is not None:
            self._close_files("interrupted", ExitCode.INTERRUPTED)
        return ExitCode.INTERRUPTED


def begin_ranks(workers: Workers, job: Job, cases: Sequence[Case], num_ranks: int) -> list[Begun]:
    """Have the first `num_ranks` take their devices and meet, for these cases. Raises RestartError."""
    there = workers.launched
    begin = m.Begin(
        settings=job.settings,
        num_outputs=job.inspected.num_outputs,
        cases=tuple(cases),
        world_size=num_ranks,
        local_world_size=min(there.local_world_size, num_ranks) if there else num_ranks,
        meeting=workers.name,
        port=workers.store_port,
    )
    # Each is told of its own host: told of all, they would take memory with the square of their number.
    gpus: defaultdict[str, Gpus] = defaultdict(dict)
    for one in job.ranks:
        gpus[one.host] |= one.gpus
    everyone = {
        rank: msgspec.structs.replace(begin, gpus=gpus[workers.hosts[rank]]) for rank in range(num_ranks)
    }
    return [*workers.ask_workers(everyone, "start-up", START_TIMEOUT_S).values()]


def make_manifest(
    job: Job,
    arguments: Sequence[str],
    begun: Sequence[Begun],
    load_before: float | None,
) -> Manifest:
    """Describe for manifest.json a run that begins on the workers that have `begun`, by rank."""
    machines = [one.machine for one in begun if one.machine is not None]
    settings, inspected = job.settings, job.inspected
    return describe_run(
        machines,
        [one.place for one in begun],
        inspected.versions,
        name=settings.name,
        interleaved_id=get_interleaved_id(),
        command=write_launched_command(os.environ, read_parent_command(), *arguments),
        settings=settings,
        plan_hash=plan.hash_plan(job.plan),
        workload=inspected.workload,
        model=inspected.model,
        load_before=load_before,
    )


def check_alike(found: Sequence[Begun]) -> None:
    """Raise UsageError with every difference between hosts; the first rank of each speaks for it."""
    hosts = {str(one.machine.host): one.conditions for one in found if one.machine is not None}
    differences = []
    for name in dict.fromkeys(name for told in hosts.values() for name in told):
        values: dict[str, list[str]] = {}
        for host, told in hosts.items():
            values.setdefault(told.get(name, "none"), []).append(host)
        if len(values) > 1:
            differences.append(
                ", ".join(f"{format_list(h, 1)}: {name} {value}" for value, h in values.items())
            )
    if differences:
        raise UsageError(f"the hosts differ: {'; '.join(differences)}; make them alike or leave some out")
