"""One job in labs of several rates, in turns: what the machine does meanwhile meets every rate.

Each rate has a lab of its own, a `bench.lab` process; the runs in them share a turn server, so that only one
of them computes at any moment.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TextIO

from ddp_bench.bench.cli import speaker
from ddp_bench.bench.cluster.process import end_all, ended_with_us
from ddp_bench.bench.cluster.turns import turn_server
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.lab.command import is_bench_run
from ddp_bench.bench.lab.link import ShapedLink, job_exit_code
from ddp_bench.bench.package import own_command

PLACEHOLDER = "{rate}"


def commands(links: Sequence[ShapedLink], options: Sequence[str], command: Sequence[str]) -> list[list[str]]:
    """Write the `bench.lab` command of each link; `options` are those without `--rate`.

    Only `bench.run` asks the turn server for its turns: two of any other command would compute at once.

    Raises:
        UsageError: the job cannot take turns, or two links have one rate.
    """
    if not is_bench_run(command):
        raise UsageError(
            f"several rates are measured in turns, which {speaker('run')} alone can; give one --rate"
        )
    names = [link.rate_label for link in links]
    if len(set(names)) < len(names):
        raise UsageError(f"--rate {','.join(names)} names one rate twice; give each once")
    return [
        own_command("lab", *options, "--rate", name, "--")
        + [argument.replace(PLACEHOLDER, name) for argument in command]
        for name in names
    ]


def run_in_turns(
    labs: Sequence[Sequence[str]], names: Sequence[str], environment: dict[str, str], *, stop_grace_s: float
) -> int:
    """Run the labs' commands in turns until all have ended, and return the job's exit code.

    Their output comes line by line under their `names`. A lab that fails is waited for no more: the others go
    on. Whatever is raised meanwhile, such as by a signal's handler, first ends the labs.
    """
    with turn_server(len(labs)) as server:
        # If this process is killed, its labs end themselves.
        running = [
            subprocess.Popen(
                ended_with_us(lab),
                env=environment | server.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            for lab in labs
        ]
        printers = [
            threading.Thread(target=forward, args=(stream, name, to))
            for lab, name in zip(running, names, strict=True)
            for stream, to in ((lab.stdout, sys.stdout), (lab.stderr, sys.stderr))
        ]
        for printer in printers:
            printer.start()

        def ended(lab: subprocess.Popen[str]) -> int:
            code = lab.wait()
            server.client_left()
            return code

        try:
            with ThreadPoolExecutor(len(running)) as waiting:
                try:
                    codes = [
                        done.result() for done in as_completed(waiting.submit(ended, lab) for lab in running)
                    ]
                except BaseException:
                    end_all(running, within_s=stop_grace_s)
                    raise
            return job_exit_code(codes)
        finally:
            for printer in printers:
                printer.join()


def forward(stream: TextIO | None, name: str, to: TextIO, wanted: Callable[[], bool] = lambda: True) -> None:
    """Copy what comes from `stream`, line by line under a name, while it is `wanted`."""
    for line in stream or ():
        if wanted():
            print(f"{name}: {line.rstrip()}", file=to, flush=True)
