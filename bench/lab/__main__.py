"""Several hosts on one Linux machine, joined by a link of a chosen rate.

    python -m bench.lab --hosts 2 --rate 1gbit -- python -m bench.run --modes ddp --gpus 1,2

Every host is a network namespace with one interface, its own share of the CPU cores (and of the GPUs, where
there are some) and its own elastic launcher; the launchers meet over the lab's network as on a cluster. The
interfaces lead to one switch (a bridge), and every link is held to the rate both ways by `tc tbf`.

What to know about the link:

- The rate counts Ethernet frames: with packets of 1,500 bytes TCP delivers at most 95.6% of it
  (1,448 of every 1,514 bytes).
- A link that was idle lets its first 2 ms worth (at least 70 kB) pass at memory speed. Messages below
  that (250 KB at 1 Gbit/s) show the cost of software, not of the link; long transfers keep to the rate.
- TCP's congestion control is Reno: where there are no losses it keeps the link full.
- The bucket holds TCP's largest segment, so the kernel does not cut it in software and takes no core for it.
- The same cores move the bytes and compute: beyond a few Gbit/s few cores, not the link, are the limit.
- `--delay` holds what leaves a host (netem): one way, so a round trip takes twice as long.

`--rate 200mbit,1gbit` measures a `bench.run` at every rate, in turns: a lab of its own for each, only one of
which computes at any moment, so that whatever the machine does meets them all. `{rate}` in the job's
arguments stands for the rate, as in `--out results/{rate}`.

Needs Linux, iproute2, util-linux, and root or user namespaces. The network has no name outside the
lab and lives no longer than its processes: success, failure, Ctrl-C and kill -9 leave nothing behind.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import NoReturn

from bench.cli import Parser, guarded, positive_int
from bench.cluster.process import huge_pages_env
from bench.lab import devices, namespaces, rates, topology

FAILURE_GRACE_S = 3.0
"""How long the other hosts may go on, to say what they have to say, once a host has failed."""

LOST_GRACE_S = 20.0
"""The same where a host is gone without a word: the first rank waits a little, then closes its books."""

STOP_GRACE_S = 10.0
"""How long the job may wind up after Ctrl-C or SIGTERM; a second one ends it at once."""


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    num_hosts: int
    links: tuple[topology.Link, ...]
    """One per rate, all of one delay; each is a lab of its own."""
    ranks_per_host: int
    module_arguments: list[str]
    quiet: bool

    @property
    def options(self) -> list[str]:
        """The command line's options but `--rate`."""
        delay = ["--delay", self.links[0].delay_label] if self.links[0].delay_s else []
        quiet = ["--quiet"] if self.quiet else []
        hosts = ["--hosts", str(self.num_hosts), "--ranks-per-host", str(self.ranks_per_host)]
        return [*hosts, *delay, *quiet]


class Stopped(BaseException):
    """A signal asks the lab to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def parse(argv: Sequence[str]) -> Settings:
    """Settings from the command line.

    Raises:
        UsageError: a value that cannot be used, or no `python -m MODULE` after `--`.
    """
    parser = Parser(
        prog="python -m bench.lab",
        usage="%(prog)s --hosts N --rate RATE [options] -- python -m MODULE [args...]",
        description=(__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", required=True, metavar="N", help="number of hosts, 2 to 64")
    parser.add_argument(
        "--rate",
        required=True,
        help="rate of every host's link: 200mbit, 1gbit, 2.5gbit; several: 200mbit,1gbit",
    )
    parser.add_argument("--delay", help="one-way delay between hosts, if the kernel has netem: 500us, 1ms")
    parser.add_argument("--ranks-per-host", default="1", metavar="R", help="ranks on every host (default 1)")
    parser.add_argument("--quiet", action="store_true", help="do not say on stderr which lab was made")
    options = list(argv)
    command: list[str] = []
    if "--" in options:
        split = options.index("--")
        options, command = options[:split], options[split + 1 :]
    given = parser.parse_args(options)
    delay_s = topology.parse_delay(given.delay) if given.delay else 0.0
    return Settings(
        num_hosts=topology.parse_hosts(given.hosts),
        links=tuple(topology.Link(topology.parse_rate(rate), delay_s) for rate in given.rate.split(",")),
        ranks_per_host=positive_int(given.ranks_per_host),
        module_arguments=topology.module_arguments(command, sys.executable),
        quiet=given.quiet,
    )


def run(settings: Settings) -> int:
    """Make the lab, run the job in it, and return the job's exit code; of several rates, all in turns."""
    return _run_in_turns(settings) if len(settings.links) > 1 else _run(settings, settings.links[0])


def _run(settings: Settings, link: topology.Link) -> int:
    network = namespaces.Network(settings.num_hosts, link)
    cores = topology.shares(sorted(os.sched_getaffinity(0)), settings.num_hosts)
    gpus = topology.shares(devices.visible_gpus(), settings.num_hosts)
    if not settings.quiet:
        line = topology.summary(settings.num_hosts, settings.ranks_per_host, link, cores)
        print(line, file=sys.stderr, flush=True)
    run_id = f"lab-{secrets.token_hex(8)}"
    hosts: list[subprocess.Popen[str]] = []
    speakers: list[threading.Thread] = []
    muted = threading.Event()
    try:
        for host in range(settings.num_hosts):
            job = topology.HostJob(
                host, settings.num_hosts, settings.ranks_per_host, run_id, settings.module_arguments
            )
            environment = os.environ | topology.host_environment(host, link, gpus[host])
            environment |= {} if gpus[host] else huge_pages_env(environment)
            with devices.pinned(cores[host]):
                hosts.append(_start(network, job, environment))
        for host, process in enumerate(hosts[1:], start=1):
            said = (process.stdout, topology.host_name(host), sys.stderr, lambda: not muted.is_set())
            speaker = threading.Thread(target=rates.forward, args=said)
            speaker.start()
            speakers.append(speaker)
        return topology.job_exit_code(_wait(hosts))
    except Stopped as stopped:
        muted.set()
        for process in hosts:
            if process.poll() is None:
                os.killpg(process.pid, stopped.number)
        _wait(hosts, time.monotonic() + STOP_GRACE_S)
        raise
    finally:
        for process in hosts:
            process.kill()
        for process in hosts:
            process.wait()
        for speaker in speakers:
            speaker.join()


def _run_in_turns(settings: Settings) -> int:
    labs = rates.commands(settings.links, settings.options, settings.module_arguments)
    names = [link.rate_label for link in settings.links]
    return rates.run_in_turns(labs, names, namespaces.environment(), stop_grace_s=2 * STOP_GRACE_S)


def _start(
    network: namespaces.Network, job: topology.HostJob, environment: dict[str, str]
) -> subprocess.Popen[str]:
    """Start a host: host0 speaks for itself, the others to a pipe; the job follows on standard input."""
    first = job.host == 0
    process = subprocess.Popen(
        network.host_command(job.host, [sys.executable, "-m", "bench.lab.host"]),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=None if first else subprocess.PIPE,
        stderr=None if first else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - an invariant: it is a pipe
    with process.stdin as pipe:
        pipe.write(json.dumps(asdict(job)) + "\n")
    return process


def _wait(hosts: Sequence[subprocess.Popen[str]], deadline_s: float | None = None) -> list[int]:
    """Exit codes in the order of ending; from the first failure on, the others have a grace period."""
    codes: list[int] = []
    running = {os.pidfd_open(process.pid): process for process in hosts if process.returncode is None}
    while running:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ended, _, _ = select.select(list(running), [], [], left_s)
        if not ended:
            break
        for descriptor in ended:
            process = running.pop(descriptor)
            codes.append(process.wait())
            os.close(descriptor)
            if process.returncode < 0 and deadline_s is None:
                gone = (
                    f"{topology.host_name(hosts.index(process))} was killed by signal {-process.returncode}"
                )
                print(
                    f"lab: {gone}; the others have {LOST_GRACE_S:g} s to close", file=sys.stderr, flush=True
                )
                deadline_s = time.monotonic() + LOST_GRACE_S
        if any(codes) and deadline_s is None:
            deadline_s = time.monotonic() + FAILURE_GRACE_S
    return codes


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code is the job's, 2 for a usage error, 128 + signal after a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return guarded("bench.lab", lambda: _main(arguments))
    except Stopped as stopped:
        return 128 + stopped.number


def _main(arguments: list[str]) -> int:
    settings = parse(arguments)
    namespaces.require_support()
    namespaces.become_root([sys.executable, "-m", "bench.lab", *arguments])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
