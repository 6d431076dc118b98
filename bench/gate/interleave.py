"""Measures two checkouts, or two environments, in turns on one machine: the strongest comparison there is.

Each is an ordinary `bench.run` of its own code and interpreter; a turn server lets one of them compute at a
time, in random order, so that a slow minute of the machine meets both.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddp_bench.bench.cluster.process import end_all, uninterrupted
from ddp_bench.bench.cluster.turns import turn_server
from ddp_bench.bench.errors import ExitCode, NotMeasuredError, UsageError
from ddp_bench.bench.gate.checkouts import Checkout, last_line

END_S = 60.0
"""How long an interrupted run may take to write its summary; one that has hung would take for ever."""


def measure_in_turns(
    checkouts: Sequence[Checkout], arguments: Sequence[str], folder: Path, *, seed: int = 0
) -> list[Path]:
    """Run `bench.run arguments` of all checkouts in turns; their results folders, in that order.

    Whatever is raised meanwhile, such as by a signal's handler, first ends the runs. Raises UsageError with
    the last line that a run said if it fails, NotMeasuredError where it could not measure what was asked for.
    """
    outs = [folder / checkout.name for checkout in checkouts]
    runs: list[subprocess.Popen[str]] = []
    with turn_server(len(checkouts), seed) as server, ThreadPoolExecutor(len(checkouts)) as reading:

        def ended(run: subprocess.Popen[str]) -> str:
            said = run.communicate()[1]
            server.client_left()  # one that failed at its start would be waited for
            return said

        try:
            for checkout, out in zip(checkouts, outs, strict=True):
                whole = [*arguments, "--quiet", "--out", str(out.absolute())]
                with uninterrupted():
                    runs.append(checkout.start("bench.run", whole, server.environment))
            accounts = list(reading.map(ended, runs))
        finally:
            end_all(runs, within_s=END_S)
    for checkout, run, account in zip(checkouts, runs, accounts, strict=True):
        if run.returncode != 0:
            measured_nothing = run.returncode == ExitCode.NOT_MEASURED
            error = NotMeasuredError if measured_nothing else UsageError
            said = last_line(account)
            raise error(f"the {checkout.name} side ended with status {run.returncode}: {said}")
    if server.turns == 0:
        raise UsageError("the two sides did not take turns; the older one may know nothing of them yet")
    return outs
