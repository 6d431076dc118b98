"""All commands under one name: `ddp-bench COMMAND ...`."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Sequence

from .cli import Parser, command, did_you_mean, guarded
from .errors import ExitCode, UsageError
from .package import version_of

COMMANDS = {
    "run": "measure training in every mode, and how it scales",
    "tune": "find the bucket cap with which DDP trains fastest here",
    "predict": "predict step times on more devices or another network",
    "gate": "compare two runs, or two commits: did it become slower?",
    "doctor": "check whether this machine is fit to measure on",
    "lab": "run a command on several hosts made on this machine",
    "export": "write a run for another tool, or as one file to hand on",
    "report": "write the page of one or more runs again",
}
"""What each command does, in the order of `--help`."""


def parser() -> Parser:
    """The command line in front of a command's own."""
    made = Parser(
        prog=command(),
        usage="%(prog)s COMMAND [options]",
        description="Measure data-parallel training in PyTorch.",
        epilog="COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="store_true", help="print the versions of ddp-bench and torch")
    group = made.add_argument_group("commands")
    for name, what in COMMANDS.items():
        group.add_argument(name, nargs="?", help=what)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; its exit code."""
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return guarded("", lambda: _without_command(arguments))
    sys.argv[1:] = arguments[1:]
    module = "report" if name == "report" else f"bench.{name}"
    code: int = importlib.import_module(f"ddp_bench.{module}.main").main(arguments[1:])
    return code


def _without_command(arguments: Sequence[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        raise UsageError(f"unknown command {arguments[0]!r}; {did_you_mean(arguments[0], COMMANDS)}")
    if not parser().parse_args(arguments).version:
        raise UsageError(f"name a command: {', '.join(COMMANDS)}; see {command()} --help")
    found = [f"{package} {version_of(package) or 'not installed'}" for package in ("ddp-bench", "torch")]
    print(", ".join([*found, f"Python {platform.python_version()}"]))
    return ExitCode.OK
