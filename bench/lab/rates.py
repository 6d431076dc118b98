"""One job in labs of several rates, in turns: what the machine does meanwhile meets every rate.

Each rate has a lab of its own, a `bench.lab` process; the runs in them share a turn server, so that only one
of them computes at any moment.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TextIO

from ..cli import speaker
from ..errors import UsageError
from ..package import own_command
from ..process import end_all, ended_with_us, exit_codes
from ..sharing import turn_server
from .link import ShapedLink, job_exit_code
from .program import is_bench_run

PRINTED_S = 10.0
"""So long what an ended process has said may take to be printed."""


def commands(
    links: Sequence[ShapedLink], options: Sequence[str], command: Sequence[str]
) -> dict[str, list[str]]:
    """Write the `bench.lab` command of each link, by its rate; `options` are those that were given.

    Only `bench.run` asks the turn server for its turns: two of any other command would compute at once.
    Raises UsageError where the job cannot take turns, or two links have one rate.
    """
    if not is_bench_run(command):
        raise UsageError(
            f"several rates are measured in turns, which {speaker('run')} alone can; give one --rate"
        )
    names = [link.rate_label for link in links]
    if len(set(names)) < len(names):
        raise UsageError(f"--rate {','.join(names)} names one rate twice; give each once")
    # Of an option that stands twice the second counts.
    return {
        name: own_command("lab", *options, "--rate", name, "--")
        + [argument.replace("{rate}", name) for argument in command]
        for name in names
    }


def run_in_turns(
    labs: Mapping[str, Sequence[str]], environment: dict[str, str], *, stop_grace_s: float
) -> int:
    """Run the labs' commands in turns until all have ended, and return the job's exit code.

    Their output comes line by line under their names. A lab that fails is waited for no more: the others go
    on. Whatever is raised meanwhile, such as by a signal's handler, first ends the labs.
    """
    with turn_server(len(labs)) as server:
        running = {
            name: subprocess.Popen(
                ended_with_us(lab),  # if this process is killed, its labs end themselves
                env=environment | server.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            for name, lab in labs.items()
        }
        printers = [
            printed(stream, name, to)
            for name, lab in running.items()
            for stream, to in ((lab.stdout, sys.stdout), (lab.stderr, sys.stderr))
        ]
        try:
            codes = []
            for code in exit_codes([*running.values()]):
                server.client_left()
                codes.append(code)
        except BaseException:
            end_all([*running.values()], within_s=stop_grace_s)
            raise
        finally:
            all_printed(printers)
        return job_exit_code(codes)


def printed(
    stream: IO[str] | None, name: str, to: TextIO, wanted: Callable[[], bool] = lambda: True
) -> threading.Thread:
    """Copy `stream` line by line under a name, while it is `wanted`, in a thread of its own."""

    def forward() -> None:
        for line in stream or ():
            if wanted():
                print(f"{name}: {line.rstrip()}", file=to, flush=True)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    return thread


def all_printed(printers: Sequence[threading.Thread]) -> None:
    """Wait for the last lines of processes that have ended; what these left behind may keep a pipe open."""
    deadline_s = time.monotonic() + PRINTED_S
    for printer in printers:
        printer.join(max(0.0, deadline_s - time.monotonic()))
