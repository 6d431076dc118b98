"""Make one checked file of a run, to hand on or to publish in results/baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddp_bench.bench import cli
from ddp_bench.bench.errors import ExitCode


def parser() -> cli.Parser:
    """The command line."""
    made = cli.Parser(
        prog=cli.command("archive"),
        description=__doc__,
        epilog="The rules are in docs/baselines.md. An archive is read like a results folder.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="results folder")
    made.add_argument("--out", type=Path, metavar="FILE.zip", help="(default: by machine and run)")
    doctor = made.add_mutually_exclusive_group()
    doctor.add_argument(
        "--doctor", type=Path, metavar="FILE", help="what bench.doctor --json said before the run"
    )
    doctor.add_argument(
        "--without-doctor", action="store_true", help="archive it though nobody looked at the machine"
    )
    made.add_argument("--host-names", action="store_true", help="keep the names of the hosts")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; the exit status."""
    return cli.guarded("archive", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    options = parser().parse_args(argv)
    from ddp_bench.bench.archive.write import write_archive  # pandas and scipy take a second

    print(write_archive(options))
    return ExitCode.OK
