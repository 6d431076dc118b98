"""Make several hosts on one Linux machine, joined by links of a chosen rate, and run a command on them.

A host is a network namespace with one interface and its own share of the CPU cores and GPUs. Nothing of the
lab remains afterwards: not after success, failure, Ctrl-C or kill -9.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, TypeVar

from ..common.cli import Parser, make_main, resolve_command
from ..common.errors import UsageError
from ..common.numbers import format_count
from ..common.process import (
    POLL_INTERVAL_S,
    choose_huge_pages_env,
    get_allowed_cores,
    make_package_command,
    raise_on_signals,
    wait_or_kill,
)
from ..common.values import parse_positive_int
from ..machine.gpus import describe_gpus
from . import network
from .job import HostJob, choose_exit_code, make_host_environment, make_torchrun_environment
from .network import ShapedLink, name_host, parse_rate

T = TypeVar("T")

MIN_HOSTS, MAX_HOSTS = 2, 64
"""Two make a network; the upper end only stops a slip of the keyboard."""

FAILURE_GRACE_S = 3.0
"""Seconds that other hosts may go on once a host has failed: time to print their own errors."""

LOST_GRACE_S = 20.0
"""The same where a host was killed: the first rank waits for it a little, then writes its tables."""

PRINT_TIMEOUT_S = 10.0
"""Seconds that printing the output of an ended host may take."""

STOP_GRACE_S = 10.0
"""Seconds that the job may wind up after Ctrl-C or SIGTERM; a second one ends it at once."""


@dataclass(frozen=True)
class LabOptions:
    """Options of the command line."""

    num_hosts: int
    link: ShapedLink
    """Link of every host."""
    ranks_per_host: int
    command: list[str]
    quiet: bool


def parse(argv: Sequence[str]) -> LabOptions:
    """Parse the command line. Raises UsageError for a value that cannot be used, or no command after `--`."""
    parser = Parser(
        "lab",
        __doc__,
        usage="%(prog)s --hosts N --rate RATE [options] -- COMMAND ...",
        examples=(
            ("--hosts 2 --rate 1gbit -- python train.py", "a process per rank"),
            ("--hosts 2 --rate 1gbit -- torchrun train.py", "a torchrun per host"),
            ("--hosts 2 --ranks-per-host 2 --rate 200mbit -- python train.py", "four ranks"),
        ),
        exit_codes="the command's; 2 for a wrong command line; 128 + N after signal N.",
        details="The command is started once per rank, with RANK, MASTER_ADDR and the rest as under "
        "torchrun; torchrun itself once a host. docs/lab.md says what to know about the link.",
    )
    add = parser.add_argument
    add("--hosts", required=True, metavar="N", help="number of hosts, 2 to 64")
    add("--rate", required=True, help="rate of every host's link: 200mbit, 1gbit, 2.5gbit")
    add("--ranks-per-host", default="1", metavar="R", help="ranks on every host (default 1)")
    add("--quiet", action="store_true", help="do not say on stderr which lab was made")
    options, job = split_arguments(argv)
    given = parser.parse_args(options)
    if given.hosts not in map(str, range(MIN_HOSTS, MAX_HOSTS + 1)):
        raise UsageError(f"--hosts {given.hosts!r} is not a whole number from {MIN_HOSTS} to {MAX_HOSTS}")
    return LabOptions(
        num_hosts=int(given.hosts),
        link=ShapedLink(parse_rate(given.rate)),
        ranks_per_host=parse_positive_int(given.ranks_per_host),
        command=resolve_command(job, sys.executable),
        quiet=given.quiet,
    )


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the lab's own options and the command after `--`."""
    dashes = argv.index("--") if "--" in argv else len(argv)
    return [*argv[:dashes]], [*argv[dashes + 1 :]]


def run(options: LabOptions) -> int:
    """Make a lab, run the job in it, and return the job's exit code."""
    link = options.link
    prefixes = network.make_network(options.num_hosts, link)
    every_core = get_allowed_cores()
    cores = split_shares(every_core, options.num_hosts)
    gpu_shares = split_shares(list_visible_gpus(), options.num_hosts)
    if not options.quiet:
        line = summarize_lab(options.num_hosts, options.ranks_per_host, link, cores)
        print(line, file=sys.stderr, flush=True)
    run_id = f"lab-{secrets.token_hex(8)}"
    hosts: list[subprocess.Popen[str]] = []
    printers: list[threading.Thread] = []
    stopping = threading.Event()
    try:
        for host in range(options.num_hosts):
            job = HostJob(host, options.num_hosts, options.ranks_per_host, run_id, options.command)
            environment = os.environ | make_host_environment(host, link, gpu_shares[host])
            environment |= make_torchrun_environment(job)
            environment |= {} if gpu_shares[host] else choose_huge_pages_env(environment)
            os.sched_setaffinity(0, cores[host])  # a host has the cores of its first process
            hosts.append(_start(prefixes[host], job, environment))
        os.sched_setaffinity(0, every_core)
        for host, process in enumerate(hosts[1:], start=1):
            copying = (process.stdout, name_host(host), stopping)
            printers.append(threading.Thread(target=_print_under_name, args=copying, daemon=True))
            printers[-1].start()
        return choose_exit_code(_wait_for_hosts(hosts))
    except KeyboardInterrupt as stopped:
        stopping.set()
        for process in hosts:
            if process.poll() is None:
                os.killpg(process.pid, stopped.args[0])
        raise
    finally:
        with raise_on_signals():  # a second one ends it at once
            wait_or_kill(hosts, within_s=STOP_GRACE_S if stopping.is_set() else 0.0)
        deadline_s = time.monotonic() + PRINT_TIMEOUT_S  # what a host left behind may keep its pipe open
        for printer in printers:
            printer.join(max(0.0, deadline_s - time.monotonic()))


def _print_under_name(stream: IO[str], name: str, stopping: threading.Event) -> None:
    """Copy what a host says, line by line under its name, but what it says of its end."""
    for line in stream:
        if not stopping.is_set():
            print(f"{name}: {line.rstrip()}", file=sys.stderr, flush=True)


def split_shares(items: Sequence[T], num_hosts: int) -> list[list[T]]:
    """Split cores or GPUs into equal contiguous shares, one per host; fewer items than hosts are shared."""
    size = max(1, len(items) // num_hosts)
    starts = [host * size % len(items) for host in range(num_hosts)] if items else [0] * num_hosts
    return [list(items[start : start + size]) for start in starts]


def list_visible_gpus() -> list[str]:
    """List the GPUs that CUDA would see, by the names that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    return [gpu.uuid for gpu in describe_gpus() if gpu.uuid]


def summarize_lab(
    num_hosts: int, ranks_per_host: int, link: ShapedLink, cores: Sequence[Sequence[int]]
) -> str:
    """Say in one line what lab was made."""
    shared = ", shared between hosts" if len({core for share in cores for core in share}) < num_hosts else ""
    return (
        f"lab: {num_hosts} hosts of {format_count(ranks_per_host, 'rank')} each, link {link.label} each way, "
        f"{format_count(len(cores[0]), 'CPU core')} per host{shared}"
    )


def _start(prefix: Sequence[str], job: HostJob, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a host: host0 prints to the terminal, the others to a pipe; the job comes on standard input."""
    first = job.host == 0
    process = subprocess.Popen(
        [*prefix, *make_package_command("-m", "ddp_bench.bench.lab.host")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=None if first else subprocess.PIPE,
        stderr=None if first else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(asdict(job)) + "\n")
    return process


def _wait_for_hosts(hosts: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Wait for the hosts and return their exit codes in the order of ending.

    From the first failure on, the others have a grace period.
    """
    codes: list[int] = []
    left, deadline_s = list(hosts), math.inf
    while left and time.monotonic() < deadline_s:
        for process in [one for one in left if one.poll() is not None]:
            left.remove(process)
            codes.append(process.returncode)
            if codes[-1] and deadline_s == math.inf:
                grace_s = FAILURE_GRACE_S if codes[-1] > 0 else LOST_GRACE_S
                deadline_s = time.monotonic() + grace_s
                if codes[-1] < 0:
                    gone = f"{name_host(hosts.index(process))} was killed by signal {-codes[-1]}"
                    print(f"lab: {gone}; the others have {grace_s:g} s to close", file=sys.stderr, flush=True)
        time.sleep(POLL_INTERVAL_S)
    return codes


@make_main("lab")
def main(argv: list[str]) -> int:
    """Run the command: the job's exit code, 2 for a usage error, 128 + signal after a signal."""
    options = parse(argv)
    network.require_support()
    network.become_root(make_package_command("lab", *argv))
    try:
        with raise_on_signals():
            return run(options)
    except KeyboardInterrupt as stopped:
        return 128 + int(stopped.args[0])
