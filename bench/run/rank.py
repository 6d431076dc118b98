"""One rank from start to end: it meets the others, opens the results folder, measures, ends well or badly."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from ddp_bench.bench import github
from ddp_bench.bench.cli import speaker, to_json
from ddp_bench.bench.cluster.devices import SeenGpus, this_machine
from ddp_bench.bench.cluster.meeting import host_name
from ddp_bench.bench.cluster.process import is_first
from ddp_bench.bench.cluster.ranks import (
    Cluster,
    HostHello,
    PeerLostError,
    check_alike,
    described_host,
    gpus_by_rank,
)
from ddp_bench.bench.console import Console
from ddp_bench.bench.errors import ExitCode, UsageError, UserCodeError
from ddp_bench.bench.findings.findings import conclude
from ddp_bench.bench.findings.notes import why_not_measured
from ddp_bench.bench.manifest import FirstHost, RankPlace
from ddp_bench.bench.measure.calibration import trainable
from ddp_bench.bench.measure.clock import float32_precision
from ddp_bench.bench.predict.bound import bound
from ddp_bench.bench.predict.calibration import load_calibration
from ddp_bench.bench.predict.from_pass import write_calibration
from ddp_bench.bench.recovery.close import STOPPED_BY_ERROR, finish, finish_and_say, finish_quietly, timing_of
from ddp_bench.bench.recovery.failures import (
    FAILURE_ENV,
    RESTART_EXIT_CODE,
    STARTED_ENV,
    Failure,
    oom_kills,
)
from ddp_bench.bench.recovery.lockstep import RestartError
from ddp_bench.bench.recovery.reopen import (
    Opened,
    Progress,
    RankHello,
    check_same,
    fail_case,
    open_run,
    resumable_manifest,
)
from ddp_bench.bench.recovery.watchdog import START_LIMIT_S, die_at_once, meet_and_watch, on_stop
from ddp_bench.bench.run.job import Job, new_manifest
from ddp_bench.bench.run.session import Session
from ddp_bench.bench.run.summary import print_not_measured, print_summary, summary_of
from ddp_bench.bench.settings import Settings

PEER_GRACE_S = 3.0
"""A rank that lost another waits so long: the launcher, which sees who died, ends it sooner."""

LOCK_WAIT_S = 2.0
"""So long may the main thread finish a write before another thread ends the process."""


class Rank:
    """A rank of `job`; rank 0 also writes the results and the summary."""

    def __init__(
        self,
        job: Job,
        arguments: Sequence[str],
        *,
        resume: Path | None,
        quiet: bool,
        as_json: bool,
    ) -> None:
        self._job = job
        self._arguments = arguments
        self._resume = resume
        self._quiet = quiet
        self._as_json = as_json
        self._first = is_first()
        self._opened: Opened | None = None
        self._ending = threading.Lock()

    def run(self) -> int:
        """Measure; the exit code. Raises UsageError for what a user can mend before anything is measured."""
        # Where bench.run started the ranks, it brings the files up to date; elsewhere the first rank does.
        die_at_once()
        try:
            return self._run()
        except PeerLostError:
            time.sleep(PEER_GRACE_S)
            self._lost(None)
            return RESTART_EXIT_CODE
        except UsageError as error:
            if self._opened is None:
                raise
            if isinstance(error, UserCodeError):
                traceback.print_exception(error.__cause__)
            print(f"{speaker()}: error: {error}", file=sys.stderr)
            finish_quietly(self._opened.recorder.folder, STOPPED_BY_ERROR, lock=self._opened.lock)
            # Not through the interpreter's end: it would wait for ranks that wait for this one.
            os._exit(ExitCode.USAGE)

    def _run(self) -> int:
        job = self._job
        cluster = Cluster(job.machine.device_type, bind_cores=job.binds_cores)
        startup = _Startup()
        watchdog = meet_and_watch()
        watchdog.report_to(self._lost)
        watchdog.arm("start-up", START_LIMIT_S)
        infos = cluster.gather(cluster.info())
        seen = gpus_by_rank(job.machine.device_type)
        hosts = cluster.gather(_host(job.settings, cluster, seen))
        check_alike(hosts)
        hellos = cluster.gather(_hello())
        console = Console(silent=self._quiet or not self._first)
        if self._first:
            self._open(infos, hellos, [host.machine for host in hosts if host is not None])
        opened = self._opened
        earlier: Progress = cluster.from_first(opened.progress if opened else None)
        for note in earlier.notes:
            console.note(note)
        watchdog.report_to(self._lost, opened.recorder.folder if opened else None)
        if opened is not None and STARTED_ENV not in os.environ:
            on_stop(self._stopped)
        startup.over()
        session = Session(
            cluster=cluster,
            job=job,
            infos=infos,
            recorder=opened.recorder if opened else None,
            console=console,
            watchdog=watchdog,
            earlier=earlier,
        )
        stopped_because = self._measured(session, cluster)
        watchdog.close()
        cluster.close()
        if opened is None:
            return ExitCode.OK
        return _conclude(job, opened, stopped_because, startup, quiet=self._quiet, as_json=self._as_json)

    def _open(
        self,
        infos: Sequence[RankPlace],
        hellos: Sequence[RankHello],
        machines: Sequence[FirstHost],
    ) -> None:
        manifest = new_manifest(self._job, self._arguments, infos, machines)
        if self._resume is not None:
            check_same(self._resume, resumable_manifest(self._resume), manifest)
        self._opened = open_run(self._job.settings, self._job.plan, manifest, hellos, resume=self._resume)

    def _measured(self, session: Session, cluster: Cluster) -> str:
        """Measure; why that ended. Where all ranks have to start again they end, the first one first."""
        try:
            with float32_precision(self._job.settings.precision, cluster.place.device):
                return session.run()
        except RestartError:
            if not self._first:
                # Fails once the first rank has gone: a launcher that saw this one end would end it too early.
                cluster.barrier()
            self._lost(None, because="the ranks have to start again")
            raise

    def _lost(self, failure: Failure | None, *, because: str = "a rank was lost") -> None:
        """Write down what ended this attempt, on any thread, and end; only another attempt can go on."""
        self._ending.acquire()  # never released: a second thread waits here for the end
        opened = self._opened
        state = opened.recorder.journal.state if opened is not None else None
        index = state.under_way.index if state and state.under_way else None
        if failure is not None and failure.status and index is None:
            print(f"{speaker()}: error: {failure.reason}", file=sys.stderr, flush=True)
        if opened is not None and opened.recorder.lock.acquire(timeout=LOCK_WAIT_S):
            with contextlib.suppress(UsageError):
                if failure is not None and failure.status and index is not None:
                    print(fail_case(opened.recorder, index, failure), file=sys.stderr, flush=True)
                if STARTED_ENV not in os.environ or (failure is not None and not failure.status):
                    # A launcher that starts the ranks again goes on in the folder.
                    close = finish_and_say if failure is None else finish
                    close(opened.recorder.folder, because, lock=opened.lock)
        os._exit(RESTART_EXIT_CODE)

    def _stopped(self) -> None:
        """Bring the files up to date on a signal, on a thread of its own; the main thread writes no more."""
        assert self._opened is not None  # set before signals are heard
        self._opened.recorder.lock.acquire(timeout=LOCK_WAIT_S)
        finish_and_say(self._opened.recorder.folder, "interrupted", lock=self._opened.lock)
        os._exit(ExitCode.INTERRUPTED)


class _Startup:
    """How long it took until the first case, on the monotonic clock."""

    def __init__(self) -> None:
        age_s = time.time() - psutil.Process().create_time()
        began_s = os.environ.get(STARTED_ENV)
        self._began_s = float(began_s or time.monotonic() - age_s)
        self.seconds = 0.0
        self._over_s = 0.0

    def over(self) -> None:
        """The first case begins."""
        self._over_s = time.monotonic()
        self.seconds = self._over_s - self._began_s

    def since_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._over_s


def _host(settings: Settings, cluster: Cluster, seen: Sequence[SeenGpus]) -> HostHello | None:
    if cluster.local_rank != 0:
        return None  # the first rank of a host speaks for it
    device = cluster.info().device_name
    here = this_machine(seen)
    return described_host(here, settings, device=device, num_local_ranks=cluster.local_world_size)


def _hello() -> RankHello:
    failure = json.loads(os.environ.get(FAILURE_ENV, "{}"))
    return RankHello(host_name(), {int(rank): int(code) for rank, code in failure.items()}, oom_kills())


def _conclude(
    job: Job, opened: Opened, stopped_because: str, startup: _Startup, *, quiet: bool, as_json: bool
) -> int:
    """Write what a run that came to its end leaves, and say what was found; the exit code."""
    recorder, before_s = opened.recorder, opened.progress.elapsed_s
    cases = recorder.write()
    folder = recorder.folder
    timing = msgspec.structs.replace(
        timing_of(recorder, before_s + startup.since_s(), stopped_because),
        startup_s=round(startup.seconds, 2),
    )
    recorder.tell(timing=timing)
    missing = write_calibration(folder, trainable(job.workload)) if job.settings.calibrate else None
    if missing is not None:
        print(f"{speaker()}: {missing}", file=sys.stderr)
    # The report is a separate package that never imports torch; only a finished run reaches for it.
    from ddp_bench.report.build import build, write_markdown

    page = build([folder], folder / "report.html")
    after_startup_s = before_s + startup.since_s()
    timing = msgspec.structs.replace(
        timing,
        total_s=round(startup.seconds + after_startup_s, 2),
        timed_share_pct=round(100 * recorder.timed_s / after_startup_s, 1),
    )
    recorder.tell(timing=timing)
    blocks = recorder.blocks()
    conclusion = conclude(folder, recorder.manifest, cases, blocks, recorder.comparisons)
    if job.settings.calibrate and missing is None:
        found = (*conclusion.found, bound(load_calibration(folder)))
        conclusion = replace(conclusion, found=found)
    if as_json:
        print(to_json(summary_of(folder, cases, conclusion, timing)))
    elif not quiet:
        print_summary(cases, conclusion, timing, page)
    recorder.close(stopped_because)
    missing_modes = why_not_measured(cases, job.settings.modes)
    if not quiet:
        wrong = [github.Annotation("error", speaker(), reason) for reason in missing_modes]
        github.show(wrong, lambda: write_markdown([folder], None))
    if missing_modes:
        print_not_measured(folder, missing_modes)
    return ExitCode.NOT_MEASURED if missing_modes else ExitCode.OK
