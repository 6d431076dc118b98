"""Starts the ranks on this machine with PyTorch's elastic agent, and again where they die."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig

from ddp_bench.bench.cli import speaker
from ddp_bench.bench.cluster.process import ignore_signals, interrupted_by_signals, rank_variables
from ddp_bench.bench.cluster.scratch import remove_abandoned
from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.package import own_command
from ddp_bench.bench.recovery.close import STOPPED_BY_ERROR, finish_and_say, finish_quietly
from ddp_bench.bench.recovery.failures import (
    FAILURE_ENV,
    MOST_IDLE_ATTEMPTS,
    STARTED_ENV,
    failure_of,
    is_restartable,
    is_stuck,
    progress_in,
)
from ddp_bench.bench.results.journal import JOURNAL, read
from ddp_bench.bench.run.agent import no_logs, run_ranks, use_loopback
from ddp_bench.bench.run.fork_server import ForkServer

RUN = own_command("run")[1:]


def launch(
    arguments: Sequence[str],
    *,
    folder: Path,
    num_ranks: int,
    device_type: str,
    began_s: float,
    program: Sequence[str] = RUN,
    forks: ForkServer | None = None,
) -> int:
    """Run `python program arguments` as `num_ranks` ranks that write to `folder`; the exit code.

    `began_s` is when the command began, on the monotonic clock, for the first rank to count start-up from.
    The ranks are forks of `forks` where it was started as they have to be.
    Ranks that died start again and go on. Where no rank could, the files are brought up to date here.
    """
    remove_abandoned()  # by commands that were killed before; at the end by ranks that are killed here
    with ExitStack() as at_end, interrupted_by_signals():
        at_end.callback(remove_abandoned)
        variables = rank_variables(os.environ, device_type)
        if forks is not None and forks.variables != variables:
            forks.close()  # another device than expected
            forks = None
        try:
            with _environment(variables, began_s):
                config = LaunchConfig(
                    min_nodes=1,
                    max_nodes=1,
                    nproc_per_node=num_ranks,
                    run_id=uuid.uuid4().hex,
                    rdzv_backend=use_loopback(),
                    local_addr="localhost",
                    max_restarts=0,
                    monitor_interval=0.1,
                    logs_specs=no_logs(),
                )
                code, why = _attempts(config, [*program, *arguments], folder, forks)
        except (SignalException, KeyboardInterrupt):
            code, why = ExitCode.INTERRUPTED, "interrupted"
        if code:
            ignore_signals()
            (finish_quietly if why == STOPPED_BY_ERROR else finish_and_say)(folder, why)
    return code


@contextmanager
def _environment(variables: Mapping[str, str], began_s: float) -> Iterator[None]:
    """What the ranks inherit from this process, which is itself again afterwards."""
    before, level = dict(os.environ), logging.root.manager.disable
    # The agent's own account of a failure repeats what the rank has said already.
    logging.disable(logging.ERROR)
    os.environ.update(variables)
    os.environ.pop(FAILURE_ENV, None)
    os.environ[STARTED_ENV] = str(began_s)
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(before)


def _attempts(
    config: LaunchConfig, arguments: Sequence[str], folder: Path, forks: ForkServer | None
) -> tuple[int, str]:
    """Start the ranks until they end well or restarts lead nowhere; the exit code, and why it is not 0."""
    progress = [progress_in(folder)]
    while True:
        try:
            command = arguments if forks is None else forks.proxy(arguments)
            failures = run_ranks(config, [sys.executable, *command], stop_signal=signal.SIGKILL)
        finally:
            if forks is not None:
                forks.end_ranks()
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        if not codes:
            if not (folder / JOURNAL).is_file():
                print(f"{speaker()}: error: the ranks ended before the run began", file=sys.stderr)
            elif read(folder).ended:
                return ExitCode.OK, ""
            return ExitCode.NOT_MEASURED, "the ranks ended before the run did"
        if not is_restartable(codes):
            return next(c for c in codes.values() if not is_restartable({0: c})), STOPPED_BY_ERROR
        progress.append(progress_in(folder))
        if is_stuck(progress):
            why = failure_of(codes, what="start-up", out_of_memory=False).reason
            print(f"{speaker()}: error: gave up: {why}, {MOST_IDLE_ATTEMPTS} times in a row", file=sys.stderr)
            return ExitCode.NOT_MEASURED, "the ranks died"
        os.environ[STARTED_ENV] = str(time.monotonic())
